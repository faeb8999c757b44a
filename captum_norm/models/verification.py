"""Makes sure, once for each model, that explaining it does not change what it computes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.agreement import attending_plainly, expect_same_output
from captum_norm.models.inputs import ModelCall
from captum_norm.models.mixing import mixing_layer
from captum_norm.models.stacks import Role, StackSize

Result = TypeVar("Result")
State = tuple[object, ...]


class _Verified(NamedTuple):
    """What was found of a model.

    Attributes:
        state: the state in which it was.
        mixing: the layer that mixes positions otherwise than by attention, if any.
        sizes: how large its stacks of layers are over the positions that it was given.
    """

    state: State
    mixing: str | None
    sizes: Mapping[Role, StackSize]


_verified: WeakKeyDictionary[nn.Module, _Verified] = WeakKeyDictionary()


def verify(call: ModelCall, length: int) -> State:
    """Make sure that a model computes while it is explained what it computes by itself, unless that is known.

    Args:
        call: the model and its inputs.
        length: how many positions of the first example are enough.

    Returns:
        the state in which the model is, another one if its modules, dtypes or way to attend change.

    Raises:
        UnsupportedModelError: if it does not; see :func:`captum_norm.models.agreement.expect_same_output`.
    """
    model, state = call.model, _state(call.model)
    known = _verified.get(model)
    # One position has nothing to attend to but itself.
    if call.positions.several and (known is None or known.state != state):
        _verified[model] = on_excerpt(call, length, lambda excerpt: _Verified(state, *_verify(excerpt)))
    return state


def stack_sizes(call: ModelCall, length: int) -> Mapping[Role, StackSize]:
    """How large a model's stacks of layers are, over an excerpt of these inputs or of others that it was given before.

    Args:
        call: the model and its inputs.
        length: how many positions of the first example are enough.
    """
    known = _verified.get(call.model)
    if known is None or known.state != _state(call.model):
        return on_excerpt(call, length, _sizes)
    return known.sizes


def on_excerpt(call: ModelCall, length: int, work: Callable[[ModelCall], Result]) -> Result:
    """What some work gives for the first example's first positions, or where these do not fit alone, for all."""
    try:
        return work(call.excerpt(length))
    except InvalidInputError:
        return work(call)


def _sizes(call: ModelCall) -> Mapping[Role, StackSize]:
    with torch.no_grad(), attending_plainly(call) as stacks:
        call.run()
    return stacks.sizes


def _verify(call: ModelCall) -> tuple[str | None, Mapping[Role, StackSize]]:
    stacks = expect_same_output(call)
    layer = mixing_layer(call, stacks.queries)
    names = {module: name for name, module in call.model.named_modules()}
    return None if layer is None else f'"{names[layer]}" ({type(layer).__name__})', stacks.sizes


def _state(model: nn.Module) -> State:
    """What may change the functions that a model computes: its modules, how they attend, and in which dtypes."""
    modules = list(model.modules())
    configurations = {id(own): own for module in modules if (own := vars(module).get("config")) is not None}
    attention = [getattr(own, "_attn_implementation", None) for own in configurations.values()]
    dtypes = [p.dtype for module in modules for p in vars(module)["_parameters"].values() if p is not None]
    return [ref(module) for module in modules], attention, dtypes, torch.is_autocast_enabled()


def refuse_mixing(model: nn.Module) -> None:
    """Refuse to chain the attention of a model's layers if it was seen that others mix positions between them.

    Raises:
        UnsupportedModelError: with the first such layer.
    """
    known = _verified.get(model)
    if known is not None and known.mixing is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} mixes positions by more than attention weights, in {known.mixing}: maps of "
            "attention cannot be aggregated through its layers; explain single layers: attribute(layer=...) or maps() "
            "of a method whose maps are those of single layers"
        )
