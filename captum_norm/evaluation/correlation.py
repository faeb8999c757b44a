"""Rank correlations of token scores."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from captum_norm import functional
from captum_norm.errors import InvalidInputError

Coefficient = Literal["spearman", "kendall"]
"""Spearman's ρ, or Kendall's τ_b."""


def spearman(first: Tensor, second: Tensor, compared: Tensor) -> Tensor:
    """Spearman's ρ of two scores in each example: Pearson's correlation of their ranks, equal scores sharing a rank.

    Args:
        first: (B, S).
        second: (B, S).
        compared: the tokens to compare, (B, S).

    Returns:
        (B,), float64; NaN where one of them ranks nothing: all scores equal, or fewer than two tokens.

    >>> spearman(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([0.5000], dtype=torch.float64)
    """
    return _by_example(functional.spearman, first, second, compared)


def kendall(first: Tensor, second: Tensor, compared: Tensor) -> Tensor:
    """Kendall's τ_b of two scores in each example.

    Pairs in the same order less pairs in opposite order, over √(pairs that the first orders · pairs that the second
    orders).

    Args:
        first: (B, S).
        second: (B, S).
        compared: the tokens to compare, (B, S).

    Returns:
        (B,), float64; NaN where one of them ranks nothing: all scores equal, or fewer than two tokens.

    >>> kendall(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([0.3333], dtype=torch.float64)
    """
    return _by_example(_kendall, first, second, compared)


def agreement(scores: Mapping[str, Tensor], compared: Tensor, coefficient: Coefficient = "spearman") -> Tensor:
    """How alike methods rank tokens: the mean over examples of each pair's rank correlation.

    Args:
        scores: (B, S) by method, M of them.
        compared: the tokens to compare, (B, S).
        coefficient: ``"spearman"`` or ``"kendall"``.

    Returns:
        (M, M), float64, in the order of ``scores``; examples where a coefficient is NaN are left out of its mean.
    """
    if coefficient not in _COEFFICIENTS:
        raise InvalidInputError(f"got the coefficient {coefficient!r}; expected one of {', '.join(_COEFFICIENTS)}")
    correlate, columns = _COEFFICIENTS[coefficient], list(scores.values())
    rows = [[correlate(a, b, compared).nanmean() for b in columns] for a in columns]
    return torch.stack([torch.stack(row) for row in rows])


def _kendall(first: Tensor, second: Tensor) -> Tensor:
    first, second = _signs(first), _signs(second)
    return (first * second).sum() / (first.square().sum() * second.square().sum()).sqrt()


_COEFFICIENTS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = MappingProxyType(
    {"spearman": spearman, "kendall": kendall}
)


def _signs(values: Tensor) -> Tensor:
    """sign(x_i − x_j): (n,) -> (n, n)."""
    return (values[:, None] > values).double() - (values[:, None] < values).double()


def _by_example(
    correlate: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor, compared: Tensor
) -> Tensor:
    if not first.shape == second.shape == compared.shape or first.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (first, second, compared))
        raise InvalidInputError(f"got tensors of shapes {shapes}; expected (B, S) for all")
    return torch.stack([correlate(a[chosen], b[chosen]) for a, b, chosen in zip(first, second, compared, strict=True)])
