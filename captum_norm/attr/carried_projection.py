"""Computes norms of the vectors that attention adds up from products of the model's weights."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from captum_norm.functional import (
    Carry,
    Scales,
    key_gram,
    length,
    random_directions,
    refined_head_norms,
    refined_summed_norms,
    squared_difference,
    summed_norms,
    transformed_norms,
    weight_gram,
)
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block
from captum_norm.models.factors import FactorValue


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
    state = (dtype, *(_state(weight) for weight in _weights(block)))
    if key not in kept or kept[key][0] != state:
        kept[key] = (state, _carried_projection(block, carry, heads, dtype))
    return kept[key][1]


def _carried_projection(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> CarriedProjection:
    rows, bias = carried_rows(block, carry, heads, dtype), block.projection.bias(dtype)
    directions = random_directions(rows.shape[-1], rows)
    carried = None if bias is None else carry.linear(bias)
    sketch = None if carried is None else (carried @ directions, length(carried))
    return CarriedProjection(weight_gram(rows), rows @ directions, sketch)


def _weights(block: Block) -> list[FactorValue | None]:
    second = None if block.feed_forward is None else block.feed_forward.final_norm
    norms = [reader.module for reader in (block.branch_norm, block.norm_behind, second) if reader is not None]
    name, projection = block.layout.branch_factor, block.projection.module
    factor = None if name is None else block.factor(name)
    weights = [getattr(module, "weight", None) for module in (projection, *norms)]
    return [*weights, getattr(projection, "bias", None), None if factor is None else factor.stored]


def _state(weight: FactorValue | None) -> object:
    if not isinstance(weight, Tensor):
        return weight
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def carried_rows(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Tensor:
    """Carry the rows of a block's output projection by head as far as ``carry`` goes, (H, d, D)."""
    return carry.linear(block.projection.weight(dtype).unflatten(0, (heads, -1)))


class SummedVectors:
    """Σ_j Σ_h α_ij f_h(x_j) of each query through a projection, on the random directions, (B, Q, k).

    Args:
        values: (B, K, H, d).
        projection: the carried output projection.
        queries: Q.
    """

    def __init__(self, values: Tensor, projection: CarriedProjection, queries: int) -> None:
        self._projected_keys = values.transpose(1, 2) @ projection.sketch
        self.sketch = values.new_empty(len(values), queries, projection.sketch.shape[-1])

    def consume(self, weights: Tensor, part: Part) -> None:
        """Process the attention weights of a part."""
        self.sketch[part] = (weights @ self._projected_keys[part.examples]).sum(1)


class PairNorms(SummedVectors):
    """‖Σ_h α_ij f_h(x_j)‖ of each query and key through a projection, not yet divided by the queries' σ.

    Args:
        values: as for :class:`SummedVectors`, like ``projection`` and ``queries``.
        limit: maximum number of elements of an intermediate result.
        exact: returns :func:`carried_rows` in float64, for norms out of the range of float32.
    """

    def __init__(
        self, values: Tensor, projection: CarriedProjection, queries: int, limit: int, exact: Callable[[], Tensor]
    ) -> None:
        super().__init__(values, projection, queries)
        self._values, self._exact = values, exact
        self._form = key_gram(values, projection.gram, limit)
        batch, keys, _, _ = values.shape
        self.norms = values.new_empty(batch, queries, keys)
        self._scale = values.new_empty(batch, queries, 1)
        self._fast, self._direct = values.new_empty(batch, queries), values.new_empty(batch, queries)

    def consume(self, weights: Tensor, part: Part) -> None:
        """Process the attention weights of a part."""
        super().consume(weights, part)
        norms = summed_norms(weights, self._form[part.examples])
        self.norms[part] = refined_summed_norms(norms, weights, self._values[part.examples], self._exact)

    def transformed(self) -> Tensor:
        """Compute ‖f_h(x_j)‖, not divided by σ, (B, H, K)."""
        return refined_head_norms(transformed_norms(self._form), self._values, self._exact)

    def finish_rows(self, rows: slice, keys: Tensor, direct: Tensor, scales: Scales) -> None:
        """Record the queries' 1/σ, and for each the fast and the directly computed norm at one key.

        Args:
            rows: the queries.
            keys: one key per query, (rows,).
            direct: the directly computed norm of this key's vector, (B, rows).
            scales: 1/σ.
        """
        self._fast[:, rows] = self.norms[:, rows].gather(2, keys.expand(len(direct), -1).unsqueeze(2)).squeeze(2)
        self._direct[:, rows] = direct
        self._scale[:, rows] = scales.divide(torch.ones_like(direct).unsqueeze(-1))

    def divided(self, *, last: bool) -> Tensor:
        """Return the norms divided by σ, (B, Q, K); with ``last``, in place unless gradients are enabled."""
        return self.norms.mul_(self._scale) if last and not torch.is_grad_enabled() else self.norms * self._scale

    def discrepancy(self, keys: Tensor, weights: Tensor) -> Tensor:
        """Compare the fast norms at one key j of each query with the directly computed ones, (B,).

        Squared norms, relative to (Σ_h ‖α_ij f_h(x_j)‖)², the scale of rounding errors even if heads cancel.

        Args:
            keys: the key of each query, (Q,).
            weights: its weights, (B, H, Q).
        """
        size = (weights * transformed_norms(self._form)[..., keys]).sum(1)
        return squared_difference(self._fast, self._direct, size).amax(1)
