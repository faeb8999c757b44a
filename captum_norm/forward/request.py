"""Says which maps are requested of a model, and checks that it has them and that they fit in memory."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from captum_norm.checks import check_bool, check_entries, check_indices, quoted
from captum_norm.errors import InvalidInputError, NotEnoughMemoryError, UnsupportedModelError
from captum_norm.forward.segments import Segments
from captum_norm.memory import free_bytes, readable
from captum_norm.models.call import ModelCall
from captum_norm.models.layouts import Scope
from captum_norm.models.model import Model
from captum_norm.models.stacks import TEXT_STACKS, Place, Role, Sizes, StackName, StackSize
from captum_norm.results.stacks import STACKS

# Tensors as large as a map that exist beside it: the mask, and two in the making.
TRANSIENT_MAPS = 3


@dataclass(frozen=True)
class Request:
    """Which maps are requested, and which number of the output if a method explains one.

    Attributes:
        layers: 0-based indices, negative ones from the last; all if None.
        stacks: of an encoder–decoder model, or of a model with towers; all, or those that read the tokens, if None.
        per_head: maps of single heads.
        target: the number of the output.
        position: where the output is read.
        scopes: how far vectors are carried.
        weights: attention weights, of each head with ``per_head``.
        head_norms: norms of each head's vectors.
        maps: norms of pairs; without them there are mixing ratios and lengths of transformed vectors alone.
        feed_forward: tensors of the feed-forward blocks, too.
        blocks: the parts of layers; without them there are attention weights alone.
        last: how many of the last positions have rows in the maps; all if None.
        segments: groups of keys that are the columns of the maps; each key is one if None.
    """

    layers: Sequence[int] | None = None
    stacks: Collection[StackName] | None = None
    per_head: bool = False
    target: Any = None
    position: Any = None
    scopes: Sequence[Scope] = ()
    weights: bool = False
    head_norms: bool = False
    maps: bool = True
    feed_forward: bool = False
    blocks: bool = True
    last: int | None = None
    segments: Segments | None = None

    def has_stack(self, role: Role) -> bool:
        """Whether a stack is requested."""
        return self.stacks is None or role in self.stacks

    def maps_per_layer(self, stack: StackSize) -> int:
        """Number of maps kept of each layer, those of single heads included."""
        weights = self.weights * (stack.heads if self.per_head else 1)
        return weights + (len(self.scopes) + self.head_norms * stack.heads if self.maps else 0)


def as_segments(call: ModelCall, request: Request, segments: object, together: object) -> Segments | None:
    """Check segments of the keys, (B, K) integers from −1 on; None and not ``together`` stays None."""
    together = check_bool("together", together)
    if segments is None and not together:
        return None
    call.refuse_padding("segments" if segments is not None else "together=True")
    roles = [role for role in STACKS if request.has_stack(role)]
    if call.encoder is not None and "decoder" in roles and len(roles) > 1:
        raise InvalidInputError(
            "got segments for an encoder–decoder model, whose stacks have keys of two sequences; choose "
            'stacks=["cross"] for those of the source, or stacks=["decoder"]'
        )
    if segments is None:
        nobody = torch.empty(0, dtype=torch.long, device="cpu")
        return Segments(nobody, 0, together, each=True, per_head=request.per_head)
    if not isinstance(segments, Tensor) or segments.dim() != 2 or segments.is_floating_point() or segments.is_complex():
        raise InvalidInputError(f"got segments {quoted(segments)}; expected a tensor of integers, (batch, keys)")
    if len(segments) != call.batch or not segments.numel() or int(segments.min()) < -1 or int(segments.max()) < 0:
        numbers = f"with numbers from {int(segments.min())} to {int(segments.max())}" if segments.numel() else "without"
        raise InvalidInputError(
            f"got segments of shape {tuple(segments.shape)} {numbers} for {call.batch} examples; expected a number "
            "from 0 on for each key, and -1 for no segment"
        )
    return Segments(segments.long(), int(segments.max()) + 1, together, per_head=request.per_head)


def as_layers(layers: object) -> list[int] | None:
    """Check indices of layers, any sequence of integers; None stays None."""
    return None if layers is None else check_indices("layer", layers)


def layer_indices(layers: Sequence[int] | None, count: int) -> list[int]:
    """Resolve indices into ``count`` layers, negative ones from the last; None means all."""
    chosen = range(count) if layers is None else layers
    if not chosen:
        raise InvalidInputError(f"got an empty selection of layers; the model has {count}")
    for layer in chosen:
        if not -count <= layer < count:
            raise InvalidInputError(f"got layer {layer}; the model has {count}: 0 to {count - 1}, or -{count} to -1")
    return [layer % count for layer in chosen]


def as_stacks(facts: Model, stacks: object) -> list[Role]:
    """Check names of the stacks of an encoder–decoder model or of one with towers, any sequence."""
    found = check_entries("stacks", stacks, "names")
    names = dict(zip(STACKS, STACKS, strict=True))
    if facts.has_towers:
        names = dict(_TOWER_STACKS) | {stack: stack for name in facts.towers for stack in (name, f"{name} cross")}
    if not found or not all(isinstance(name, str) and name in names for name in found):
        raise InvalidInputError(f"got stacks={quoted(stacks)}; expected some of {', '.join(names)} in a list")
    if not facts.has_towers and facts.decoder is None:
        raise InvalidInputError(
            f"got stacks={quoted(stacks)}, but {type(facts.module).__name__} is no encoder–decoder model and has no "
            "towers"
        )
    return list(dict.fromkeys(names[name] for name in found))


# The stack that reads the tokens is "encoder" or "decoder" in results, by its direction.
_TOWER_STACKS: Mapping[StackName, Role] = {"text": "self", "encoder": "self", "decoder": "self", "cross": "cross"}


def refuse_towers(method: str, call: ModelCall) -> None:
    """Refuse, for a method, the towers of a model, and text whose layers attend to a tower's positions, too."""
    beside = [name for name in call.facts.watched if name not in TEXT_STACKS]
    if beside:
        raise InvalidInputError(f"got the stack {' and '.join(beside)}; {method} explains the text alone")
    if "cross" in (call.facts.excerpt.sizes or ()):
        raise UnsupportedModelError(
            f"got {type(call.model).__name__}, whose text attends to a tower's positions, too; {method} explains one "
            "stack of layers: take a method whose maps have .decoder and .cross, such as NormAttribution"
        )


