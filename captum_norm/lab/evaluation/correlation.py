"""Rank correlations of token scores."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from captum_norm.checks import one_of, shown
from captum_norm.errors import InvalidInputError
from captum_norm.functional import centred_ranks

Coefficient = Literal["spearman", "kendall"]
"""Spearman's ρ, or Kendall's τ_b."""


def spearman(first: Tensor, second: Tensor, compared: Tensor) -> Tensor:
    """Spearman's ρ of two scores in each example: Pearson's correlation of the ranks, with equal scores sharing a rank.

    Args:
        first: (B, S).
        second: (B, S).
        compared: the tokens to compare, (B, S).

    Returns:
        (B,), float64; NaN if all scores of one are equal, or for fewer than two tokens.

    >>> spearman(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([0.5000], dtype=torch.float64)
    """
    return _tables([first, second], compared, "spearman")[:, 0, 1]


def kendall(first: Tensor, second: Tensor, compared: Tensor) -> Tensor:
    """Kendall's τ_b of two scores in each example.

    The number of pairs in the same order minus those in opposite order, divided by √(pairs that the first orders ·
    pairs that the second orders).

    Args:
        first: (B, S).
        second: (B, S).
        compared: the tokens to compare, (B, S).

    Returns:
        (B,), float64; NaN if all scores of one are equal, or for fewer than two tokens.

    >>> kendall(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([0.3333], dtype=torch.float64)
    """
    return _tables([first, second], compared, "kendall")[:, 0, 1]


def agreement(scores: Mapping[str, Tensor], compared: Tensor, coefficient: Coefficient = "spearman") -> Tensor:
    """Rank correlation of each pair of methods, averaged over examples.

    Args:
        scores: (B, S) for each of M methods, by name.
        compared: the tokens to compare, (B, S).
        coefficient: ``"spearman"`` or ``"kendall"``.

    Returns:
        (M, M), float64, in the order of ``scores``; the mean leaves out examples with NaN.

    Raises:
        InvalidInputError: there are no scores, the shapes differ, or the coefficient is unknown.
    """
    one_of("coefficient", coefficient, _FEATURES)
    given: object = scores
    if not isinstance(given, Mapping) or not given:
        raise InvalidInputError(f"got scores {shown(scores)}; expected a mapping from methods to tensors (B, S)")
    return _tables(list(scores.values()), compared, coefficient).nanmean(0)


def _ranks(values: Tensor) -> Tensor:
    """(M, n) -> (M, n)."""
    return torch.stack([centred_ranks(row) for row in values])


def _signs(values: Tensor) -> Tensor:
    """sign(x_i − x_j): (M, n) -> (M, n²)."""
    later, earlier = values[:, :, None], values[:, None]
    return ((later > earlier).double() - (later < earlier).double()).flatten(1)


# Each coefficient is the cosine of two scores' features.
_FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"spearman": _ranks, "kendall": _signs})


def _tables(scores: list[Tensor], compared: Tensor, coefficient: Coefficient) -> Tensor:
    """The coefficient of each pair of scores in each example: (B, S) each -> (B, M, M)."""
    tensors = (*scores, compared)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"got {shown(tensor)}; expected a tensor (B, S)")
    if len({tensor.shape for tensor in tensors}) != 1 or compared.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InvalidInputError(f"got tensors of shapes {shapes}; expected (B, S) for all")
    tables = []
    for values, chosen in zip(torch.stack(scores, 1), compared, strict=True):
        features = _FEATURES[coefficient](values[:, chosen])
        products = features @ features.T
        squares = products.diagonal()
        tables.append(products / (squares[:, None] * squares).sqrt())
    return torch.stack(tables)
