"""What is made sure of once for each model, by a few forward passes over an excerpt of its first inputs."""

from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.agreement import expect_same_output
from captum_norm.models.inputs import ModelCall
from captum_norm.models.mixing import mixing_layer


class _Verified(NamedTuple):
    """In which state a model was verified, and the layer that mixes positions otherwise than by attention, if any."""

    state: tuple[object, ...]
    mixing: str | None


_verified: WeakKeyDictionary[nn.Module, _Verified] = WeakKeyDictionary()


def verify(call: ModelCall, length: int) -> None:
    """Make sure that a model computes while it is explained what it computes by itself, unless that is known.

    Args:
        call: the model and its inputs.
        length: how many positions of the first example are enough.

    Raises:
        UnsupportedModelError: if it does not; see :func:`captum_norm.models.agreement.expect_same_output`.
    """
    model, state = call.model, _state(call.model)
    known = _verified.get(model)
    # One position has nothing to attend to but itself.
    if not call.positions.several or (known is not None and known.state == state):
        return
    try:
        mixing = _verify(call.excerpt(length))
    except InvalidInputError:
        # Some argument does not fit an excerpt.
        mixing = _verify(call)
    _verified[model] = _Verified(state, mixing)


def _verify(call: ModelCall) -> str | None:
    layer = mixing_layer(call, expect_same_output(call))
    names = {module: name for name, module in call.model.named_modules()}
    return None if layer is None else f'"{names[layer]}" ({type(layer).__name__})'


def _state(model: nn.Module) -> tuple[object, ...]:
    """What may change the functions that a model computes: its modules, how they attend, and in which dtypes."""
    modules = list(model.modules())
    configurations = {id(own): own for module in modules if (own := vars(module).get("config")) is not None}
    attention = [getattr(own, "_attn_implementation", None) for own in configurations.values()]
    dtypes = {p.dtype for module in modules for p in vars(module)["_parameters"].values() if p is not None}
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
