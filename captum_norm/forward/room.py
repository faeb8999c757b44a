"""Estimates the size of the requested maps; refuses what will not fit."""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from captum_norm.errors import NotEnoughMemoryError
from captum_norm.forward.request import Request
from captum_norm.functional.vectors import CACHED_ELEMENTS
from captum_norm.memory import MemoryBudget, free_bytes, readable
from captum_norm.models.call import ModelCall
from captum_norm.models.stacks import Place, Role, Sizes, StackSize

# Maps with fewer entries than this always fit.
LARGE_MAP = 2**20
# Number of tensors as large as a piece's hidden states that exist while a layer is finished.
WORKING_TENSORS = 16
# Tensors as large as a map that exist beside it: the mask, and two in the making.
TRANSIENT_MAPS = 3


def positions(call: ModelCall, role: Role, stack: StackSize) -> tuple[int, int]:
    """Q and K of a stack in a call, if only an excerpt was seen, too."""
    queries, keys = call.positions_of(role)
    return queries.length or stack.queries, keys.length or stack.keys


def total_queries(call: ModelCall, stacks: Sizes, chosen: Callable[[Place], bool]) -> int:
    """Number of queries of the attention calls of some layers in a forward pass."""
    layers = {role: sum(chosen(Place(role, index)) for index in range(stack.layers)) for role, stack in stacks.items()}
    return sum(count * call.batch * positions(call, role, stacks[role])[0] for role, count in layers.items())


def may_be_large(call: ModelCall) -> bool:
    """Whether the maps of a call may not fit."""
    longest = max(call.positions.length or 0, call.decoder.length or 0) + call.prefix.virtual + call.prefix.past
    return call.batch * longest**2 >= LARGE_MAP


def expect_room(call: ModelCall, request: Request, stacks: Sizes, accumulate: torch.dtype) -> None:
    """Refuse maps that will not fit.

    Args:
        call: the call.
        request: which maps are kept.
        stacks: the stacks of the model.
        accumulate: the least precise dtype of a map.

    Raises:
        NotEnoughMemoryError: if the maps take more than is free where they are kept.
    """
    kept = {role: stack for role, stack in stacks.items() if request.has_stack(role)}
    for device in {stack.device for stack in kept.values()}:
        here = {role: stack for role, stack in kept.items() if stack.device == device}
        sizes = {role: _map_bytes(call, role, stack, accumulate) for role, stack in here.items()}
        layers = {role: request.layer_count(stack) for role, stack in here.items()}
        results = sum(
            (layers[role] * request.maps_per_layer(stack) + request.copied) * sizes[role]
            for role, stack in here.items()
        )
        # Maps are copied into one tensor; a CPU allocates its pages as the maps are dropped.
        doubled = device.type != "cpu" and max(layers.values()) > 1
        needed = results * (1 + doubled) + TRANSIENT_MAPS * max(sizes.values())
        free = free_bytes(device)
        if free is not None and needed > free:
            queries, keys = max(positions(call, role, stack) for role, stack in here.items())
            raise NotEnoughMemoryError(
                f"the maps of {sum(layers.values())} layers over {call.batch} × {queries} × {keys} positions take "
                f"{readable(results)}, for which {readable(needed)} must be free, and {readable(free)} are free on "
                f"{device}; ask for fewer layers at a time (layers= of maps(), layer= of attribute()), fewer examples, "
                "or without single heads"
            )


def expect_room_for_gradients(call: ModelCall, stacks: Sizes) -> None:
    """Refuse a backward pass through attention whose weights, which it needs, will not fit.

    Raises:
        NotEnoughMemoryError: if they take more than is free on their device.
    """
    for device in {stack.device for stack in stacks.values()}:
        here = {role: stack for role, stack in stacks.items() if stack.device == device}
        heads = sum(stack.layers * stack.heads for stack in here.values())
        needed = sum(
            stack.layers * stack.heads * _map_bytes(call, role, stack, stack.dtype) for role, stack in here.items()
        )
        free = free_bytes(device)
        if free is not None and needed > free:
            queries, keys = max(positions(call, role, stack) for role, stack in here.items())
            raise NotEnoughMemoryError(
                f"the backward pass keeps attention weights of {heads} heads over {call.batch} × {queries} × {keys} "
                f"positions, at least {readable(needed)}, and {readable(free)} are free on {device}; pass fewer "
                "examples or a shorter input, or take a method without gradients, such as norm or alti"
            )


def _map_bytes(call: ModelCall, role: Role, stack: StackSize, accumulate: torch.dtype) -> int:
    return call.batch * prod(positions(call, role, stack)) * torch.promote_types(accumulate, stack.dtype).itemsize


def piece_elements(budget: MemoryBudget, like: Tensor) -> int:
    """Number of elements that each tensor of a piece may have: what fits the budget and, on a CPU, its cache."""
    size = WORKING_TENSORS * like.element_size()
    if like.device.type == "cpu":
        return budget.granted(like.device, CACHED_ELEMENTS * size) // size
    return budget[like.device] // size
