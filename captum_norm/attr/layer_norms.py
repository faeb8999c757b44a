"""Computes norms, mixing ratios and completeness errors of one layer, without forming its vectors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from captum_norm.attr.feed_forward import parallel_part
from captum_norm.forward.record import BlockTensors, Layer
from captum_norm.functional import (
    Carry,
    Scales,
    estimated_length,
    head_norms,
    key_gram,
    length,
    own_keys,
    random_directions,
    relative_error,
    summed_norms,
    transformed_norms,
    weight_gram,
)
from captum_norm.functional.carry import BlockRows, CarriedAttention, block_rows
from captum_norm.functional.vectors import (
    chunks,
    refined_head_norms,
    refined_summed_norms,
    squared_difference,
    value_norms,
    value_norms_error,
)
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block
from captum_norm.models.layouts import Scope
from captum_norm.models.projections import version_of

# Ratio of attention's output to its bias below which the rounding of their sum matters.
HIDDEN = 1 / 64

Combination = tuple[bool, bool, bool]
"""Which norms a carry has: products of the model's weights depend on nothing else of it."""
ScalesOf = Callable[[Carry, BlockTensors], Scales]
"""From a scope's steps and the tensors of some queries to 1/σ of the steps' norms."""
EndOf = Callable[[Scope, BlockTensors], tuple[Tensor, Tensor]]
"""From a scope and the tensors of some queries to the residual stream and the model's output there, (B, Q, D) each."""


@dataclass(eq=False)
class LayerResults:
    """Results of one layer: as in :class:`captum_norm.Measurements`, without the axis L.

    Attributes:
        block: the attention block; None for attention weights alone.
        queries: Q.
        deltas: completeness errors, (B,) each, and the precisions that set their tolerances.
        discrepancy: difference of fast and directly computed norms, (B,), and the dtype that sets its tolerance.
    """

    block: Block | None = None
    queries: int = 0
    weights: Tensor | None = None
    norms: dict[Scope, Tensor] = field(default_factory=dict)
    head_norms: Tensor | None = None
    transformed_norms: Tensor | None = None
    mixing_ratio: dict[str, Tensor] = field(default_factory=dict)
    residual_norm: Tensor | None = None
    norm_scale: Tensor | None = None
    deltas: list[tuple[Tensor, torch.dtype]] = field(default_factory=list)
    discrepancy: tuple[Tensor, torch.dtype] | None = None


def layer_norms(
    layer: Layer,
    carries: Mapping[Scope, Carry],
    results: LayerResults,
    *,
    per_head: bool = False,
    with_maps: bool = True,
    consume: Callable[[Part, Tensor], object] | None = None,
    scales_of: ScalesOf | None = None,
    end_of: EndOf | None = None,
) -> None:
    """Compute the norms of what each query receives from each key, at one or more scopes.

    Args:
        layer: the layer.
        carries: the steps of each scope to measure, each in the block's layout.
        results: filled in.
        per_head: also keep ‖α_ij f_h(x_j)‖ and ‖f_h(x_j)‖ of each head.
        with_maps: whether to keep maps; without them, only ‖f_h(x_j)‖ is kept per head.
        consume: also told the attention weights of each part, without a gate.
        scales_of: by default, 1/σ of the norms of the attention block.
        end_of: by default, what the model computed at a scope.
    """
    norms = _Norms(layer, carries, results, scales_of, end_of, per_head=per_head, with_maps=with_maps)
    for part, weights in layer.parts():
        norms.consume(layer.gated(weights, part), part)
        if consume is not None:
            consume(part, weights)
    norms.finish()


