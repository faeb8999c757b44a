"""Ranks tokens by score, and selects those to remove."""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

# 0.07 · 100 is a little more than 7 in floating point.
_SLACK = 1e-9


def ranks(scores: Tensor, removable: Tensor) -> Tensor:
    """Rank tokens by descending score; equal scores from the left.

    Args:
        scores: (B, S).
        removable: True at the tokens to rank, (B, S).

    Returns:
        ranks from 0, (B, S); S at all other tokens.

    >>> ranks(torch.tensor([[0.1, 0.9, 5.0, 0.1]]), torch.tensor([[True, True, False, True]]))
    tensor([[1, 0, 4, 2]])
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~removable).gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places).masked_fill(~removable, scores.shape[1])


def token_counts(fractions: Sequence[float], removable: Tensor) -> Tensor:
    """Convert fractions q of n tokens to counts ⌈qn⌉, at least one for any q > 0.

    Args:
        fractions: K numbers from 0 to 1.
        removable: the tokens to count, (B, S).

    Returns:
        (B, K).

    >>> token_counts([0.0, 0.01, 0.5, 1.0], torch.ones(1, 7, dtype=torch.bool))
    tensor([[0, 1, 4, 7]])
    """
    rows = [[ceil(fraction * count - _SLACK) for fraction in fractions] for count in removable.sum(1).tolist()]
    return torch.tensor(rows, device=removable.device)


def highest(places: Tensor, counts: Tensor) -> Tensor:
    """True at the first tokens of the ranking: (B, S), (B, K) -> (B, K, S)."""
    return places[:, None] < counts[..., None]


def lowest(places: Tensor, counts: Tensor, removable: Tensor) -> Tensor:
    """True at the last tokens of the ranking: (B, S), (B, K), (B, S) -> (B, K, S)."""
    rest = removable.sum(1, keepdim=True) - counts
    return (places[:, None] >= rest[..., None]) & removable[:, None]