def positions(call: ModelCall, role: Role, stack: StackSize) -> tuple[int, int]:
    """Q and K of a stack in a call, if only an excerpt was seen, too."""
    queries, keys = call.positions_of(role)
    return queries.length or stack.queries, keys.length or stack.keys


def total_queries(call: ModelCall, stacks: Sizes, chosen: Callable[[Place], bool]) -> int:
    """Number of queries of the attention calls of some layers in a forward pass."""
    layers = {role: sum(chosen(Place(role, index)) for index in range(stack.layers)) for role, stack in stacks.items()}
    return sum(count * call.batch * positions(call, role, stacks[role])[0] for role, count in layers.items())


def expect_room(call: ModelCall, request: Request, stacks: Sizes, accumulate: torch.dtype) -> None:
    """Refuse maps that will not fit."""
    for device, here in _by_device({role: stack for role, stack in stacks.items() if request.has_stack(role)}):
        sizes = {role: _map_bytes(call, role, stack, accumulate) for role, stack in here.items()}
        layers = {role: len(request.layers or range(stack.layers)) for role, stack in here.items()}
        results = sum(layers[role] * request.maps_per_layer(stack) * sizes[role] for role, stack in here.items())
        # Maps are copied into one tensor; a CPU allocates its pages as the maps are dropped.
        doubled = device.type != "cpu" and max(layers.values()) > 1
        needed = results * (1 + doubled) + TRANSIENT_MAPS * max(sizes.values())
        what = f"the maps of {sum(layers.values())} layers"
        size = f" take {readable(results)}, for which {readable(needed)} must be free"
        advice = "ask for fewer layers at a time (layers= of maps(), layer= of attribute()), fewer examples, or without"
        _expect_free(call, here, device, needed, what, size, f"{advice} single heads")


def _by_device(stacks: Sizes) -> Iterator[tuple[torch.device, dict[Role, StackSize]]]:
    for device in {stack.device for stack in stacks.values()}:
        yield device, {role: stack for role, stack in stacks.items() if stack.device == device}


def _expect_free(
    call: ModelCall, stacks: Sizes, device: torch.device, needed: int, what: str, size: str, advice: str
) -> None:
    free = free_bytes(device)
    if free is not None and needed > free:
        queries, keys = max(positions(call, role, stack) for role, stack in stacks.items())
        raise NotEnoughMemoryError(
            f"{what} over {call.batch} × {queries} × {keys} positions{size}, and {readable(free)} are free on "
            f"{device}; {advice}"
        )


def _map_bytes(call: ModelCall, role: Role, stack: StackSize, accumulate: torch.dtype) -> int:
    return call.batch * prod(positions(call, role, stack)) * torch.promote_types(accumulate, stack.dtype).itemsize
