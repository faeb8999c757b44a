"""Shares a bias among the parts that it is added to [Modarressi et al. 2023]."""

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
"""How much of a bias each part gets, before the shares are made to add up to 1.

``(parts (K, R, D), bias (D,) or (R, D)) -> (K, R)``
"""


def add_bias(parts: Tensor, bias: Tensor, sharing: str) -> Tensor:
    """Parts with their shares of a bias.

    Args:
        parts: K parts at R positions, (K, R, D).
        bias: (D,), or one for each position, (R, D).
        sharing: one of :data:`captum_norm.functional.BIAS_SHARES`; where it gives no part anything, those that are not
            zero share alike, all of them if all are.

    Returns:
        (K, R, D), their sum larger by the bias.

    Example:
        >>> add_bias(torch.tensor([[[1.0, 0.0]], [[-3.0, 0.0]]]), torch.tensor([4.0, 4.0]), "absdot")
        tensor([[[2., 1.]],
        <BLANKLINE>
                [[0., 3.]]])
    """
    weights = BIAS_SHARES[sharing](parts, bias)
    if not in_range(weights.sum(0)):
        # One power of two for all parts of a position changes no share.
        _, powers = balanced(parts.transpose(0, 1).flatten(1))
        weights = BIAS_SHARES[sharing](parts / powers, balanced(bias)[0])
    for instead in (parts.any(-1).to(parts), torch.ones_like(weights)):
        weights = weights.where(weights.sum(0) > 0, instead)
    return parts + (weights / weights.sum(0)).unsqueeze(-1) * bias
