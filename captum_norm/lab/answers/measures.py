"""Measures how well scores of a prompt's K sources, (K,), tell what an answer rests on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_norm.functional import spearman

__all__ = ["deletion_curve", "lds", "logit_probability", "mas", "recovery", "rise", "soft_nc", "soft_removal"]


def logit_probability(log_probability: Tensor) -> Tensor:
    """Compute log p / (1 − p) from log p, without loss where p is near 1."""
    below = log_probability.clamp(max=-torch.finfo(log_probability.dtype).tiny)
    return below - (-torch.expm1(below)).log()


def lds(scores: Tensor, kept: Tensor, log_probabilities: Tensor) -> float:
    """Compute the linear datamodeling score [Cohen-Wang et al. 2024]; NaN if all predictions are equal.

    It is Spearman's ρ, over ablations, of the kept sources' summed scores with the logit of the answer's probability.

    Args:
        scores: (K,).
        kept: True at the sources that stay, of N ablations, (N, K).
        log_probabilities: of the answer in each, (N,).
    """
    return float(spearman(kept.to(scores) @ scores, logit_probability(log_probabilities)))


def without_best(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Return which sources stay without the best so many, (S, K); of equal scores the first is best."""
    return scores.argsort(descending=True, stable=True).argsort() >= torch.tensor(counts)[:, None]


def deletion_curve(log_probabilities: Tensor) -> Tensor:
    """Scale log-probabilities l of an answer to a curve that falls from 1 to 0 [Walker et al. 2024].

    (l − l_none) / (l_all − l_none), clipped to 0 … 1, and never above what it was before.

    Args:
        log_probabilities: with all sources, then as the best ones are taken out, at last with none, (S,).

    Returns:
        (S,); NaN if the answer is not less probable without any source.
    """
    every, none = log_probabilities[0], log_probabilities[-1]
    shares: Tensor = ((log_probabilities - none) / (every - none)).clamp(0, 1).cummin(0).values
    return shares if every > none else torch.full_like(shares, torch.nan)


def rise(curve: Tensor) -> float:
    """Compute the area under a deletion curve, (S,); lower is better [Petsiuk et al. 2018]."""
    return float(torch.trapezoid(curve, dx=1 / (len(curve) - 1)))


def mas(curve: Tensor, scores: Tensor, counts: Sequence[int]) -> float:
    """Compute the magnitude aligned score of a deletion curve, (S,); lower is better [Walker et al. 2024].

    It is the area under the curve plus its distance from the share of scores that is left, together at most 1. Scores
    below zero count as 0; without any above, all count the same. ``counts`` are taken out at the S points.
    """
    positive = scores.double().clamp(min=0)
    positive = positive if positive.sum() > 0 else torch.ones_like(positive)
    left = (without_best(scores, counts) * positive).sum(1) / positive.sum()
    return rise((curve + (curve - left).abs()).clamp(0, 1))


def soft_removal(scores: Tensor) -> Tensor:
    """Return with which probability each source is taken out, (K,), ½ on average, whatever the method.

    Scores are scaled to 0 … 1, and these or their distances from 1 made smaller, whichever leads to that mean; equal
    ones have ½ [Zhao & Aletras 2023, with the expected retention held fixed as by Huang & Chan 2026].
    """
    above = scores.double() - scores.min()
    if not above.any():
        return torch.full_like(above, 0.5)
    scaled = above / above.max()
    mean = scaled.mean()
    return scaled / (2 * mean) if mean > 0.5 else 1 - (1 - scaled) / (2 * (1 - mean))


def soft_nc(log_probabilities: Tensor, every: Tensor, none: Tensor) -> float:
    """Compute which share of its fall an answer's log-probability falls by, on average over soft ablations, (N,).

    The fall is that from all sources, ``every``, to none; shares are clipped to 0 … 1, and NaN without a fall.
    """
    shares = ((every - log_probabilities) / (every - none)).clamp(0, 1)
    return float(shares.mean()) if every > none else float("nan")


def recovery(scores: Tensor, evidence: Sequence[int], count: int) -> float:
    """Compute the share of the evidence among the best so many sources; the R-precision, if as many as evidence."""
    best = ~without_best(scores, [count])[0]
    return float(best[list(evidence)].double().mean())
