"""Rank correlation."""

import torch
from torch import Tensor


def average_ranks(values: Tensor) -> Tensor:
    """The ranks of n values from 1, ties sharing the mean of theirs, (n,) -> (n,) in float64.

    Example:
        >>> average_ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[places]


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation of two lists of n values, (n,) each -> scalar; NaN where one has a single value.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([10.0, 30.0, 20.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    ranks = [average_ranks(values) for values in (first, second)]
    one, other = (rank - rank.mean() for rank in ranks)
    correlation: Tensor = one @ other / (one.norm() * other.norm())
    return correlation
