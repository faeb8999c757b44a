"""Caches what is known about a model until its modules, dtypes or attention implementation change."""

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
        parameters: parameters of its forward function.
        encoder: the encoder of an encoder–decoder model; None for any other model.
        readers: the model, or its encoder and its decoder, as readers of input sequences.
        sizes: sizes of its stacks of layers on an excerpt; None before the first forward pass.
        mixing: the layer that mixes positions other than by attention, if that pass found one.
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
    """Return what is known about a model in its present state.

    Raises:
        UnsupportedModelError: if threads run copies of the model on several devices.
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
    """Refuse to aggregate attention maps over layers if a layer is known to mix positions otherwise.

    Raises:
        UnsupportedModelError: with that layer's name.
    """
    known = _known.get(model)
    if known is not None and known.mixing is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} mixes positions by more than attention weights, in {known.mixing}: attention "
            "maps cannot be aggregated over its layers; explain single layers: attribute(layer=...), or maps() of a "
            "method that maps each layer on its own"
        )


def _state(model: nn.Module) -> State:
    """Modules, attention implementations and dtypes: what determines the function that a model computes."""
    modules = list(model.modules())
    configurations = {id(own): own for module in modules if (own := vars(module).get("config")) is not None}
    attention = [getattr(own, "_attn_implementation", None) for own in configurations.values()]
    dtypes = [p.dtype for module in modules for p in vars(module)["_parameters"].values() if p is not None]
    return [ref(module) for module in modules], attention, dtypes, torch.is_autocast_enabled()
