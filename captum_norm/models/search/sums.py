"""Finds which of many tensors are sums of others: compares random projections before whole tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

DIRECTIONS = 8
# Units in the last place that a sum may differ by; what passes is compared in full.
_ROUNDINGS = 8


@dataclass(frozen=True, eq=False)
class Sketch:
    """Products of a tensor with random directions. Those of a sum are sums.

    Attributes:
        products: the products, (k,).
        size: bound of the tensor's length, times that of the directions, ().
        eps: the machine epsilon of its dtype, ().
    """

    products: Tensor
    size: Tensor
    eps: Tensor

    def plus(self, other: "Sketch", factor: int = 1) -> "Sketch":
        """Return the sketch of the sum with another tensor, times 1 or −1."""
        products = self.products + factor * other.products
        return Sketch(products, self.size + other.size, torch.maximum(self.eps, other.eps))


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of a tensor."""
    directions, length = _directions(tensor.numel())
    flat = tensor.detach().cpu().double().flatten()
    return Sketch(
        flat @ directions,
        length * flat.norm(),
        torch.tensor(torch.finfo(tensor.dtype).eps, dtype=torch.float64, device="cpu"),
    )


@cache
def _directions(size: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(size, DIRECTIONS, generator=generator, dtype=torch.float64, device="cpu")
    return directions, float(directions.norm(dim=0).max())


class Sketches:
    """Sketches of tensors with as many elements each.

    Args:
        sketches: the sketches.
    """

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        empty = torch.empty(0, dtype=torch.float64, device="cpu")
        self._products = torch.stack([one.products for one in sketches]) if sketches else empty.reshape(0, DIRECTIONS)
        self._sizes = torch.stack([one.size for one in sketches]) if sketches else empty
        self._eps = torch.stack([one.eps for one in sketches]) if sketches else empty

    def near(self, whole: Sketch) -> list[int]:
        """Return the places of the tensors that may equal a tensor up to rounding."""
        error = _ROUNDINGS * torch.maximum(self._eps, whole.eps) * (self._sizes + whole.size)
        places: list[int] = (
            ((self._products - whole.products).abs() <= error[:, None]).all(1).nonzero().flatten().tolist()
        )
        return places

    def pairs(self, stream: Sketch, sums: "Sketches") -> Iterator[tuple[int, int]]:
        """Yield (place here, place in ``sums``) where a stream plus a tensor may equal a sum up to rounding."""
        eps = torch.maximum(torch.maximum(self._eps[:, None], sums._eps), stream.eps)
        error = _ROUNDINGS * eps * (self._sizes[:, None] + sums._sizes + stream.size)
        wanted, close = sums._products - stream.products, torch.ones_like(error, dtype=torch.bool)
        for direction in range(DIRECTIONS):
            close &= (self._products[:, None, direction] - wanted[:, direction]).abs() <= error
        yield from map(tuple, close.nonzero().tolist())
