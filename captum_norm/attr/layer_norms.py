"""Computes norms, mixing ratios and completeness errors of one layer, without forming its vectors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from captum_norm.attr.feed_forward import parallel_part
from captum_norm.forward.record import BlockTensors, Layer
from captum_norm.functional import length, own_keys, relative_error, vectors
from captum_norm.functional.carry import Carry, Scales, apply_linear, inverse_scale, measure_end
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block
from captum_norm.models.layouts import Scope

# Ratio of attention's output to its bias below which the rounding of their sum matters.
HIDDEN = 1 / 64

Combination = tuple[bool, bool, bool]
"""Which norms a carry has: products of the model's weights depend on nothing else of it."""


@dataclass(eq=False)
class LayerResults:
    """Results of one layer: as in :class:`captum_norm.attr.measurements.Measurements`, without the axis L."""

    block: Block | None = None  # None for attention weights alone
    queries: int = 0
    weights: Tensor | None = None
    norms: dict[Scope, Tensor] = field(default_factory=dict)
    head_norms: Tensor | None = None
    transformed_norms: Tensor | None = None
    mixing_ratio: dict[str, Tensor] = field(default_factory=dict)
    residual_norm: Tensor | None = None
    norm_scale: Tensor | None = None
    # Completeness errors, and the difference of fast and directly computed norms, (B,), with the dtypes that set their
    # tolerances.
    deltas: list[tuple[Tensor, torch.dtype]] = field(default_factory=list)
    discrepancy: tuple[Tensor, torch.dtype] | None = None


def layer_norms(
    layer: Layer,
    carries: Mapping[Scope, Carry],  # the steps of each scope to measure
    results: LayerResults,  # filled in
    *,
    per_head: bool = False,  # also keep ‖α_ij f_h(x_j)‖ and ‖f_h(x_j)‖ of each head
    with_maps: bool = True,  # without them, only ‖f_h(x_j)‖ is kept per head
    consume: Callable[[Part, Tensor], object] | None = None,  # also told the weights of each part, without a gate
) -> None:
    """Compute the norms of what each query receives from each key, at one or more scopes."""
    values = layer.values.transpose(1, 2)
    batch, keys, heads, _ = values.shape
    queries = layer.call.query.shape[2]
    limit = layer.options.budget.piece_elements(values)
    # One key per query, its own in self-attention, whose vector is formed, too.
    formed_keys = (torch.arange(queries, device=values.device) + (0 if layer.call.cross else keys - queries)) % keys
    # Scopes through the same normalisations share norms, but for a factor for each query.
    steps = {carry.norms: carry for carry in (*carries.values(), *([Carry()] if per_head else []))}
    pairs: dict[Combination, _Pairs] = {}
    for norms, carry in steps.items():
        scopes = [scope for scope, other in carries.items() if other.norms == norms]
        products = _weight_products(layer, carry)
        # Factors of a gate may be negative.
        gram, _, lengths, *_ = products
        forms = vectors.forms_of_keys(values, gram, lengths, limit, maps=with_maps, signed=layer.gate is not None)
        pairs[norms] = _Pairs(
            carry,
            scopes,
            values,
            partial(carried_rows, layer.block, carry, heads),
            *products,
            *forms,
            values.new_zeros(batch, queries, keys) if with_maps else None,
            values.new_empty(batch, queries),
            values.new_empty(batch, queries),
            values.new_empty(batch, queries, 1),
            values.new_empty(batch, queries, 1),
        )
    formed_weights = values.new_empty(batch, heads, queries)
    if per_head:
        results.transformed_norms = pairs[Carry().norms].transformed()
        results.head_norms = values.new_zeros(batch, heads, queries, keys) if with_maps else None
    for part, weights, gated in layer.parts():
        alphas = gated.to(layer.dtype)
        for pair in pairs.values():
            pair.fill(part, alphas)
        if results.head_norms is not None and results.transformed_norms is not None:
            transformed = results.transformed_norms[part.examples, :, part.keys]
            results.head_norms[part.examples, :, part.rows, part.keys] = vectors.head_norms(alphas, transformed)
        index = formed_keys[part.rows].expand(*alphas.shape[:2], -1).unsqueeze(3)
        formed_weights[part.examples, :, part.rows] = alphas.gather(3, index).squeeze(3)
        if consume is not None:
            consume(part, weights)
        del weights, gated, alphas  # before the next ones are made
    own = formed_keys, formed_weights
    own_norms, others_norms = _finish(layer, carries, pairs, own, results, limit)
    small = _small_ends(carries, pairs, results, own, own_norms, others_norms)
    _refine_ends(layer, carries, pairs, small, results, own_norms)
    error = values.new_zeros(batch)
    for pair in pairs.values() if carries and with_maps else ():
        error = torch.maximum(error, pair.discrepancy(formed_keys, formed_weights))
    if not carries and results.transformed_norms is not None:
        key, rows = keys // 2, carried_rows(layer.block, Carry(), heads, layer.dtype)
        error = vectors.value_norms_error(results.transformed_norms[..., key], values[:, key], rows)
    results.discrepancy = error, layer.dtype
    if with_maps:
        results.norms.update({scope: pairs[carry.norms].divided(scope) for scope, carry in carries.items()})
        _add_residual(results.norms, carries, {} if layer.call.cross else own_norms)


