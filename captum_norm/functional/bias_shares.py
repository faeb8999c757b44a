"""Distributes a bias among the parts it is added to [Modarressi et al. 2023]."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_norm.functional.lengths import balanced, in_range, length


def _first(parts: Tensor, _: Tensor) -> Tensor:
    weights = torch.zeros_like(parts[..., 0])
    weights[0] = 1
    return weights


BIAS_SHARES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "absdot": lambda parts, bias: torch.linalg.vecdot(parts, bias).abs(),
        "abssim": lambda parts, bias: cosine_similarity(balanced(parts)[0], balanced(bias)[0], dim=-1).abs(),
        "norm": lambda parts, _: length(parts),
        "equal": lambda parts, _: parts.any(-1).to(parts),
        "cls": _first,
    }
)
"""Each part's share of a bias, before normalisation to a sum of 1.

``(parts (K, R, D), bias (D,) or (R, D)) -> (K, R)``
"""


def add_bias(parts: Tensor, bias: Tensor, sharing: str) -> Tensor:
    """Add to each part its share of a bias.

    Args:
        parts: K parts at R positions, (K, R, D).
        bias: (D,), or one per position, (R, D).
        sharing: one of :data:`captum_norm.functional.BIAS_SHARES`; where all its shares are 0, nonzero parts share
            equally, or all parts if all are zero.

    Returns:
        (K, R, D); the sum over parts grows by the bias.

    Example:
        >>> add_bias(torch.tensor([[[1.0, 0.0]], [[-3.0, 0.0]]]), torch.tensor([4.0, 4.0]), "absdot")
        tensor([[[2., 1.]],
        <BLANKLINE>
                [[0., 3.]]])
    """
    weights = BIAS_SHARES[sharing](parts, bias)
    if not in_range(weights.sum(0)):
        # Scaling all parts of a position by one power of two changes no share.
        _, powers = balanced(parts.transpose(0, 1).flatten(1))
        weights = BIAS_SHARES[sharing](parts / powers, balanced(bias)[0])
    for instead in (parts.any(-1).to(parts), torch.ones_like(weights)):
        weights = weights.where(weights.sum(0) > 0, instead)
    return parts + (weights / weights.sum(0)).unsqueeze(-1) * bias
