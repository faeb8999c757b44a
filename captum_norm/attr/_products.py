"""Products of a model's weights that every input needs: computed once, kept until a weight changes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


class ProductCache:
    """The products of each attention block, made anew where a weight was replaced or changed in place."""

    def __init__(self) -> None:
        self._kept: dict[tuple[nn.Module, bool, bool], tuple[tuple[object, ...], Products]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def get(self, block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Products:
        """The products for a block's projection carried as far as ``carry`` goes."""
        if torch.is_grad_enabled():
            return _products(block, carry, heads, dtype)
        key = (block.attention, carry.branch is not None, carry.final is not None)
        state = (dtype, *(_state(weight) for weight in _weights(block)))
        kept = self._kept.get(key)
        if kept is None or kept[0] != state:
            kept = self._kept[key] = (state, _products(block, carry, heads, dtype))
        return kept[1]


def carried_projection(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Tensor:
    """The rows of a block's output projection by head, carried as far as ``carry`` goes, (H, d, D)."""
    return carry.linear(block.projection.weight(dtype).unflatten(0, (heads, -1)))


def _products(block: Block, carry: Carry, heads: int, dtype: torch.dtype) -> Products:
    projection = carried_projection(block, carry, heads, dtype)
    return Products(weight_gram(projection), projection @ random_directions(projection.shape[-1], projection))


def _weights(block: Block) -> list[FactorValue]:
    modules = [reader.module for reader in (block.branch_norm, block.norm_behind) if reader is not None]
    weights = [getattr(module, "weight", None) for module in modules]
    factor = block.factor(block.layout.branch_factor)
    return [
        block.projection.parameter,
        *(weight for weight in weights if isinstance(weight, Tensor)),
        *([] if factor is None else [factor.stored]),
    ]


def _state(weight: FactorValue) -> object:
    if not isinstance(weight, Tensor):
        return weight
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
