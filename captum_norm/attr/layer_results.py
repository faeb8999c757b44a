"""Combines the results of single layers to measurements of stacks, and these to maps."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from captum_norm.attr.layer_norms import LayerResults
from captum_norm.attr.measurements import Measurements
from captum_norm.forward.stacking import maps_of_call, real_keys, real_queries, stacked
from captum_norm.functional import Baseline
from captum_norm.models.call import ModelCall
from captum_norm.models.layouts import Scope
from captum_norm.models.positions import Positions
from captum_norm.models.stacks import Role, StackName
from captum_norm.results.maps import AttributionMaps
from captum_norm.results.stacks import STACKS


def assemble(
    call: ModelCall,
    role: Role,
    layers: Sequence[tuple[int, LayerResults]],
    scopes: Sequence[Scope],
    baseline: Baseline | None,
) -> Measurements:
    """Stack the results of layers, given with their numbers; one may come several times.

    Each layer's maps are freed once copied, so not all of them are held twice.
    """
    results = list(dict.fromkeys(layer for _, layer in layers))
    places = [[place for place, (_, layer) in enumerate(layers) if layer is one] for one in results]
    queries, keys = call.positions_of(role)
    by_pair, by_query, by_key = {-2: queries, -1: keys}, {-1: queries}, {-1: keys}

    def field_of(name: str, axes: Mapping[int, Positions]) -> Tensor | None:
        if any(getattr(layer, name) is None for layer in results):
            return None
        return stacked((vars(layer).pop(name) for layer in results), axes, places)

    blocks = [layer.block for _, layer in layers if layer.block is not None]
    deltas = [torch.stack([delta for delta, _ in layer.deltas]).amax(0) for layer in results if layer.deltas]
    return Measurements(
        weights=field_of("weights", by_pair),
        norms={
            scope: stacked((layer.norms.pop(scope) for layer in results), by_pair, places)
            for scope in scopes
            if scope in results[0].norms
        },
        head_norms=field_of("head_norms", by_pair),
        transformed_norms=field_of("transformed_norms", by_key),
        mixing_ratio={
            name: stacked([layer.mixing_ratio[name] for layer in results], by_query, places)
            for name in (*scopes, "weights", "weights_res")
            if name in results[0].mixing_ratio
        },
        residual_norm=field_of("residual_norm", by_query),
        norm_scale=field_of("norm_scale", by_query),
        convergence_delta=stacked(deltas, {}, places) if deltas else None,
        real=real_queries(call, role, results[0].queries),
        real_keys=real_keys(call, role),
        crosses=role == "cross",
        tokens=call.texts_of("encoder" if role == "cross" and call.encoder is not None else role),
        query_tokens=call.texts_of("self" if call.encoder is None else "decoder") if role == "cross" else None,
        virtual=call.prefix.virtual_tokens,
        cached=call.without_rows,
        baseline=baseline,
        layer_names=tuple(block.name for block in blocks),
        layouts=tuple(block.layout for block in blocks),
        layer_scopes=tuple(block.scopes for block in blocks),
        modality=call.pictures.modality,
        patches=call.pictures.patches_among(results[0].queries),
        layers=[number for number, _ in layers],
    )


def maps_of_stacks(
    call: ModelCall,
    measured: Mapping[StackName, Measurements],
    choose: Callable[[StackName, Measurements], tuple[Tensor, Tensor | None]],
) -> AttributionMaps:
    """Combine the maps of all stacks; ``choose`` takes maps and mixing ratio from one stack's measurements."""
    chosen = {name: choose(name, stack) for name, stack in measured.items()}
    # A tower has pictures for examples.
    main = {name: stack for name, stack in measured.items() if name in STACKS} or measured
    ratios = [chosen[name][1] for name in main]
    deltas = [m.convergence_delta for m in main.values() if m.convergence_delta is not None]
    return maps_of_call(
        call,
        {name: stack for name, (stack, _) in chosen.items()},
        {name: stack.layers for name, stack in measured.items()},
        ratio=ratios[0] if len(ratios) == 1 else None,
        delta=torch.cat([delta.to(deltas[0].device) for delta in deltas], 1) if deltas else None,
    )
