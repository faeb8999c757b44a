"""Parts of :class:`captum_norm.AttributionMaps`: of one example, or of one layer."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from captum_norm.checks import as_index
from captum_norm.errors import InvalidInputError
from captum_norm.results.map_layers import STACKS, place_of_layer

T = TypeVar("T")


def example_of(maps: Any, example: int) -> Any:
    """Return maps of one example, as a batch of one without padding."""
    place = place_of("example", example, len(maps.real))
    real = maps.real[place]
    decoder_real = None if maps.decoder_real is None else maps.decoder_real[place]
    rows = real if decoder_real is None else decoder_real

    def part(stack: Tensor | None, queries: Tensor, keys: Tensor | None = None) -> Tensor | None:
        if stack is None:
            return None
        own = kept(stack[place : place + 1], -2, queries)
        return own if maps.segmented else kept(own, -1, queries if keys is None else keys)

    tokens = None if maps.tokens is None else [kept_entries(maps.tokens[place], real)]
    decoder_tokens = None if maps.decoder_tokens is None else [kept_entries(maps.decoder_tokens[place], rows)]
    pictures = [one for one in maps.patches if one.example == place]
    return replace(
        maps,
        encoder=part(maps.encoder, real),
        decoder=part(maps.decoder, rows),
        cross=part(maps.cross, rows, real),
        mixing_ratio=None if maps.mixing_ratio is None else kept(maps.mixing_ratio[place : place + 1], -1, real),
        convergence_delta=None if maps.convergence_delta is None else maps.convergence_delta[place : place + 1],
        real=real[real][None],
        tokens=tokens,
        decoder_tokens=decoder_tokens,
        decoder_real=None if decoder_real is None else decoder_real[decoder_real][None],
        towers=_own_towers(maps, place, [one.picture for one in pictures]),
        modality=None if maps.modality is None else [kept_entries(maps.modality[place], real)],
        patches=own_patches(maps.patches, place, real),
    )


def layer_of(maps: Any, layer: int) -> Any:
    """Return maps of one layer in each stack."""
    stacks = {name: stack for name in STACKS if (stack := getattr(maps, name)) is not None}
    stacks = stacks or dict(maps.towers)
    numbers = {name: maps.layers[name] for name in stacks}
    places = {name: place_of_layer(f"the {name} maps", layer, own) for name, own in numbers.items()}
    starts = accumulate(map(len, numbers.values()), initial=0)
    rows = [start + place for start, place in zip(starts, places.values(), strict=False)]
    first = next(iter(places.values()))
    delta, ratio = maps.convergence_delta, maps.mixing_ratio
    chosen = {name: stack[:, places[name], None] for name, stack in stacks.items()}
    return replace(
        maps,
        **{name: stack for name, stack in chosen.items() if name not in maps.towers},
        towers={name: stack for name, stack in chosen.items() if name in maps.towers},
        convergence_delta=None if delta is None else delta[:, rows],
        mixing_ratio=None if ratio is None else ratio[:, first, None],
        layers={name: [own[places[name]]] for name, own in numbers.items()},
    )


def padded(real: Tensor, size: int) -> Tensor:
    """What is real of ``size`` positions, the last of which are these; all queries together have one row."""
    before = size - real.shape[1]
    if before < 0:
        return real.new_ones(len(real), size)
    return torch.nn.functional.pad(real, (before, 0), value=True)


def place_of(what: str, index: int, count: int) -> int:
    """The index from 0 of one of ``count`` examples."""
    number = as_index(what, index)
    if not -count <= number < count:
        raise InvalidInputError(f"got {what} {number}; expected 0 to {count - 1}")
    return number % count


def kept(values: Tensor, axis: int, real: Tensor) -> Tensor:
    """Drop padding on an axis, whose last entries are those of the inputs; all queries together have one row."""
    before = values.shape[axis] - len(real)
    if before < 0:
        return values
    real = real.to(values.device)
    return values.index_select(axis, torch.cat([real.new_ones(before), real]).nonzero().flatten())


def kept_entries(entries: Sequence[T], real: Tensor) -> list[T]:
    """Drop padding of what has an entry for each position, the last ones those of the inputs."""
    before, flags = len(entries) - len(real), real.tolist()
    return [entry for at, entry in enumerate(entries) if at < before or flags[at - before]]


def own_patches(patches: Sequence[Any], example: int, real: Tensor) -> list[Any]:
    """The patches of an example's pictures in its sequence without padding."""
    places = (real.cumsum(0) - 1).cpu()
    own = [one for one in patches if one.example == example]
    return [
        replace(one, example=0, picture=number, positions=places[one.positions.cpu()]) for number, one in enumerate(own)
    ]


def _own_towers(maps: Any, example: int, pictures: list[int]) -> dict[str, Tensor]:
    found = {}
    for name, stack in maps.towers.items():
        if pictures and max(pictures) < len(stack):
            found[name] = stack[pictures]
        elif len(stack) == len(maps.real):
            found[name] = stack[example : example + 1]
    return found