def _add_residual(maps: Mapping[Scope, Tensor], carries: Mapping[Scope, Carry], own: Mapping[Scope, Tensor]) -> None:
    """Write each query's own norm, in which the residual connection counts, into the maps of scopes that have it."""
    for scope, norms in own.items():
        if carries[scope].residual:
            own_keys(maps[scope]).copy_(norms)


def _finish(
    layer: Layer,
    carries: Mapping[Scope, Carry],
    pairs: Mapping[Combination, "_Pairs"],
    own: tuple[Tensor, Tensor],  # as in _small_ends
    results: LayerResults,
    limit: int,
) -> tuple[dict[Scope, Tensor], dict[Scope, Tensor]]:
    """Fill in what needs the block's tensors; return ‖v_ii‖ and ‖Σ_{j≠i} v_ij‖ at each scope, (B, Q)."""
    tensors, dtype, (keys, alphas) = layer.recorded, layer.dtype, own
    batch, queries, width = tensors.residual.shape
    weight, bias = layer.block.projection.read()
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    # Of attention's output and of each scope's end: what is lacking to the model's tensor, and this tensor.
    sketches = {name: alphas.new_empty(2, batch, queries, vectors.DIRECTIONS) for name in (*pairs, *carries)}
    own_norms = {scope: alphas.new_empty(batch, queries) for scope in carries}
    others_norms = {scope: alphas.new_empty(batch, queries) for scope in carries}
    results.mixing_ratio.update({scope: alphas.new_empty(batch, queries) for scope in carries})
    results.residual_norm = alphas.new_empty(batch, queries)
    if any(carry.final is not None for carry in carries.values()):
        results.norm_scale = alphas.new_empty(batch, queries)
    directions = vectors.random_directions(width, weight)
    for rows in vectors.chunks(queries, batch * width, limit):
        here = tensors.rows(rows, dtype)
        context_norm = torch.linalg.vector_norm(here.context.detach(), dim=-1)
        direct = others = here.residual.new_empty(0)
        if carries:
            direct = layer.values[:, :, keys[rows]] * alphas[..., rows].unsqueeze(3)
            direct, others = direct.transpose(1, 2).flatten(2) @ weight, _without_bias(here, weight, bias)
            others = others if layer.call.cross else others - direct
        ends = {scope: _end_of(layer, carry, scope, here) for scope, carry in carries.items()}
        for norms, pair in pairs.items():
            scales, through = _scales_of(pair.carry, here), pair.carry.transposed(directions)
            sketch, whole = here.context @ pair.directions, here.projected @ through
            if bias is None:
                sketches[norms][:, :, rows] = torch.stack([sketch - whole, whole])
            else:
                shift = bias @ through
                sketch = sketch + shift
                # The bias may cancel the rest.
                sketches[norms][:, :, rows] = torch.stack([sketch - whole, whole.abs() + shift.abs()])
            if not carries:
                continue
            pair.terms[:, rows] = context_norm * pair.row_length
            pair.scale[:, rows] = scale = scales.divide(ones := torch.ones_like(whole[..., :1]))
            pair.behind[:, rows] = scale if scales.branch is None else replace(scales, branch=None).divide(ones)
            if results.norm_scale is not None and scales.final is not None:
                results.norm_scale[:, rows] = scales.final.squeeze(-1)
            carried, rest = pair.carry.linear(direct), pair.carry.linear(others)
            pair.direct[:, rows], rest = length(carried), length(rest)
            kept = torch.zeros_like(carried) if layer.call.cross else carried
            for scope in pair.scopes:
                own_norm, others_norm, mixing, *sketched = measure_end(
                    carries[scope], scales, kept, rest, sketch, *ends[scope], directions
                )
                own_norms[scope][:, rows], others_norms[scope][:, rows] = own_norm, others_norm
                results.mixing_ratio[scope][:, rows] = mixing
                sketches[scope][:, :, rows] = torch.stack(sketched)
        results.residual_norm[:, rows] = length(here.residual)
    error, size = vectors.estimated_length(torch.stack(list(sketches.values()), 1))
    deltas = [relative_error(error, size, layer.real)]
    if layer.difference is not None:
        deltas.append(relative_error(*layer.difference, layer.real).unsqueeze(0))
    results.deltas.append((torch.cat(deltas).amax(0), layer.block.precision(carries)))
    return own_norms, others_norms


