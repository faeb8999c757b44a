"""Ranks, their correlations and scores of outputs, against their definitions, sorting by hand and scipy."""

from fractions import Fraction
from itertools import combinations
from math import ceil, sqrt
from statistics import correlation

import pytest
import torch
from torch import Tensor

from captum_norm import InvalidInputError
from captum_norm.lab.evaluation import (
    agreement,
    area,
    kendall,
    mean_drop,
    ranks,
    relevance_gain,
    spearman,
    token_counts,
)


def numbers(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two scores, the second with many equal ones, and the tokens to compare."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(3, 12, generator=generator)
    second = (first + torch.randn(3, 12, generator=generator)).round()
    return first, second, torch.rand(3, 12, generator=generator) < 0.8


def shared_ranks(values: list[float]) -> list[float]:
    """Places from the lowest, the mean place for equal values."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


@pytest.mark.parametrize("seed", range(4))
def test_coefficients_follow_their_definitions(seed: int) -> None:
    first, second, compared = numbers(seed)
    rho, tau = spearman(first, second, compared), kendall(first, second, compared)
    for row in range(3):
        a, b = (values[row, compared[row]].tolist() for values in (first, second))
        assert abs(float(rho[row]) - correlation(shared_ranks(a), shared_ranks(b))) < 1e-12
        signs = [((x > y) - (x < y), (u > v) - (u < v)) for (x, u), (y, v) in combinations(zip(a, b, strict=True), 2)]
        ordered = sqrt(sum(x != 0 for x, _ in signs) * sum(u != 0 for _, u in signs))
        assert abs(float(tau[row]) - sum(x * u for x, u in signs) / ordered) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_coefficients_are_those_of_scipy(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with the extra demo")
    first, second, compared = numbers(seed)
    rho, tau = spearman(first, second, compared), kendall(first, second, compared)
    for row in range(3):
        a, b = (values[row, compared[row]].numpy() for values in (first, second))
        assert abs(float(rho[row]) - stats.spearmanr(a, b).statistic) < 1e-12
        assert abs(float(tau[row]) - stats.kendalltau(a, b).statistic) < 1e-12


def test_what_ranks_nothing_correlates_with_nothing() -> None:
    flat, steep = torch.ones(1, 4), torch.arange(4.0)[None]
    everything = torch.ones(1, 4, dtype=torch.bool)
    single = torch.tensor([[True, False, False, False]])
    for coefficient in (spearman, kendall):
        assert coefficient(flat, steep, everything).isnan().all()
        assert coefficient(steep, steep, single).isnan().all()
        assert coefficient(steep, -steep, everything) == -1


def test_agreement_is_the_mean_over_examples_where_it_is_defined() -> None:
    first, second, compared = numbers(0)
    second[1] = 0
    table = agreement({"a": first, "b": second}, compared, "kendall")
    values = kendall(first, second, compared)
    assert values[1].isnan()
    expected = (values[0] + values[2]) / 2
    torch.testing.assert_close(table, torch.tensor([[1, expected], [expected, 1]], dtype=torch.float64))
    assert agreement({"a": first, "b": second}, compared)[0, 1] == spearman(first, second, compared).nanmean()


def test_bad_input_is_refused() -> None:
    first, second, compared = numbers(0)
    with pytest.raises(InvalidInputError, match=r"shapes \(3, 12\), \(3, 11\), \(3, 12\); expected \(B, S\)"):
        spearman(first, second[:, 1:], compared)
    with pytest.raises(InvalidInputError, match="got coefficient='pearson'; expected one of spearman, kendall"):
        agreement({"a": first}, compared, "pearson")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [9, 200])  # torch sorts short rows in another way
def test_places_are_those_of_sorting_by_hand(seed: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (4, length), generator=generator).double()  # many are equal
    removable = torch.rand(4, length, generator=generator) < 0.7
    places = ranks(scores, removable)
    for row in range(4):
        tokens = [token for token in range(length) if removable[row, token]]
        order = sorted(tokens, key=lambda token: (-float(scores[row, token]), token))
        assert [places[row, token] for token in order] == list(range(len(order)))
        assert all(places[row, token] == length for token in range(length) if token not in order)


def test_counts_are_rounded_up_exactly() -> None:
    shares = [Fraction(numerator, 100) for numerator in range(101)]
    removable = torch.ones(1, 300, dtype=torch.bool)
    for length in (1, 3, 7, 100, 300):
        counts = token_counts([float(share) for share in shares], removable[:, :length])
        assert counts.tolist() == [[ceil(share * length) for share in shares]]


def test_scores_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(3, generator=generator, dtype=torch.float64)
    morf, lerf = torch.rand(2, 3, 6, generator=generator, dtype=torch.float64)
    for row in range(3):
        drops = [float(whole[row] - value) for value in morf[row]]
        assert abs(float(mean_drop(whole, morf)[row]) - sum(drops) / 6) < 1e-15
        areas = [
            sum((float(curve[row, step]) + float(curve[row, step + 1])) / 2 / 5 for step in range(5))
            for curve in (morf, lerf)
        ]
        assert abs(float(area(morf)[row]) - areas[0]) < 1e-15
        assert abs(float(relevance_gain(morf, lerf)[row]) - (areas[1] - areas[0])) < 1e-15
