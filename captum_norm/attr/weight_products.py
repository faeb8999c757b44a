"""Keeps products of a model's weights that every input needs, until a weight changes."""

from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from captum_norm.functional import Carry, random_directions, weight_gram
from captum_norm.models.blocks import Block
from captum_norm.models.factors import FactorValue


@dataclass(frozen=True)
class Products:
    """Constants of one block and one carry.

    Attributes:
        gram: inner products of the carried projection's rows, (H·d, H·d).
        sketch: the carried projection on the random directions, (H, d, k).
    """

    gram: Tensor
    sketch: Tensor


_kept: WeakKeyDictionary[Block, dict[tuple[object, ...], tuple[tuple[object, ...], Products]]] = WeakKeyDictionary()


def weight_products(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Products:
    """The products for a block's projection carried as far as ``carry`` goes; those kept, unless a weight changed."""
    if torch.is_grad_enabled():
        return _products(block, carry, heads, dtype)
    # A carry of another class goes on through further norms.
    kept, key = _kept.setdefault(block, {}), (type(carry), *carry.norms)
    state = (dtype, *(_state(weight) for weight in _weights(block)))
    if key not in kept or kept[key][0] != state:
        kept[key] = (state, _products(block, carry, heads, dtype))
    return kept[key][1]


def carried_projection(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Tensor:
    """The rows of a block's output projection by head, carried as far as ``carry`` goes, (H, d, D)."""
    return carry.linear(block.projection.weight(dtype).unflatten(0, (heads, -1)))


def _products(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Products:
    projection = carried_projection(block, carry, heads, dtype)
    return Products(weight_gram(projection), projection @ random_directions(projection.shape[-1], projection))


def _weights(block: Block) -> list[FactorValue]:
    second = None if block.feed_forward is None else block.feed_forward.final_norm
    norms = (block.branch_norm, block.norm_behind, second)
    modules = [reader.module for reader in norms if reader is not None]
    weights = [getattr(module, "weight", None) for module in modules]
    name = block.layout.branch_factor
    factor = None if name is None else block.factor(name)
    return [
        cast(Tensor, block.projection.module.weight),
        *(weight for weight in weights if isinstance(weight, Tensor)),
        *([] if factor is None else [factor.stored]),
    ]


def _state(weight: FactorValue) -> object:
    if not isinstance(weight, Tensor):
        return weight
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