def _small_ends(
    carries: Mapping[Scope, Carry],
    pairs: Mapping[Combination, "_Pairs"],
    results: LayerResults,
    own: tuple[Tensor, Tensor],  # the key of each query that counts as its own, (Q,), and its weights, (B, H, Q)
    own_norms: Mapping[Scope, Tensor],
    others_norms: Mapping[Scope, Tensor],
) -> Tensor:
    """Find the queries whose v_ii or mixing ratio has lost digits since its vectors are small beside their terms."""
    (keys, weights), residual = own, cast(Tensor, results.residual_norm)
    small, least = torch.zeros_like(residual, dtype=torch.bool), vectors.SMALL * torch.finfo(residual.dtype).eps
    for pair in pairs.values():
        scale = pair.scale.squeeze(-1)
        terms = least * pair.terms * scale
        for scope in pair.scopes:
            small |= own_norms[scope] + others_norms[scope] < terms
        if with_residual := [scope for scope in pair.scopes if carries[scope].residual]:
            own_terms = torch.linalg.vector_norm(pair.sizes[..., keys] * weights, dim=1) * scale
            own_terms += residual * pair.gain * pair.behind.squeeze(-1)
            for scope in with_residual:
                small |= own_norms[scope] < least * own_terms
    return small


def _refine_ends(
    layer: Layer,
    carries: Mapping[Scope, Carry],
    pairs: Mapping[Combination, "_Pairs"],
    small: Tensor,
    results: LayerResults,
    own_norms: Mapping[Scope, Tensor],
) -> None:
    """Recompute ‖v_ii‖ and mixing ratios in float64 at queries where they have lost digits, (B, Q)."""
    if not small.any():
        return
    positions = small.any(0).nonzero().squeeze(1)
    values, weight = layer.values.double(), layer.block.projection.weight(torch.float64)
    (batch, heads, keys, width), queries = values.shape, small.shape[1]
    mine, others = (values.new_zeros(batch, heads, len(positions), width) for _ in range(2))
    for part, _, gated in layer.parts(advancing=False):
        inside = ((positions >= part.rows.start) & (positions < part.rows.stop)).nonzero().squeeze(1)
        alphas = gated[:, :, positions[inside] - part.rows.start].double()
        heard = values[part.examples, :, part.keys]
        if not layer.call.cross:
            key = positions[inside] + keys - queries
            index = key.expand(*alphas.shape[:2], -1).unsqueeze(3)
            mine[part.examples, :, inside] = alphas.gather(3, index) * heard[:, :, key]
            alphas = alphas.scatter(3, index, 0)
        others[part.examples, :, inside] = alphas @ heard
    limit, directions = layer.options.budget.piece_elements(values), vectors.random_directions(weight.shape[1], weight)
    for rows in vectors.chunks(len(positions), batch * max(weight.shape), limit):
        at, here = positions[rows], layer.recorded.rows(positions[rows], torch.float64)
        parts = [part[:, :, rows].transpose(1, 2).flatten(2) @ weight for part in (mine, others)]
        for pair in pairs.values():
            scales, (direct, rest) = _scales_of(pair.carry, here), (pair.carry.linear(part) for part in parts)
            for scope in pair.scopes:
                end = _end_of(layer, carries[scope], scope, here)
                norm, _, mixing, *_ = measure_end(
                    carries[scope], scales, direct, length(rest), rest @ directions, *end, directions
                )
                for made, exact in ((own_norms[scope], norm), (results.mixing_ratio[scope], mixing)):
                    made[:, at] = torch.where(small[:, at], exact.to(made), made[:, at])


