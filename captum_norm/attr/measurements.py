"""Puts the measurements of single layers together, by stack."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_norm.attr.norm_reducer import MeasuredLayer
from captum_norm.forward.stacking import real_queries, stacked
from captum_norm.functional import Baseline
from captum_norm.maps import AttributionMaps
from captum_norm.models.inputs import ModelCall, Positions
from captum_norm.models.layouts import Layout, Scope
from captum_norm.models.stacks import Role, StackName


@dataclass(frozen=True)
class Measurements:
    """What one forward pass gave of one stack of layers; every entry at a padded position is exactly 0.

    In cross-attention keys are the encoder's positions, queries the decoder's. There the residual stream belongs to no
    key: norms at ``attn_res`` are those at ``attn``, and a mixing ratio sets all that attention adds against it.

    Attributes:
        weights: attention weights, (B, L, Q, K) averaged over heads or (B, L, H, Q, K) per head; None if not asked for.
        norms: for each scope the norms ‖v_ij‖ of the vectors summed over heads, (B, L, Q, K); empty without maps.
        head_norms: ‖α_ij f_h(x_j)‖, (B, L, H, Q, K); None if not asked for, or without maps.
        transformed_norms: ‖f_h(x_j)‖, (B, L, H, K); None if not asked for.
        mixing_ratio: (B, L, Q) for each scope, and for ``"weights"`` and ``"weights_res"`` (of A and of (A + I)/2) if
            weights were asked for.
        residual_norm: ‖r_i‖ of the residual stream that joins attention's output, (B, L, Q): what attention reads, in a
            post-norm layer; None without scopes up to the attention block's end.
        norm_scale: 1/σ of the normalisation behind that sum, (B, L, Q); None without a scope that goes through one.
        convergence_delta: relative completeness error, (B, L); None if only weights were asked for.
        real: True at real query positions, (B, Q).
        tokens: the tokens' texts, if the inputs brought them.
        baseline: where the paths of the integrated gradients started; None without scopes through a feed-forward
            network.
        layer_names: the names in the model of the L modules in which the blocks were found; empty without scopes.
        layouts: the arrangement of each of them.
        layer_scopes: the scopes of each of them; those through a feed-forward network only if one was asked for.
    """

    weights: Tensor | None
    norms: Mapping[Scope, Tensor]
    head_norms: Tensor | None
    transformed_norms: Tensor | None
    mixing_ratio: Mapping[str, Tensor]
    residual_norm: Tensor | None
    norm_scale: Tensor | None
    convergence_delta: Tensor | None
    real: Tensor
    tokens: Sequence[Sequence[str]] | None
    baseline: Baseline | None = None
    layer_names: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    layer_scopes: tuple[tuple[Scope, ...], ...] = ()


def assemble(
    call: ModelCall,
    role: Role,
    layers: Mapping[int, MeasuredLayer],
    indices: Sequence[int],
    scopes: Sequence[Scope],
    baseline: Baseline | None,
) -> Measurements:
    """The results of one stack: of each layer in ``layers``, in the order of ``indices``.

    The layers give their maps up one by one, so that all of them are never held twice.
    """
    weights = [layer.weights for layer in layers.values() if layer.weights is not None]
    norms = [layer.norms for layer in layers.values() if layer.norms is not None]
    places = [[place for place, index in enumerate(indices) if index == layer] for layer in layers]
    queries, keys = call.positions_of(role)
    count = weights[0].map.shape[-2] if weights else next(iter(layers.values())).positions

    def stack(parts: Iterable[Tensor], axes: Mapping[int, Positions]) -> Tensor:
        return stacked(parts, axes, places)

    def maps(parts: Iterable[Tensor]) -> Tensor:
        return stack(parts, {-2: queries, -1: keys})

    scales = [layer.norm_scale for layer in norms if layer.norm_scale is not None]
    blocks = [block for index in indices if (block := layers[index].block) is not None]
    per_head, with_maps = bool(norms) and norms[0].per_head, not norms or norms[0].with_maps
    ratios: dict[str, Tensor] = {
        scope: stack([layer.mixing_ratio(scope) for layer in layers.values()], {-1: queries}) for scope in scopes
    }
    if weights:
        ratios["weights"] = stack([layer.mixing_ratio(residual=False) for layer in weights], {-1: queries})
        ratios["weights_res"] = stack([layer.mixing_ratio(residual=True) for layer in weights], {-1: queries})
    return Measurements(
        weights=maps(vars(layer).pop("map") for layer in weights) if weights else None,
        norms={scope: maps(layer.take_map(scope) for layer in layers.values()) for scope in scopes if with_maps},
        head_norms=maps(vars(layer).pop("head_map") for layer in norms) if per_head and with_maps else None,
        transformed_norms=stack([layer.transformed for layer in norms], {-1: keys}) if per_head else None,
        mixing_ratio=ratios,
        residual_norm=stack([layer.residual_norm for layer in norms], {-1: queries}) if norms else None,
        norm_scale=stack(scales, {-1: queries}) if norms and len(scales) == len(norms) else None,
        convergence_delta=stack([layer.delta for layer in layers.values()], {}) if blocks else None,
        real=real_queries(call, role, count),
        tokens=call.tokens,
        baseline=baseline,
        layer_names=tuple(block.name for block in blocks),
        layouts=tuple(block.layout for block in blocks),
        layer_scopes=tuple(block.scopes for block in blocks),
    )


def maps_of_stacks(
    measured: Mapping[StackName, Measurements],
    choose: Callable[[StackName, Measurements], tuple[Tensor, Tensor | None]],
) -> AttributionMaps:
    """Maps of all stacks; ``choose`` takes maps and mixing ratio out of one stack's measurements."""
    chosen = {name: choose(name, stack) for name, stack in measured.items()}
    maps = {name: stack for name, (stack, _) in chosen.items()}
    ratios = [ratio for _, ratio in chosen.values()]
    deltas = [m.convergence_delta for m in measured.values() if m.convergence_delta is not None]
    inputs, *_ = measured.values()
    return AttributionMaps(
        encoder=maps.get("encoder"),
        decoder=maps.get("decoder"),
        cross=maps.get("cross"),
        mixing_ratio=ratios[0] if len(ratios) == 1 else None,
        convergence_delta=torch.cat([delta.to(deltas[0].device) for delta in deltas], 1) if deltas else None,
        real=inputs.real,
        decoder_real=measured["cross"].real if "cross" in measured else None,
        tokens=inputs.tokens,
    )
