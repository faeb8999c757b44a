"""Reduces an attention block to its maps, mixing ratios and completeness errors, without forming its vectors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_norm.attr.feed_forward_reducer import FeedForwardReducer, parallel_part
from captum_norm.attr.weight_products import Products, carried_projection, weight_products
from captum_norm.errors import IncompleteDecompositionError
from captum_norm.forward.checks import TOLERANCE, expect_complete, expect_finite
from captum_norm.forward.recording import BlockTensors, Reducer
from captum_norm.forward.room import piece_elements
from captum_norm.functional import (
    Baseline,
    BlockRows,
    CarriedAttention,
    Carry,
    Scales,
    block_rows,
    chunks,
    estimated_length,
    head_norms,
    key_gram,
    length,
    random_directions,
    ratio,
    refined_head_norms,
    refined_summed_norms,
    relative_error,
    squared_difference,
    summed_norms,
    transformed_norms,
    value_norms,
    value_norms_error,
)
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.blocks import Block
from captum_norm.models.layouts import Scope
from captum_norm.models.projections import accumulation_dtype
from captum_norm.models.stacks import Place

# How small attention's output beside its bias must be for the rounding of their sum to count.
HIDDEN = 1 / 64


class WeightReducer:
    """Attention weights of one layer: per head or their mean over heads, and the mixing ratios of that mean."""

    def __init__(self, *, per_head: bool) -> None:
        self._per_head = per_head
        self._cross = False
        self.map: Tensor

    def begin(self, call: AttentionCall) -> None:
        self._cross = call.cross
        shape = [*call.query.shape[:3], call.key.shape[2]]
        if not self._per_head:
            del shape[1]
        self.map = call.value.new_empty(shape, dtype=accumulation_dtype(call.value.dtype))

    def consume(self, weights: Tensor, part: Part) -> None:
        self.map[part.examples, ..., part.rows, :] = (
            weights if self._per_head else weights.mean(1, dtype=self.map.dtype)
        )

    def finish(self, tensors: BlockTensors | None) -> None:
        """Nothing is left to do."""

    def mixing_ratio(self, *, residual: bool) -> Tensor:
        """(B, Q): the share of a row's weight that is not its own; of (A + I)/2 with ``residual``.

        In cross-attention no weight is the query's own.
        """
        mean = self.map.mean(1) if self._per_head else self.map
        own = mean.new_zeros(mean.shape[:2]) if self._cross else mean.diagonal(dim1=-2, dim2=-1)
        others = mean.sum(-1) - own
        return ratio(others.clamp(min=0), own + 1 if residual else own)


class _Sketch:
    """Σ_j Σ_h α_hj f_h(x_j) behind one set of frozen norms, on the random directions; see :func:`random_directions`."""

    def __init__(self, values: Tensor, products: Products, queries: int) -> None:
        self._projected_keys = values.transpose(1, 2) @ products.sketch
        self.sketch = values.new_empty(len(values), queries, products.sketch.shape[-1])

    def consume(self, weights: Tensor, part: Part) -> None:
        self.sketch[part] = (weights @ self._projected_keys[part.examples]).sum(1)


class _Form(_Sketch):
    """The norms of Σ_h α_hj f_h(x_j) behind one set of frozen norms, still to be divided by the queries' σ."""

    def __init__(
        self, values: Tensor, products: Products, queries: int, limit: int, projection: Callable[[], Tensor]
    ) -> None:
        super().__init__(values, products, queries)
        self._values, self._projection = values, projection
        self._form = key_gram(values, products.gram, limit)
        batch, keys, _, _ = values.shape
        self.norms = values.new_empty(batch, queries, keys)
        self._scale = values.new_empty(batch, queries, 1)
        self._fast, self._direct = values.new_empty(batch, queries), values.new_empty(batch, queries)

    def consume(self, weights: Tensor, part: Part) -> None:
        super().consume(weights, part)
        norms = summed_norms(weights, self._form[part.examples])
        self.norms[part] = refined_summed_norms(norms, weights, self._values[part.examples], self._projection)

    def transformed(self) -> Tensor:
        """‖f_h(x_j)‖, not divided by σ, (B, H, K)."""
        return refined_head_norms(transformed_norms(self._form), self._values, self._projection)

    def finish_rows(self, rows: slice, keys: Tensor, direct: Tensor, scales: Scales) -> None:
        """Note the queries' 1/σ, and how far one fast norm of each is from the directly computed one.

        Args:
            rows: the queries.
            keys: a key for each of them, (rows,).
            direct: the norm of this key's vector, directly computed, (B, rows).
            scales: 1/σ.
        """
        self._fast[:, rows] = self.norms[:, rows].gather(2, keys.expand(len(direct), -1).unsqueeze(2)).squeeze(2)
        self._direct[:, rows] = direct
        self._scale[:, rows] = scales.divide(torch.ones_like(direct).unsqueeze(-1))

    def divided(self, *, last: bool) -> Tensor:
        """The norms divided by σ, (B, Q, K); with ``last`` in their own memory where no gradient needs them."""
        return self.norms.mul_(self._scale) if last and not torch.is_grad_enabled() else self.norms * self._scale

    def discrepancy(self, keys: Tensor, weights: Tensor) -> Tensor:
        """How far the fast norms at one key j of each query were from the directly computed ones, (B,).

        Of the squared norms, relative to (Σ_h ‖α_ij f_h(x_j)‖)², the size that rounding goes by where heads cancel.

        Args:
            keys: the key of each query, (Q,).
            weights: its weights, (B, H, Q).
        """
        size = (weights * transformed_norms(self._form)[..., keys]).sum(1)
        return squared_difference(self._fast, self._direct, size).amax(1)


