"""Keeps the products of a model's weights that norms of vectors follow from, until a weight changes."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from captum_norm.functional import Carry, length, random_directions, weight_gram
from captum_norm.models.blocks import Block
from captum_norm.models.factors import FactorValue
from captum_norm.models.projections import version_of


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


def _weights(block: Block) -> list[FactorValue | None]:
    second = None if block.feed_forward is None else block.feed_forward.final_norm
    norms = [reader.module for reader in (block.branch_norm, block.norm_behind, second) if reader is not None]
    name = block.layout.branch_factor
    factor = None if name is None else block.factor(name)
    weights = [getattr(module, "weight", None) for module in norms]
    return [*weights, None if factor is None else factor.stored]


def _state(weight: FactorValue | None) -> object:
    return version_of(weight) if isinstance(weight, Tensor) else weight


def carried_rows(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Tensor:
    """Carry the rows of a block's output projection by head as far as ``carry`` goes, (H, d, D)."""
    return carry.linear(block.projection.weight(dtype).unflatten(0, (heads, -1)))