def _without_bias(here: BlockTensors, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention's output without the projection's bias; where that hides it, recompute it from its context."""
    if bias is None:
        return here.projected
    output = here.projected - bias
    size, whole = (torch.linalg.vector_norm(part.detach(), dim=-1) for part in (output, bias))
    hidden = size < HIDDEN * whole
    return output.index_put(hidden.nonzero(as_tuple=True), here.context[hidden] @ weight) if hidden.any() else output


def _scales_of(carry: Carry, tensors: BlockTensors) -> Scales:
    """Compute 1/σ of the norms of a scope's steps at some queries."""
    return carry.scales(tensors.projected, tensors.total, None if tensors.behind is None else tensors.behind.total)


def _end_of(layer: Layer, carry: Carry, scope: Scope, tensors: BlockTensors) -> tuple[Tensor, Tensor]:
    """Return the residual stream at a scope, and the model's output there without what belongs to no key."""
    behind = tensors.behind
    if carry.second is not None and behind is not None and behind.normed is not None:
        # The stream that bypasses the feed-forward network, whose output is in the norm's statistics alone.
        written = behind.total - (tensors.total if tensors.normed is None else tensors.normed)
        around = apply_linear(carry.second, written) * inverse_scale(carry.second, behind.total)
        return tensors.residual, behind.normed - around
    if scope == "atb_ff_res" and behind is not None:
        own, constant = parallel_part(layer.block, tensors, layer.options.baseline, layer.dtype)
        return tensors.residual + own, behind.total - constant
    if scope == "atb_ln" and behind is not None and behind.read is not None:
        return tensors.residual, behind.read
    if carry.final is not None and tensors.normed is not None:
        return tensors.residual, tensors.normed
    return tensors.residual, tensors.total if carry.residual else tensors.projected


@dataclass(eq=False)
class _Pairs:
    """Norms of the vectors of all pairs at scopes that pass the same normalisations, not yet divided by σ."""

    carry: Carry  # the normalisations
    scopes: list[Scope]  # that pass these
    values: Tensor  # (B, K, H, d)
    rows: Callable[[torch.dtype], Tensor]  # makes the rows of the output projection by head, carried, (H, d, D)
    gram: Tensor  # these and the next ones: see _weight_products
    directions: Tensor
    lengths: Tensor
    row_length: Tensor
    gain: Tensor
    form: Tensor | None  # these and the next ones: see forms_of_keys
    sizes: Tensor
    suspects: Tensor
    maps: Tensor | None  # ‖Σ_h α_ij f_h(x_j)‖, (B, Q, K)
    direct: Tensor  # norm of one vector for each query, directly computed, (B, Q)
    terms: Tensor  # the size of the terms of attention's output, (B, Q)
    scale: Tensor  # 1/σ, (B, Q, 1)
    behind: Tensor  # without that of the branch norm

    @cached_property
    def _head_lengths(self) -> Tensor:
        return (
            vectors.value_norms(self.values, self.gram) if self.form is None else vectors.transformed_norms(self.form)
        )

    def transformed(self) -> Tensor:
        """Return ‖f_h(x_j)‖, (B, H, K)."""
        return vectors.refined_head_norms(
            self._head_lengths, self.values, self.sizes, partial(self.rows, torch.float64)
        )

    def fill(self, part: Part, weights: Tensor) -> None:
        """Compute the norms of a part from its attention weights."""
        if self.maps is None:
            return
        values, sizes = self.values[part.examples, part.keys], self.sizes[part.examples, :, part.keys]
        exact = partial(self.rows, torch.float64)
        if self.form is None:
            rows = self.rows(weights.dtype).flatten(0, 1)
            norms = length((weights * values.permute(0, 2, 3, 1)).permute(0, 2, 3, 1) @ rows)
            self.maps[part] = vectors.refined_channel_norms(norms, weights, values, sizes, exact)
        else:
            norms = vectors.summed_norms(weights, self.form[part.examples, ..., part.keys])
            self.maps[part] = vectors.refined_summed_norms(norms, weights, values, sizes, self.suspects, exact)

    def divided(self, scope: Scope) -> Tensor:
        """Return ‖Σ_h α_ij f_h(x_j)‖ / σ_i, (B, Q, K); for the last scope in place unless gradients are enabled."""
        maps = cast(Tensor, self.maps)
        last = scope == self.scopes[-1] and not torch.is_grad_enabled()
        return maps.mul_(self.scale) if last else maps * self.scale

    def discrepancy(self, keys: Tensor, weights: Tensor) -> Tensor:
        """Compare squared norms at a key of each query, (Q,), of weights (B, H, Q), with direct ones, (B,)."""
        # Relative to (Σ_h ‖α_ij f_h(x_j)‖)² before means are subtracted, the scale of the rounding errors of directly
        # computed ones even if heads cancel.
        maps = cast(Tensor, self.maps)
        fast = maps.gather(2, keys.expand(len(maps), -1).unsqueeze(2)).squeeze(2)
        size = (weights * torch.maximum(self._head_lengths, self.sizes)[..., keys]).sum(1)
        return vectors.squared_difference(fast, self.direct, size).amax(1)


Products = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_products: WeakKeyDictionary[Block, dict[Combination, tuple[object, Products]]] = WeakKeyDictionary()


def _weight_products(layer: Layer, carry: Carry) -> Products:
    """Return a projection's carried rows times each other, and on the directions, computed anew if a weight changed."""
    # And before means are subtracted the rows' lengths, (H, d), the root mean square of these, and that of the gains of
    # the residual stream.
    known = {} if torch.is_grad_enabled() else _products.setdefault(layer.block, {})
    state = layer.dtype, layer.block.version()
    if carry.norms not in known or known[carry.norms][0] != state:
        heads, terms = layer.call.query.shape[1], carry.without_means()
        rows = carried_rows(layer.block, carry, heads, layer.dtype)
        lengths = length(carried_rows(layer.block, terms, heads, layer.dtype).detach())
        means = [
            length(sizes.flatten()) / sizes.numel() ** 0.5
            for sizes in (lengths, terms.linear_final(rows.new_ones(rows.shape[-1])).detach())
        ]
        products = vectors.weight_gram(rows), rows.flatten(0, 1) @ vectors.random_directions(rows.shape[-1], rows)
        known[carry.norms] = state, (*products, lengths, *means)
    return known[carry.norms][1]


def carried_rows(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Tensor:
    """Carry the rows of a block's output projection by head as far as ``carry`` goes, (H, d, D)."""
    return carry.linear(block.projection.weight(dtype).unflatten(0, (heads, -1)))