class NormReducer:
    """Norms of one block at one or several scopes.

    Args:
        block: the block.
        scopes: the scopes to measure, each in the block's layout.
        dtype: what to compute in.
        budget: how much memory pieces of the computation may take.
        baseline: where the paths of the integrated gradients start in the feed-forward network of a parallel layer.
        per_head: also keep ‖α_ij f_h(x_j)‖ and ‖f_h(x_j)‖ of each head.
        with_maps: whether to keep maps at all; without them ‖f_h(x_j)‖ is all that is kept of heads.
        real: True at real positions, (B, Q), or None where all are.

    Attributes:
        block: the block.
        scopes: the scopes.
        per_head: whether head norms are kept.
        dtype: what norms are computed in.
        positions: Q.
        precision: the least precise dtype of the block's own computation, which sets the tolerance.
        with_maps: whether maps are kept.
        maps: (B, Q, K) of each scope, with ``with_maps``.
        mixing_ratio: (B, Q) of each scope.
        residual_norm: length of the residual stream, (B, Q).
        norm_scale: 1/σ of the norm behind the residual sum, (B, Q); None if no scope goes through one.
        head_map: (B, H, Q, K), with ``per_head`` and ``with_maps``.
        transformed: (B, H, K), with ``per_head``.
        delta: completeness error, the largest of the scopes' and of the attention output's alone, (B,).
        discrepancy: of fast from direct norms on the diagonal, (B,); 0 without maps.
    """

    def __init__(
        self,
        block: Block,
        scopes: Sequence[Scope],
        dtype: torch.dtype,
        budget: MemoryBudget,
        baseline: Baseline,
        *,
        per_head: bool,
        with_maps: bool,
        real: Tensor | None,
    ) -> None:
        self.block = block
        self._budget = budget
        self._baseline: Baseline = baseline
        self.dtype = dtype
        self.scopes = tuple(scopes)
        self.per_head = per_head
        self.with_maps = with_maps
        self.positions = 0
        self.precision = block.precision_at(scopes)
        self._real = real
        self._carries = {scope: self.carry(scope) for scope in scopes}
        every = [*self._carries.values(), *([Carry()] if per_head else [])]
        self._distinct = {carry.norms: carry for carry in every}
        self._sketches: dict[tuple[bool, bool], _Sketch] = {}
        self._limit = 0
        self._values: Tensor
        self._cross = False
        # One key of each query, its own in self-attention: its vectors are computed directly, too.
        self._sampled_keys: Tensor
        self._sampled_weights: Tensor
        self.maps: dict[Scope, Tensor] = {}
        self.mixing_ratio: dict[Scope, Tensor] = {}
        self.residual_norm: Tensor
        self.norm_scale: Tensor | None = None
        self.head_map: Tensor
        self.transformed: Tensor
        self.delta: Tensor
        self.discrepancy: Tensor

    def begin(self, call: AttentionCall) -> None:
        values = call.values_by_head.transpose(1, 2).to(self.dtype)
        batch, keys, heads, _ = values.shape
        queries = call.query.shape[2]
        self.positions, self._values, self._cross = queries, values, call.cross
        self._sampled_keys = torch.arange(queries, device=values.device) % keys
        self._limit = piece_elements(self._budget, values)
        products = {
            norms: weight_products(self.block, carry, heads, self.dtype) for norms, carry in self._distinct.items()
        }
        if self.with_maps:
            forms = {
                norms: _Form(values, found, queries, self._limit, self._projection(self._distinct[norms], heads))
                for norms, found in products.items()
            }
            self._sketches = {**forms}
            if self.per_head:
                self.transformed = forms[Carry().norms].transformed()
        else:
            # One is enough: that the two parts of each query add up holds behind every norm if it holds behind one.
            norms, found = next(iter(products.items()))
            self._sketches = {norms: _Sketch(values, found, queries)}
            if self.per_head:
                lengths = value_norms(values, products[Carry().norms].gram)
                self.transformed = refined_head_norms(lengths, values, self._projection(Carry(), heads))
        self._sampled_weights = values.new_empty(batch, heads, queries)
        self.residual_norm = values.new_empty(batch, queries)
        if any(carry.final is not None for carry in self._distinct.values()):
            self.norm_scale = values.new_empty(batch, queries)
        if self.per_head and self.with_maps:
            self.head_map = values.new_empty(batch, heads, queries, keys)

    def _projection(self, carry: Carry, heads: int) -> Callable[[], Tensor]:
        return lambda: carried_projection(self.block, carry, heads, torch.float64)

    def consume(self, weights: Tensor, part: Part) -> None:
        weights = weights.to(self.dtype)
        for sketch in self._sketches.values():
            sketch.consume(weights, part)
        if self.per_head and self.with_maps:
            self.head_map[part.examples, :, part.rows] = head_norms(weights, self.transformed[part.examples])
        keys = self._sampled_keys[part.rows].expand(*weights.shape[:2], -1)
        self._sampled_weights[part.examples, :, part.rows] = weights.gather(3, keys.unsqueeze(3)).squeeze(3)

    def finish(self, tensors: BlockTensors | None) -> None:
        if tensors is None:
            raise ValueError("norms need the tensors of the block")
        if self.scopes:
            self._finish_scopes(tensors)
        else:
            self.residual_norm = length(tensors.residual.to(self.dtype))
            self.delta = self._attention_error(tensors)
        self.discrepancy = self._largest_discrepancy()
        # Only the results outlive the layer.
        self._sketches.clear()
        del self._values, self._sampled_keys, self._sampled_weights

    def _finish_scopes(self, tensors: BlockTensors) -> None:
        weight, bias = self.block.projection.weight(self.dtype), self.block.projection.bias(self.dtype)
        batch, queries, width = tensors.residual.shape
        finished: dict[Scope, list[BlockRows]] = {scope: [] for scope in self.scopes}
        for rows in list(chunks(queries, batch * width, self._limit)):
            here = tensors.rows(rows, self.dtype)
            self.residual_norm[:, rows] = length(here.residual)
            keys = self._sampled_keys[rows]
            sampled_weights = self._sampled_weights[:, :, rows].transpose(1, 2).unsqueeze(-1)
            values = self._values[:, keys if self._cross else rows]
            sampled = (values * sampled_weights).flatten(2) @ weight
            own = torch.zeros_like(sampled) if self._cross else sampled
            others = here.projected - own if bias is None else self._without_bias(here, rows, own, weight, bias)
            for norms, carry in self._distinct.items():
                form, attention = self._sketches.get(norms), CarriedAttention.of(carry, own, others)
                scales = self._noted_scales(carry, here, rows)
                if isinstance(form, _Form):
                    direct = length(carry.linear(sampled)) if self._cross else attention.own_norm
                    form.finish_rows(rows, keys, direct, scales)
                sketch = attention.sketch if form is None else form.sketch[:, rows]
                for scope, pieces in finished.items():
                    steps = self._carries[scope]
                    if steps.norms == norms:
                        residual, reference = self.ends(scope, here)
                        pieces.append(block_rows(steps, scales, attention, residual, bias, sketch, reference))
        deltas = []
        last_scopes = {carry.norms: scope for scope, carry in self._carries.items()}
        for scope, pieces in finished.items():
            whole = BlockRows(*(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)))
            self.mixing_ratio[scope] = whole.mixing_ratio
            deltas.append(relative_error(whole.error, whole.reference, self._real))
            deltas.append(relative_error(whole.attention_error, whole.attention, self._real))
            norms = self._carries[scope].norms
            form = self._sketches.get(norms)
            if isinstance(form, _Form):
                self.maps[scope] = form.divided(last=last_scopes[norms] == scope)
                if self._carries[scope].residual and not self._cross:
                    self.maps[scope].diagonal(dim1=-2, dim2=-1).copy_(whole.own_norm)
        self.delta = torch.stack(deltas).amax(0)

    def _without_bias(self, here: BlockTensors, rows: slice, own: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Attention's output without its bias and the queries' own vectors, (B, Q, D).

        Where the bias hides what is in it, that is computed from what the projection received.
        """
        others = here.projected - own - bias
        norms, sketch = next(iter(self._sketches.items()))
        size = length(self._distinct[norms].linear(bias))
        hidden = estimated_length(sketch.sketch[:, rows].detach()) < HIDDEN * size.detach()
        if not hidden.any():
            return others
        exact = here.context.to(own)[hidden] @ weight - own[hidden]
        return others.index_put(hidden.nonzero(as_tuple=True), exact)

    def _attention_error(self, tensors: BlockTensors) -> Tensor:
        """Whether Σ_j Σ_h α_ij f_h(x_j) is the attention output, where no scope says so: the relative error, (B,)."""
        (form,) = self._sketches.values()
        output, bias = tensors.projected.to(self.dtype), self.block.projection.bias(self.dtype)
        size = length(output)
        directions = random_directions(output.shape[-1], output)
        error = form.sketch - output @ directions
        if bias is not None:
            error, size = error + bias @ directions, size + length(bias)
        return relative_error(estimated_length(error), size, self._real)

    def scales(self, carry: Carry, tensors: BlockTensors) -> Scales:
        """1/σ of the steps' norms."""
        return carry.scales(tensors.projected, tensors.total)

    def check(self, model: nn.Module, place: Place) -> None:
        """Refuse results that are not finite, or that are not what the model computed.

        Raises:
            NonFiniteError: if they contain NaN or infinity.
            IncompleteDecompositionError: if vectors do not add up, or fast norms differ from directly computed ones.
        """
        expect_finite(model, place, self.delta, self.discrepancy)
        expect_complete(model, place, self.delta, self.precision)
        discrepancy = self.discrepancy.max().item()
        if not discrepancy <= TOLERANCE[self.dtype]:
            raise IncompleteDecompositionError(
                f"the fast norms of {place} of {type(model).__name__} differ from directly computed ones by "
                f"{discrepancy:.1e}, accepted {TOLERANCE[self.dtype]:.0e} for {self.dtype}"
            )

    def _noted_scales(self, carry: Carry, tensors: BlockTensors, rows: slice) -> Scales:
        scales = self.scales(carry, tensors)
        if self.norm_scale is not None and scales.final is not None:
            self.norm_scale[:, rows] = scales.final.squeeze(-1)
        return scales

    def _largest_discrepancy(self) -> Tensor:
        # Without scopes no norm of a sum over heads is computed directly.
        forms = [form for form in self._sketches.values() if isinstance(form, _Form) and self.scopes]
        if not forms and self.per_head:
            key = self._values.shape[1] // 2
            projection = self.block.projection.weight(self.dtype).unflatten(0, (self._values.shape[2], -1))
            return value_norms_error(self.transformed[..., key], self._values[:, key], projection)
        if not forms:
            return self._values.new_zeros(len(self._values))
        found = [form.discrepancy(self._sampled_keys, self._sampled_weights) for form in forms]
        return torch.stack(found).amax(0)

    def carry(self, scope: Scope) -> Carry:
        """The steps that a scope includes."""
        return self.block.carry(scope, self.dtype)

    def ends(self, scope: Scope, tensors: BlockTensors) -> tuple[Tensor, Tensor]:
        """The residual stream at a scope, and what the model computed there but for a parallel layer's constants."""
        behind = tensors.behind
        if scope == "atb_ff_res" and behind is not None:
            own, constant = parallel_part(self.block, tensors, self._baseline, self.dtype)
            return tensors.residual + own, behind.total - constant
        if scope == "atb_ln" and behind is not None and behind.read is not None:
            return tensors.residual, behind.read
        return tensors.residual, _reference(self._carries[scope], tensors)


def _reference(carry: Carry, tensors: BlockTensors) -> Tensor:
    """What the model computed at the carry's end."""
    if carry.final is not None and tensors.normed is not None:
        return tensors.normed
    return tensors.total if carry.residual else tensors.projected


@dataclass(frozen=True)
class MeasuredLayer:
    """What is asked of one layer: its weights, its norms, its norms behind the feed-forward network, or several."""

    weights: WeightReducer | None
    norms: NormReducer | None
    vectors: FeedForwardReducer | None = None

    @property
    def measuring(self) -> "list[NormReducer | FeedForwardReducer]":
        """Those that measure norms."""
        return [reducer for reducer in (self.norms, self.vectors) if reducer is not None]

    def _reducers(self) -> list[Reducer]:
        return [*self.measuring, *([] if self.weights is None else [self.weights])]

    def begin(self, call: AttentionCall) -> None:
        for reducer in self._reducers():
            reducer.begin(call)

    def consume(self, weights: Tensor, part: Part) -> None:
        for reducer in self._reducers():
            reducer.consume(weights, part)

    def finish(self, tensors: BlockTensors | None) -> None:
        for reducer in self._reducers():
            reducer.finish(tensors)

    def take_map(self, scope: Scope) -> Tensor:
        """(B, Q, K), given up."""
        return next(reducer.maps.pop(scope) for reducer in self.measuring if scope in reducer.maps)

    def mixing_ratio(self, scope: Scope) -> Tensor:
        """(B, Q)."""
        return next(reducer.mixing_ratio[scope] for reducer in self.measuring if scope in reducer.mixing_ratio)

    @property
    def block(self) -> Block | None:
        """The block that is measured; None if none is."""
        return next((reducer.block for reducer in self.measuring), None)

    @property
    def positions(self) -> int:
        """Q."""
        if self.norms is not None:
            return self.norms.positions
        return next(ratio.shape[1] for reducer in self.measuring for ratio in reducer.mixing_ratio.values())

    @property
    def delta(self) -> Tensor:
        """The largest completeness error, (B,)."""
        return torch.stack([reducer.delta for reducer in self.measuring]).amax(0)

    def check(self, model: nn.Module, place: Place) -> None:
        """Refuse what is not finite, or not what the model computed: see :meth:`NormReducer.check`."""
        if self.weights is not None:
            expect_finite(model, place, self.weights.map.detach().sum())
        for reducer in self.measuring:
            reducer.check(model, place)
