"""Statistics against the values they summarise."""

import numpy as np
import pytest
import torch
from torch import Tensor

from captum_norm.functional import centred_ranks, spearman
from captum_norm.lab.analysis.results import cell
from captum_norm.lab.analysis.statistics import GREATEST, LEAST, Counts, Grid, Moments, RankedCounts


def test_moments_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    values, present = torch.randn(50, 3, dtype=torch.float64) + 5, torch.rand(50, 3) < 0.7
    moments = Moments(3)
    for rows in range(0, 50, 8):
        moments.add(values[rows : rows + 8], present[rows : rows + 8])
    for place in range(3):
        kept = values[present[:, place], place].numpy()
        found = [array[place] for array in moments.summary()[:4]]
        assert found == pytest.approx([kept.mean(), kept.std(), kept.min(), kept.max()], rel=1e-12)
    every = values[present].numpy()
    assert moments.over(0).summary()[:3] == pytest.approx((every.mean(), every.std(), every.min()))


def test_moments_of_nothing_are_not_defined() -> None:
    moments = Moments(1)
    moments.add(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool))
    assert np.isnan(moments.summary().mean).all()
    assert moments.summary().number.tolist() == [0]


def test_bins_are_ordered_and_as_narrow_as_they_are_said_to_be() -> None:
    grid = Grid(-6, 5, 3)
    values = torch.logspace(-6, 5, 20000, base=2)[:-1]
    places = grid.places(values)
    assert (places.diff() >= 0).all()
    assert places.unique().tolist() == list(range(grid.size))
    for place in range(grid.size):
        inside = values[places == place]
        assert inside.max() / inside.min() <= 1 + 2**-3
    assert grid.places(torch.tensor([0.0, 1e-30, 1e30])).tolist() == [0, 0, grid.size - 1]


def test_all_numbers_of_float32_have_bins() -> None:
    grid, info = Grid(LEAST, GREATEST, 4), torch.finfo(torch.float32)
    values = torch.tensor([0.0, info.smallest_normal / 2, info.smallest_normal, 1e-20, 1.0, 1e20, info.max])
    places = grid.places(values)
    assert (places.diff() > 0).all()
    assert [places[0], places[-1]] == [0, grid.size - 1]


def pairs(count: int, strength: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count)
    first = torch.randn(count, dtype=torch.float64)
    second = strength * first + torch.randn(count, dtype=torch.float64)
    return torch.sigmoid(first - 4), torch.exp(second * 0.3)  # like weights, and like lengths of vectors


@pytest.mark.parametrize("strength", [-1.0, 0.0, 0.4, 3.0])
def test_correlation_of_binned_values_is_near_that_of_the_values(strength: float) -> None:
    first, second = pairs(20000, strength)
    rows, columns = Grid(-24, 0, 4), Grid(-10, 10, 4)
    counts = Counts(2, rows, columns)
    fields = (rows.places(first).long() + rows.size) * columns.size + columns.places(second)
    counts.add(fields)
    empty, found = counts.spearman()
    assert np.isnan(empty)
    assert found == pytest.approx(spearman(first, second).item(), abs=1e-3)
    # Of the binned values themselves it is Spearman's correlation exactly.
    assert found == pytest.approx(spearman(rows.places(first), columns.places(second)).item(), abs=1e-12)


@pytest.mark.parametrize("strength", [-1.0, 0.0, 3.0])
def test_correlation_with_known_ranks(strength: float) -> None:
    first, second = pairs(5000, strength)
    kinds = (first * 300).long()  # equal ones have equal ranks
    ranks, grid = (centred_ranks(kinds) + len(kinds) + 1) / (2 * len(kinds)), Grid(-24, 12, 9)
    ranked = RankedCounts(2, grid)
    for rows in range(0, 5000, 999):
        piece = slice(rows, rows + 999)
        ranked.add(ranks[piece], torch.stack([second, 1 / second])[:, piece])
    forwards, backwards = ranked.spearman()
    exact = spearman(kinds, second).item()
    assert forwards == pytest.approx(exact, abs=1e-4)
    assert backwards == pytest.approx(-exact, abs=1e-3)


def test_parts_merge_in_any_order_to_the_counts_of_the_whole() -> None:
    first, second = pairs(3000, 1.0)
    grid = Grid(-24, 8, 4)

    def of(rows: slice) -> tuple[Counts, Moments]:
        counts, moments = Counts(1, grid, grid), Moments()
        counts.add(grid.places(first[rows]).long() * grid.size + grid.places(second[rows]))
        moments.add(second[rows], torch.tensor(True))
        return counts, moments

    whole = of(slice(None))
    for order in ((0, 1, 2), (2, 0, 1)):
        parts = [of(slice(1000 * place, 1000 * place + 1000)) for place in order]
        for found, expected, *rest in zip(*parts[:1], whole, *parts[1:], strict=True):
            for other in rest:
                found.join(other.parts)
            for name, array in expected.parts.items():
                np.testing.assert_allclose(found.parts[name], array, rtol=1e-13)


def test_cells_of_what_is_no_number() -> None:
    assert [cell(value) for value in (None, float("nan"), np.float64("inf"))] == [None] * 3
    assert [cell(value) for value in (np.float32(0.5), 2)] == [0.5, 2]
