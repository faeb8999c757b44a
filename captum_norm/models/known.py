"""Keeps what is known about a model while its modules, their dtypes and its attention implementation stay the same."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.libraries.library import Library
from captum_norm.models.libraries.registry import library_of
from captum_norm.models.main_input import SequenceReader
from captum_norm.models.stacks import Sizes
from captum_norm.models.wrappers import refuse_spread, unwrapped

State = tuple[object, ...]


@dataclass(eq=False)
class KnownModel:
    """What is known about a model in one state.

    Attributes:
        state: the state.
        library: the library that the model is built with.
        parameters: the parameters of its forward function.
        encoder: of an encoder–decoder model; None for any other model.
        readers: what reads its input sequences: the model, or its encoder and its decoder.
        sizes: the sizes of its stacks of layers on an excerpt; None until a forward pass has shown them.
        mixing: the layer that mixes positions other than by attention, if that pass has shown one.
    """

    state: State
    library: Library
    parameters: Mapping[str, inspect.Parameter]
    encoder: nn.Module | None
    readers: tuple[SequenceReader, ...]
    sizes: Sizes | None = None
    mixing: str | None = None


_known: WeakKeyDictionary[nn.Module, KnownModel] = WeakKeyDictionary()


def known_model(model: nn.Module) -> KnownModel:
    """What is known about a model in its present state.

    Raises:
        UnsupportedModelError: for a model whose threads run copies of it on several devices.
    """
    state, known = _state(model), _known.get(model)
    if known is None or known.state != state:
        refuse_spread(model)
        library = library_of(model)
        halves = library.halves(model)
        readers = tuple(SequenceReader.of(part, library.embeddings(part)) for part in halves or (model,))
        parameters = inspect.signature(unwrapped(model).forward).parameters
        known = KnownModel(state, library, parameters, None if halves is None else halves[0], readers)
        _known[model] = known
    return known


def refuse_mixing(model: nn.Module) -> None:
    """Refuse to chain the attention of a model's layers if it was seen that others mix positions between them.

    Raises:
        UnsupportedModelError: with the first such layer.
    """
    known = _known.get(model)
    if known is not None and known.mixing is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} mixes positions by more than attention weights, in {known.mixing}: maps of "
            "attention cannot be aggregated through its layers; explain single layers: attribute(layer=...) or maps() "
            "of a method whose maps are those of single layers"
        )


def _state(model: nn.Module) -> State:
    """What may change the functions that a model computes: its modules, how they attend, and in which dtypes."""
    modules = list(model.modules())
    configurations = {id(own): own for module in modules if (own := vars(module).get("config")) is not None}
    attention = [getattr(own, "_attn_implementation", None) for own in configurations.values()]
    dtypes = [p.dtype for module in modules for p in vars(module)["_parameters"].values() if p is not None]
    return [ref(module) for module in modules], attention, dtypes, torch.is_autocast_enabled()