class _Norms:
    """Norms of one layer, from its attention weights part by part."""

    def __init__(
        self,
        layer: Layer,
        carries: Mapping[Scope, Carry],
        results: LayerResults,
        scales_of: ScalesOf | None,
        end_of: EndOf | None,
        *,
        per_head: bool,
        with_maps: bool,
    ) -> None:
        self.layer, self.results = layer, results
        self._scales_of, self._end_of = scales_of or _scales_of, end_of or partial(_end_of, layer, carries)
        values = layer.values.transpose(1, 2)
        batch, keys, heads, _ = values.shape
        queries = layer.call.query.shape[2]
        self._carries, self._values = carries, values
        # One key per query, its own in self-attention, whose vectors are computed directly, too.
        self._past = 0 if layer.call.cross else keys - queries
        self._sampled_keys = (torch.arange(queries, device=values.device) + self._past) % keys
        self._sampled_weights = values.new_empty(batch, heads, queries)
        self._limit = layer.budget.piece_elements(values)
        self._vectors: dict[Combination, _CarriedVectors] = {}
        for carry in [*carries.values(), *([Carry()] if per_head else [])]:
            if carry.norms not in self._vectors:
                limit = self._limit if with_maps else None
                self._vectors[carry.norms] = _CarriedVectors(layer, carry, values, queries, limit)
        results.residual_norm = values.new_empty(batch, queries)
        if any(carry.final is not None for carry in carries.values()):
            results.norm_scale = values.new_empty(batch, queries)
        if per_head:
            results.transformed_norms = self._vectors[Carry().norms].transformed()
            results.head_norms = values.new_empty(batch, heads, queries, keys) if with_maps else None

    def consume(self, weights: Tensor, part: Part) -> None:
        weights, results = weights.to(self.layer.dtype), self.results
        for vectors in self._vectors.values():
            vectors.consume(weights, part)
        if results.head_norms is not None and results.transformed_norms is not None:
            transformed = results.transformed_norms[part.examples]
            results.head_norms[part.examples, :, part.rows] = head_norms(weights, transformed)
        keys = self._sampled_keys[part.rows].expand(*weights.shape[:2], -1)
        self._sampled_weights[part.examples, :, part.rows] = weights.gather(3, keys.unsqueeze(3)).squeeze(3)

    def finish(self) -> None:
        """Compute the results that need the block's tensors."""
        if self._carries:
            delta = self._finish_scopes()
        else:
            self.results.residual_norm = length(self.layer.recorded.residual.to(self.layer.dtype))
            delta = self._attention_error()
        self.results.deltas.append((delta, self.layer.block.precision(self._carries)))
        self.results.discrepancy = self._largest_discrepancy(), self.layer.dtype

    def _finish_scopes(self) -> Tensor:
        tensors = self.layer.recorded
        batch, queries, width = tensors.residual.shape
        pieces: dict[Scope, list[BlockRows]] = {scope: [] for scope in self._carries}
        for rows in list(chunks(queries, batch * width, self._limit)):
            for scope, found in self._finish_rows(tensors.rows(rows, self.layer.dtype), rows):
                pieces[scope].append(found)
        deltas = []
        last_scopes = {carry.norms: scope for scope, carry in self._carries.items()}
        for scope, carry in self._carries.items():
            whole = BlockRows(*(torch.cat(parts, dim=1) for parts in zip(*pieces[scope], strict=True)))
            self.results.mixing_ratio[scope] = whole.mixing_ratio
            deltas.append(relative_error(whole.error, whole.reference, self.layer.real))
            deltas.append(relative_error(whole.attention_error, whole.attention, self.layer.real))
            vectors = self._vectors[carry.norms]
            if vectors.mapped:
                norms = vectors.divided(last=last_scopes[carry.norms] == scope)
                if carry.residual and not self.layer.call.cross:
                    own_keys(norms).copy_(whole.own_norm)
                self.results.norms[scope] = norms
        return torch.stack(deltas).amax(0)

    def _finish_rows(self, here: BlockTensors, rows: slice) -> Iterator[tuple[Scope, BlockRows]]:
        """Yield the results of some queries at each scope."""
        projection, dtype, results = self.layer.block.projection, self.layer.dtype, self.results
        weight, bias = projection.weight(dtype), projection.bias(dtype)
        keys = self._sampled_keys[rows]
        own_rows = slice(rows.start + self._past, rows.stop + self._past)
        values = self._values[:, keys if self.layer.call.cross else own_rows]
        sampled = (values * self._sampled_weights[:, :, rows].transpose(1, 2).unsqueeze(-1)).flatten(2) @ weight
        own = torch.zeros_like(sampled) if self.layer.call.cross else sampled
        others = here.projected - own if bias is None else self._without_bias(here, rows, own, weight, bias)
        if results.residual_norm is not None:
            results.residual_norm[:, rows] = length(here.residual)
        directions = random_directions(own.shape[-1], own)
        ends = {scope: self._end_of(scope, here) for scope in self._carries}
        for norms, vectors in self._vectors.items():
            carry = vectors.carry
            scales, attention = self._scales_of(carry, here), CarriedAttention.of(carry, own, others, directions)
            if results.norm_scale is not None and scales.final is not None:
                results.norm_scale[:, rows] = scales.final.squeeze(-1)
            if vectors.mapped:
                direct = length(carry.linear(sampled)) if self.layer.call.cross else attention.own_norm
                vectors.finish_rows(rows, keys, direct, scales)
            carried_bias, sketch = vectors.projection.bias, vectors.sketch[:, rows]
            for scope, steps in self._carries.items():
                if steps.norms == norms:
                    yield scope, block_rows(steps, scales, attention, carried_bias, sketch, directions, *ends[scope])

    def _without_bias(self, here: BlockTensors, rows: slice, own: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return attention's output without its bias and the queries' own vectors, (B, Q, D).

        Where the bias dominates, recompute the output from the projection's input.
        """
        others = here.projected - own - bias
        vectors = next(iter(self._vectors.values()))
        _, size = vectors.projection.bias or (None, bias.new_zeros(()))
        hidden = estimated_length(vectors.sketch[:, rows].detach()) < HIDDEN * size.detach()
        if not hidden.any():
            return others
        exact = here.context.to(own)[hidden] @ weight - own[hidden]
        return others.index_put(hidden.nonzero(as_tuple=True), exact)

    def _attention_error(self) -> Tensor:
        """Compute the relative error of Σ_j Σ_h α_ij f_h(x_j) as the attention output, (B,); needed without scopes."""
        (vectors,) = self._vectors.values()
        output, bias = self.layer.recorded.projected.to(self.layer.dtype), vectors.projection.bias
        size = length(output)
        error = vectors.sketch - output @ random_directions(output.shape[-1], output)
        if bias is not None:
            error, size = error + bias[0], size + bias[1]
        return relative_error(estimated_length(error), size, self.layer.real)

    def _largest_discrepancy(self) -> Tensor:
        # Without scopes, no norm of a sum over heads is computed directly.
        paired = [found for found in self._vectors.values() if found.mapped and self._carries]
        transformed = self.results.transformed_norms
        if not paired and transformed is not None:
            key = self._values.shape[1] // 2
            projection = carried_rows(self.layer.block, Carry(), self._values.shape[2], self.layer.dtype)
            return value_norms_error(transformed[..., key], self._values[:, key], projection)
        if not paired:
            return self._values.new_zeros(len(self._values))
        found = [vectors.discrepancy(self._sampled_keys, self._sampled_weights) for vectors in paired]
        return torch.stack(found).amax(0)


def _end_of(layer: Layer, carries: Mapping[Scope, Carry], scope: Scope, tensors: BlockTensors) -> tuple[Tensor, Tensor]:
    """Return the residual stream at a scope, and the model's output there without a parallel layer's constants."""
    behind, carry = tensors.behind, carries[scope]
    if scope == "atb_ff_res" and behind is not None:
        own, constant = parallel_part(layer.block, tensors, layer.options.baseline, layer.dtype)
        return tensors.residual + own, behind.total - constant
    if scope == "atb_ln" and behind is not None and behind.read is not None:
        return tensors.residual, behind.read
    if carry.final is not None and tensors.normed is not None:
        return tensors.residual, tensors.normed
    return tensors.residual, tensors.total if carry.residual else tensors.projected


def _scales_of(carry: Carry, tensors: BlockTensors) -> Scales:
    return carry.scales(tensors.projected, tensors.total)


class _CarriedVectors:
    """The vectors that each query receives, carried through a scope's norms but not yet divided by its σ.

    Args:
        layer: the layer.
        carry: the norms' steps.
        values: (B, K, H, d).
        queries: Q.
        limit: maximum number of elements of an intermediate result; None without norms of pairs.

    Attributes:
        carry: the same.
        projection: the output projection, carried.
        sketch: the vectors' sums Σ_j Σ_h α_ij f_h(x_j) on the random directions, (B, Q, k).
        mapped: whether norms of pairs are computed.
        form: :func:`key_gram`; None without norms of pairs, and if every channel is a head of its own (a gate), when
            the vectors themselves are smaller.
    """

    def __init__(self, layer: Layer, carry: Carry, values: Tensor, queries: int, limit: int | None) -> None:
        batch, keys, heads, width = values.shape
        self.carry, self._block, self._values = carry, layer.block, values
        self.projection = carried_projection(layer.block, carry, heads, layer.dtype)
        # (B, H, k, K): products with few rows are several times faster than with few columns.
        self._projected_keys = self.projection.sketch.mT @ values.permute(0, 2, 3, 1)
        self.sketch = values.new_empty(batch, queries, self._projected_keys.shape[2])
        self.mapped, self.form = limit is not None, None
        if limit is not None and width > 1:
            self.form = key_gram(values, self.projection.gram, limit)
        if self.mapped:
            self._rows = None if width > 1 else carried_rows(layer.block, carry, heads, layer.dtype).flatten(0, 1)
            self._norms = values.new_empty(batch, queries, keys)
            self._scale = values.new_empty(batch, queries, 1)
            self._fast, self._direct = values.new_empty(batch, queries), values.new_empty(batch, queries)

    def _exact(self) -> Tensor:
        """The carried projection in float64, for norms out of the range of float32."""
        return carried_rows(self._block, self.carry, self._values.shape[2], torch.float64)

    def transformed(self) -> Tensor:
        """Compute ‖f_h(x_j)‖, not divided by σ, (B, H, K)."""
        gram = self.projection.gram
        lengths = value_norms(self._values, gram) if self.form is None else transformed_norms(self.form)
        return refined_head_norms(lengths, self._values, self._exact)

    def consume(self, weights: Tensor, part: Part) -> None:
        """Process the attention weights of a part."""
        self.sketch[part] = (self._projected_keys[part.examples] @ weights.mT).sum(1).mT
        if self.mapped and self._rows is not None:
            values = self._values[part.examples].permute(0, 2, 3, 1)
            self._norms[part] = length((weights * values).permute(0, 2, 3, 1) @ self._rows)
        if self.form is not None:
            norms = summed_norms(weights, self.form[part.examples])
            self._norms[part] = refined_summed_norms(norms, weights, self._values[part.examples], self._exact)

    def finish_rows(self, rows: slice, keys: Tensor, direct: Tensor, scales: Scales) -> None:
        """Record the queries' 1/σ, and for each the fast and the directly computed norm at one key.

        Args:
            rows: the queries.
            keys: one key per query, (rows,).
            direct: the directly computed norm of this key's vector, (B, rows).
            scales: 1/σ.
        """
        self._fast[:, rows] = self._norms[:, rows].gather(2, keys.expand(len(direct), -1).unsqueeze(2)).squeeze(2)
        self._direct[:, rows] = direct
        self._scale[:, rows] = scales.divide(torch.ones_like(direct).unsqueeze(-1))

    def divided(self, *, last: bool) -> Tensor:
        """Return ‖Σ_h α_ij f_h(x_j)‖ / σ_i, (B, Q, K); with ``last``, in place unless gradients are enabled."""
        return self._norms.mul_(self._scale) if last and not torch.is_grad_enabled() else self._norms * self._scale

    def discrepancy(self, keys: Tensor, weights: Tensor) -> Tensor:
        """Compare the fast norms at one key j of each query with the directly computed ones, (B,).

        Squared norms, relative to (Σ_h ‖α_ij f_h(x_j)‖)², the scale of rounding errors even if heads cancel.

        Args:
            keys: the key of each query, (Q,).
            weights: its weights, (B, H, Q).
        """
        lengths = value_norms(self._values, self.projection.gram) if self.form is None else transformed_norms(self.form)
        size = (weights * lengths[..., keys]).sum(1)
        return squared_difference(self._fast, self._direct, size).amax(1)


@dataclass(frozen=True)
class CarriedProjection:
    """A block's output projection, carried through the norms after it without 1/σ, as norms of vectors need it.

    Attributes:
        gram: inner products of its rows, (H·d, H·d).
        sketch: the rows by head on the random directions, (H, d, k).
        bias: the projection's bias on these directions, (k,), and its length, (); None without a bias.
    """

    gram: Tensor
    sketch: Tensor
    bias: tuple[Tensor, Tensor] | None


_kept: WeakKeyDictionary[Block, dict[tuple[bool, bool, bool], tuple[tuple[object, ...], CarriedProjection]]]
_kept = WeakKeyDictionary()


def carried_projection(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> CarriedProjection:
    """Carry a block's projection as far as ``carry`` goes, or return the cached result if no weight has changed."""
    if torch.is_grad_enabled():
        return _carried_projection(block, carry, heads, dtype)
    kept, key = _kept.setdefault(block, {}), carry.norms
    state = (dtype, block.projection.version(), *(_state(weight) for weight in _weights(block)))
    if key not in kept or kept[key][0] != state:
        kept[key] = (state, _carried_projection(block, carry, heads, dtype))
    return kept[key][1]


def _carried_projection(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> CarriedProjection:
    rows, bias = carried_rows(block, carry, heads, dtype), block.projection.bias(dtype)
    directions = random_directions(rows.shape[-1], rows)
    carried = None if bias is None else carry.linear(bias)
    sketch = None if carried is None else (carried @ directions, length(carried))
    return CarriedProjection(weight_gram(rows), rows @ directions, sketch)


def _weights(block: Block) -> list[Tensor | float | None]:
    second = None if block.feed_forward is None else block.feed_forward.final_norm
    norms = [reader.module for reader in (block.branch_norm, block.norm_behind, second) if reader is not None]
    weights = [getattr(module, "weight", None) for module in norms]
    return [*weights, None if block.branch_factor is None else block.branch_factor.stored]


def _state(weight: Tensor | float | None) -> object:
    return version_of(weight) if isinstance(weight, Tensor) else weight


def carried_rows(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Tensor:
    """Carry the rows of a block's output projection by head as far as ``carry`` goes, (H, d, D)."""
    return carry.linear(block.projection.weight(dtype).unflatten(0, (heads, -1)))
