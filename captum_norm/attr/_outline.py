"""How large what is asked for will be, seen on the first positions of the inputs, and whether there is room for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError, NotEnoughMemoryError
from captum_norm.memory import free_bytes, readable
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import ModelCall
from captum_norm.models.stacks import Place, Role
from captum_norm.recording import BlockTensors, record

CPU = torch.device("cpu")
PROBE_LENGTH = 16
# Thousands of maps with fewer entries than this fit any memory.
LARGE_MAP = 2**20
# What exists of one layer beside its map: the mask, and two maps on their way.
TRANSIENT_MAPS = 3


@dataclass
class Stack:
    """One stack of layers in one forward pass.

    Attributes:
        layers: L.
        heads: H.
        positions: Q and K.
        dtype: what its values are in.
        device: where its first layer is.
    """

    layers: int = 0
    heads: int = 0
    positions: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def begin(self, values: Tensor, heads: int, queries: int, *, cross: bool) -> None:  # noqa: ARG002
        if not self.layers:
            self.heads, self.positions = heads, (queries, values.shape[2])
            self.dtype, self.device = values.dtype, values.device
        self.layers += 1

    def consume(self, weights: Tensor, part: Part) -> None:
        """Only their number is of interest."""

    def finish(self, tensors: BlockTensors | None) -> None:
        """Nothing is kept."""


Outline = Mapping[Role, Stack]


def outline(call: ModelCall) -> Outline:
    """The stacks of a model; one forward pass over an excerpt of the inputs."""
    try:
        return _counted(call.excerpt(PROBE_LENGTH))
    except InvalidInputError:
        # Some argument does not fit an excerpt.
        return _counted(call)


def _counted(call: ModelCall) -> Outline:
    stacks: dict[Role, Stack] = {}

    def make(place: Place, _: Block | None) -> Stack:
        return stacks.setdefault(place.role, Stack())

    with torch.no_grad():
        record(call, make, None)
    return stacks


def positions(call: ModelCall, role: Role, stack: Stack) -> tuple[int, int]:
    """Q and K of a stack in a call, of which the outline may have seen an excerpt."""
    queries, keys = call.positions_of(role)
    return queries.length or stack.positions[0], keys.length or stack.positions[1]


def total_queries(call: ModelCall, stacks: Outline, twice: Callable[[Place], bool] | None = None) -> int:
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


def expect_room(call: ModelCall, stacks: Outline, kept: Mapping[Role, Kept], accumulate: torch.dtype) -> None:
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


def _map_bytes(call: ModelCall, role: Role, stack: Stack, accumulate: torch.dtype) -> int:
    return call.batch * prod(positions(call, role, stack)) * torch.promote_types(accumulate, stack.dtype).itemsize
