"""Estimates the size of the requested maps; refuses what will not fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from captum_norm.errors import NotEnoughMemoryError
from captum_norm.functional.norms import CACHED_ELEMENTS
from captum_norm.memory import MemoryBudget, free_bytes, readable
from captum_norm.models.inputs import ModelCall
from captum_norm.models.stacks import Place, Role, StackSize

# Thousands of maps with fewer entries than this fit any memory.
LARGE_MAP = 2**20
# How many tensors as large as a piece's hidden states exist while a layer is finished.
WORKING_TENSORS = 16
# What exists of one layer beside its map: the mask, and two maps on their way.
TRANSIENT_MAPS = 3


Sizes = Mapping[Role, StackSize]


def positions(call: ModelCall, role: Role, stack: StackSize) -> tuple[int, int]:
    """Q and K of a stack in a call, of which an excerpt may have been seen."""
    queries, keys = call.positions_of(role)
    return queries.length or stack.queries, keys.length or stack.keys


def total_queries(call: ModelCall, stacks: Sizes, twice: Callable[[Place], bool] | None = None) -> int:
    """How many queries all attention calls of a forward pass have together; those of some layers count ``twice``."""
    total = 0
    for role, stack in stacks.items():
        again = 0 if twice is None else sum(twice(Place(role, index)) for index in range(stack.layers))
        total += (stack.layers + again) * call.batch * positions(call, role, stack)[0]
    return total


def may_be_large(call: ModelCall) -> bool:
    """Whether the maps of a call are so large that there may be no room for those of all layers."""
    longest = max(call.positions.length or 0, call.decoder.length or 0)
    return call.batch * longest**2 >= LARGE_MAP


@dataclass(frozen=True)
class Kept:
    """What is kept of one stack.

    Attributes:
        layers: how many layers.
        maps: how many maps of each, those of single heads included.
        copied: how many layers' maps are copied out of these in the end.
    """

    layers: int
    maps: int
    copied: int = 0


def expect_room(call: ModelCall, stacks: Sizes, kept: Mapping[Role, Kept], accumulate: torch.dtype) -> None:
    """Refuse what cannot fit.

    Args:
        call: the call.
        stacks: the stacks of the model.
        kept: what is to be kept of which of them.
        accumulate: the least precise dtype of a map.

    Raises:
        NotEnoughMemoryError: if the maps take more than is free where they are kept.
    """
    for device in {stacks[role].device for role in kept}:
        here = {role: what for role, what in kept.items() if stacks[role].device == device}
        sizes = {role: _map_bytes(call, role, stacks[role], accumulate) for role in here}
        results = sum((what.layers * what.maps + what.copied) * sizes[role] for role, what in here.items())
        # Single maps become one tensor. A CPU gives its memory out as it is filled, while they are dropped.
        doubled = device.type != "cpu" and any(what.layers > 1 for what in here.values())
        needed = results * (1 + doubled) + TRANSIENT_MAPS * max(sizes.values())
        free = free_bytes(device)
        if free is not None and needed > free:
            layers, size = sum(what.layers for what in here.values()), readable(results)
            queries, keys = max(positions(call, role, stacks[role]) for role in here)
            raise NotEnoughMemoryError(
                f"the maps of {layers} layers over {call.batch} × {queries} × {keys} positions take {size}, for which "
                f"{readable(needed)} must be free, and {readable(free)} are free on {device}; ask for fewer layers at "
                "a time (layers= of maps(), layer= of attribute()), fewer examples, or without single heads"
            )


def _map_bytes(call: ModelCall, role: Role, stack: StackSize, accumulate: torch.dtype) -> int:
    return call.batch * prod(positions(call, role, stack)) * torch.promote_types(accumulate, stack.dtype).itemsize


def piece_elements(budget: MemoryBudget, like: Tensor) -> int:
    """Number of elements that each tensor of a piece may have: what fits the budget and, on a CPU, its cache."""
    size = WORKING_TENSORS * like.element_size()
    if like.device.type == "cpu":
        return budget.granted(like.device, CACHED_ELEMENTS * size) // size
    return budget[like.device] // size
