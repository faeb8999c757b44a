"""Caches what is known about a model while its modules, dtypes, devices, attention and autocast stay the same."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.libraries.library import Library
from captum_norm.models.libraries.registry import library_of
from captum_norm.models.modules import modules_of
from captum_norm.models.offloading import note_sharded, processes_of
from captum_norm.models.stacks import Sizes
from captum_norm.models.wrappers import refuse_spread

State = tuple[object, ...]


@dataclass(eq=False)
class KnownModel:
    """What is known about a model in one state.

    It holds no module, since one of them may hold the model.

    Attributes:
        state: the state.
        library: the library that the model is built with.
        mixing: the layer that mixes positions other than by attention, if a forward pass found one.
        sizes: sizes of its stacks of layers on an excerpt; None before the first forward pass in this state.
        processes: the processes that have its shards; None if it is in this one alone.
        causal: whether its only stack looks back alone, seen on an excerpt.
    """

    state: State
    library: Library
    mixing: str | None
    sizes: Sizes | None = None
    processes: Any = None
    causal: bool | None = None


Watched = frozenset[str]
_known: WeakKeyDictionary[nn.Module, dict[Watched, KnownModel]] = WeakKeyDictionary()


def known_model(model: nn.Module, watched: Watched = frozenset()) -> KnownModel:
    """Return what is known about a model, or of the stacks watched in a model with towers, in its present state.

    Raises:
        UnsupportedModelError: if threads run copies of the model on several devices.
    """
    every = _known.setdefault(model, {})
    state, known = _state(model), every.get(watched)
    if known is None or known.state != state:
        refuse_spread(model)
        note_sharded(model)
        # Whether layers mix positions is known of the state before until this one is verified.
        known = every[watched] = KnownModel(state, library_of(model), None if known is None else known.mixing)
        known.processes = processes_of(model)
    return known


def refuse_mixing(model: nn.Module) -> None:
    """Refuse to aggregate attention maps over layers if a layer is known to mix positions otherwise.

    Raises:
        UnsupportedModelError: with that layer's name.
    """
    mixing = [known.mixing for watched, known in _known.get(model, {}).items() if not watched or "self" in watched]
    found = next((layer for layer in mixing if layer is not None), None)
    if found is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} mixes positions by more than attention weights, in {found}: attention "
            "maps cannot be aggregated over its layers; explain single layers: attribute(layer=...), or maps() of a "
            "method that maps each layer on its own"
        )


def _state(model: nn.Module) -> State:
    """Modules, attention implementations, dtypes, devices, autocast: what a forward pass must be seen again for."""
    modules = modules_of(model)
    configurations = {id(own): own for module in modules if (own := vars(module).get("config")) is not None}
    attention = [getattr(own, "_attn_implementation", None) for own in configurations.values()]
    present = [p for module in modules for p in vars(module)["_parameters"].values() if p is not None]
    kinds = [(ref(module), type(module)) for module in modules]
    return kinds, attention, [(p.dtype, p.device) for p in present], torch.is_autocast_enabled()
