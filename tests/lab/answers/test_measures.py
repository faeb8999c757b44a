"""Measures of answers against loops and numbers worked out by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from captum_norm.lab.answers import measures


def spearman_by_hand(first: list[float], second: list[float]) -> float:
    """Pearson's correlation of mean ranks."""
    ranks = [[sum(b < a for b in row) + sum(b == a for b in row) / 2 for a in row] for row in (first, second)]
    return float(torch.corrcoef(torch.tensor(ranks, dtype=torch.float64))[0, 1])


def drawn(seed: int, sources: int = 7, rows: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sources, generator=generator, dtype=torch.float64)
    kept = torch.rand(rows, sources, generator=generator) < 0.5
    return scores, kept, -10 * torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_lds_is_a_correlation_of_ranks(seed: int) -> None:
    scores, kept, log_probabilities = drawn(seed)
    predicted = [sum(float(s) for s, stays in zip(scores, row, strict=True) if stays) for row in kept]
    actual = [math.log(math.exp(lp) / (1 - math.exp(lp))) for lp in log_probabilities.tolist()]
    expected = spearman_by_hand(predicted, actual)
    assert measures.lds(scores, kept, log_probabilities) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(measures.lds(torch.zeros(7), kept, log_probabilities))


def test_logits_near_one() -> None:
    tiny = torch.tensor([-1e-20, -1e-3, -40.0, 0.0], dtype=torch.float64)
    found = measures.logit_probability(tiny).tolist()
    assert found[:3] == pytest.approx([20 * math.log(10), math.log(math.exp(-1e-3) / -math.expm1(-1e-3)), -40])
    assert math.isfinite(found[3])
    assert found[3] > found[0]


def curve_by_hand(log_probabilities: list[float]) -> list[float]:
    every, none, least, found = log_probabilities[0], log_probabilities[-1], 1.0, []
    for value in log_probabilities:
        least = min(least, max(0.0, min(1.0, (value - none) / (every - none))))
        found.append(least)
    return found


def area_by_hand(curve: list[float]) -> float:
    return sum((a + b) / 2 for a, b in pairwise(curve)) / (len(curve) - 1)


@pytest.mark.parametrize("seed", range(4))
def test_curves_and_areas_by_loops(seed: int) -> None:
    scores, _, _ = drawn(seed)
    values = (-10 * np.random.default_rng(seed).random(8)).tolist()
    values[0], values[-1] = -0.1, -8.0
    curve = measures.deletion_curve(torch.tensor(values, dtype=torch.float64))
    expected = curve_by_hand(values)
    assert curve.tolist() == pytest.approx(expected, abs=1e-12)
    assert measures.rise(curve) == pytest.approx(area_by_hand(expected), abs=1e-12)
    order = sorted(range(7), key=lambda source: -scores[source])
    weights = [max(0.0, float(score)) for score in scores]
    aligned = []
    for removed, share in enumerate(expected):
        left = sum(weights[source] for source in order[removed:]) / sum(weights)
        aligned.append(min(1.0, share + abs(share - left)))
    assert measures.mas(curve, scores, range(8)) == pytest.approx(area_by_hand(aligned), abs=1e-12)


def test_a_curve_at_some_points() -> None:
    scores = torch.tensor([3.0, 1.0, 0.0, 0.0])
    curve = measures.deletion_curve(torch.tensor([0.0, -4.0, -8.0]))
    assert curve.tolist() == [1, 0.5, 0]
    # Left of the scores: 1, 0 and 0, so the curve is at 1, 0.5 + 0.5 and 0.
    assert measures.mas(curve, scores, [0, 2, 4]) == 0.75
    assert measures.mas(curve, torch.zeros(4), [0, 2, 4]) == 0.5
    assert measures.rise(curve) == 0.5


def test_an_answer_that_needs_no_source_has_no_curve() -> None:
    curve = measures.deletion_curve(torch.tensor([-3.0, -1.0, -2.0]))
    assert math.isnan(measures.rise(curve))
    assert math.isnan(measures.mas(curve, torch.tensor([1.0, 2.0]), [0, 1, 2]))


def test_what_stays_without_the_best() -> None:
    kept = measures.without_best(torch.tensor([1.0, 5.0, 1.0]), [0, 1, 2, 3])
    assert kept.tolist() == [[True] * 3, [True, False, True], [False, False, True], [False] * 3]


def test_recovery() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, -1.0, 0.7])
    assert measures.recovery(scores, [1, 3], 2) == 0.5
    assert measures.recovery(scores, [1, 4], 2) == 1
    assert measures.recovery(scores, (0, 2, 3), 3) == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", range(4))
def test_soft_removal_keeps_half_on_average(seed: int) -> None:
    scores = drawn(seed)[0].mul(3).exp() * (1 if seed % 2 else -1)  # of a skew that puts the mean below or above ½
    found = measures.soft_removal(scores).tolist()
    low, high = min(scores.tolist()), max(scores.tolist())
    shares = [(score - low) / (high - low) for score in scores.tolist()]
    mean = sum(shares) / len(shares)
    assert (mean > 0.5) == (seed % 2 == 0)
    expected = [share * 0.5 / mean if mean > 0.5 else 1 - (1 - share) * 0.5 / (1 - mean) for share in shares]
    assert found == pytest.approx(expected, abs=1e-12)
    assert sum(found) == pytest.approx(len(found) / 2)
    assert 0 <= min(found) < max(found) <= 1
    assert measures.soft_removal(torch.full((3,), 7.0)).tolist() == [0.5] * 3


def test_soft_nc_is_the_mean_share_of_the_fall() -> None:
    every, none = torch.tensor(-1.0), torch.tensor(-5.0)
    assert measures.soft_nc(torch.tensor([-1.0, -3.0, -0.5, -9.0]), every, none) == pytest.approx((0 + 0.5 + 0 + 1) / 4)
    assert math.isnan(measures.soft_nc(torch.tensor([-1.0]), none, every))
