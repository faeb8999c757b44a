"""Puts the results of single layers together, at the positions that the user's inputs had."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from captum_norm.models.call import ModelCall
from captum_norm.models.positions import Positions
from captum_norm.models.stacks import Role, StackName
from captum_norm.results.maps import AttributionMaps, SourceAndPrefix
from captum_norm.results.stacks import STACKS


def stacked(
    parts: Iterable[Tensor], axes: Mapping[int, Positions], places: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Stack each layer's (B, ...) to (B, L, ...) on the device of the first layer, one layer at a time.

    Args:
        parts: of one layer or more.
        axes: the axes along positions, to be restored to the user's order, 0 at padding.
        places: which of the L places each layer takes; the next one if None.
    """
    if places is None:
        parts = list(parts)
        places = [[place] for place in range(len(parts))]
    count = sum(map(len, places))
    whole: Tensor | None = None
    for part, where in zip(parts, places, strict=True):
        layer = part.unsqueeze(1)
        for axis, positions in axes.items():
            if positions.real is not None:
                layer = positions.restore(layer, axis)
        if count == 1:
            return layer
        if whole is None:
            whole = layer.new_empty(len(layer), count, *layer.shape[2:])
        for place in where:
            whole[:, place] = layer.squeeze(1).to(whole.device)
    return cast(Tensor, whole)  # no selection of layers is empty


def real_queries(call: ModelCall, role: Role, count: int) -> Tensor:
    """Mask of the real ones among a stack's ``count`` queries, (B, Q), in the user's order."""
    queries, _ = call.positions_of(role)
    if queries.real is None:
        return torch.ones(call.batch, count, dtype=torch.bool, device="cpu")
    return queries.shift_back(queries.real, -1)


def real_keys(call: ModelCall, role: Role) -> Tensor | None:
    """Mask of the real ones among a stack's keys, (B, K), in the user's order; None if all are."""
    _, keys = call.positions_of(role)
    return None if keys.real is None else keys.shift_back(keys.real, -1)


def stack_name(role: Role, *, causal: bool) -> StackName:
    """Name of a stack; that of a model with one stack follows from its direction."""
    return role if role != "self" else "decoder" if causal else "encoder"


def stacked_maps(
    call: ModelCall,
    maps: Mapping[Role, Sequence[tuple[int, Tensor]]],
    deltas: Mapping[Role, Sequence[Tensor]],
    *,
    causal: bool,
    segmented: bool = False,
) -> AttributionMaps:
    """Put the maps of all stacks together, in the user's order of positions.

    Args:
        call: the call that was explained.
        maps: each layer's number and map, (B, [H,] Q, K).
        deltas: each layer's completeness error, (B,), empty for a method without one.
        causal: whether the model is causal.
        segmented: whether the columns are segments.
    """
    stacks: dict[StackName, Tensor] = {}
    for role, layers in maps.items():
        queries, keys = call.positions_of(role)
        # Without padding, which segments exclude, nothing is to be restored.
        axes = {} if segmented else {-2: queries, -1: keys}
        stacks[stack_name(role, causal=causal)] = stacked([layer for _, layer in layers], axes)
    # A tower has pictures for examples.
    main = [role for role in maps if stack_name(role, causal=causal) in STACKS] or list(maps)
    every = [delta for role in main for delta in deltas.get(role, ())]
    return maps_of_call(
        call,
        stacks,
        {stack_name(role, causal=causal): [number for number, _ in layers] for role, layers in maps.items()},
        delta=stacked(every, {}) if every else None,
        segmented=segmented,
    )


