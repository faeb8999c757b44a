"""Computes ranks and Spearman's correlation."""

import torch
from torch import Tensor


def average_ranks(values: Tensor) -> Tensor:
    """Rank n values from 1; ties get their mean rank, (n,) -> (n,) in float64.

    Example:
        >>> average_ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[places]


def centred_ranks(values: Tensor) -> Tensor:
    """Compute twice the difference of each rank from the mean rank, (n,) -> (n,): integers, in float64.

    Example:
        >>> centred_ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
        [1.0, -2.0, 1.0]
    """
    return 2 * average_ranks(values) - (len(values) + 1)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Compute Spearman's rank correlation of two lists of n values, (n,) each -> scalar; NaN if either is constant.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([10.0, 30.0, 20.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    one, other = centred_ranks(first), centred_ranks(second)
    correlation: Tensor = one @ other / (one.square().sum() * other.square().sum()).sqrt()
    return correlation