def maps_of_call(
    call: ModelCall,
    stacks: Mapping[StackName, Tensor],
    layers: Mapping[StackName, Sequence[int]],
    *,
    ratio: Tensor | None = None,
    delta: Tensor | None = None,
    segmented: bool = False,
) -> AttributionMaps:
    """Say of which positions and layers maps are.

    Args:
        call: the call that was explained.
        stacks: the maps of each stack, (B, L, [H,] Q, K).
        layers: the numbers of the L layers of each.
        ratio: mixing ratios, (B, L, Q).
        delta: completeness errors, (B, L).
        segmented: whether the columns are segments.
    """
    encoder, decoder, cross = (stacks.get(name) for name in STACKS)
    tokens, decoder_tokens, decoder_real = call.texts_of("self"), None, None
    if call.encoder is None:
        name, maps = next(((name, maps) for name, maps in stacks.items() if name in STACKS), next(iter(stacks.items())))
        real = real_queries(call, "self" if name in ("encoder", "decoder") else name, maps.shape[-2])
        if cross is not None:  # to a tower's positions
            decoder_real = real_queries(call, "cross", cross.shape[-2])
    elif encoder is None and cross is None:
        real, tokens = real_queries(call, "decoder", stacks["decoder"].shape[-2]), call.texts_of("decoder")
    else:
        real, tokens = _real_source(call, encoder, cross), call.texts_of("encoder")
        rows = decoder if cross is None else cross
        if rows is not None:
            decoder_real, decoder_tokens = real_queries(call, "decoder", rows.shape[-2]), call.texts_of("decoder")
    return AttributionMaps(
        encoder=encoder,
        decoder=decoder,
        cross=cross,
        mixing_ratio=ratio,
        convergence_delta=delta,
        real=real,
        tokens=tokens,
        segmented=segmented,
        virtual=call.prefix.virtual_tokens,
        cached=call.without_rows,
        decoder_real=decoder_real,
        decoder_tokens=decoder_tokens,
        towers={name: stack for name, stack in stacks.items() if name not in STACKS},
        modality=call.pictures.modality,
        patches=call.pictures.patches_among(real.shape[1]),
        layers=layers,
    )


def _real_source(call: ModelCall, encoder: Tensor | None, cross: Tensor | None) -> Tensor:
    """Mask of the real positions of an encoder–decoder model's source, (B, S), in the user's order."""
    if encoder is not None:
        return real_queries(call, "encoder", encoder.shape[-2])
    _, keys = call.positions_of("cross")
    mask = real_keys(call, "cross")
    count = cast(Tensor, cross).shape[-1] if keys.length is None else keys.length
    return torch.ones(call.batch, count, dtype=torch.bool, device="cpu") if mask is None else mask


def of_last_rows(call: ModelCall, maps: AttributionMaps) -> AttributionMaps:
    """Cut whole maps to the rows that a call asks for."""
    count, stacks = call.last, (maps.encoder, maps.decoder, maps.cross)
    if count is None or all(stack is None for stack in stacks):
        return maps

    def cut(rows: Tensor | None, axis: int) -> Tensor | None:
        return None if rows is None else rows.narrow(axis, rows.shape[axis] - count, count).clone()

    # An encoder keeps all its rows, unless it is the whole model.
    whole = call.encoder is not None and maps.encoder is not None
    source = call.encoder is not None and (maps.encoder is not None or maps.cross is not None)
    return replace(
        maps,
        encoder=maps.encoder if whole else cut(maps.encoder, -2),
        decoder=cut(maps.decoder, -2),
        cross=cut(maps.cross, -2),
        mixing_ratio=maps.mixing_ratio if whole else cut(maps.mixing_ratio, -1),
        real=maps.real if source else cast(Tensor, cut(maps.real, -1)),
        decoder_real=cut(maps.decoder_real, -1),
        cached=call.without_rows,
    )


def scores_of_inputs(call: ModelCall, scores: Any) -> Any:
    """Drop the scores of virtual tokens and cached positions, which come before those of the inputs."""
    if isinstance(scores, SourceAndPrefix):
        return SourceAndPrefix(call.positions.last(scores.source), call.decoder.last(scores.prefix))
    return call.positions.last(scores)
