"""Transforms of word maps, by their definitions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import ArrayLike

from alignment.word_maps import WordMap, normalize_rows, sinkhorn, smoothed_product
from captum_norm import InvalidInputError

SHAPES = [(1, 1), (1, 4), (5, 1), (4, 4), (3, 7), (12, 5)]  # T, S


def random_map(seed: int, targets: int, columns: int) -> WordMap:
    return np.random.default_rng(seed).gamma(0.5, size=(targets, columns)) + 1e-3


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize(("targets", "sources"), SHAPES)
def test_rows_are_normalised_and_rows_of_zeros_stay(targets: int, sources: int, null: bool) -> None:
    word_map = random_map(0, targets, sources + null)
    word_map[-1] = 0
    normalized = normalize_rows(word_map, null=null)
    for row, original in zip(normalized[:-1].tolist(), word_map.tolist(), strict=False):
        assert row == pytest.approx([value / math.fsum(original) for value in original], rel=1e-14)
    assert not normalized[-1].any()


@pytest.mark.parametrize(("targets", "sources"), SHAPES)
def test_sinkhorn_reaches_its_sums(targets: int, sources: int) -> None:
    word_map = random_map(1, targets, sources + 1)
    doubly = sinkhorn(word_map, iterations=100_000)
    np.testing.assert_array_equal(doubly[:, -1], normalize_rows(word_map)[:, -1])
    np.testing.assert_allclose(doubly.sum(1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(doubly[:, :-1].sum(0), (targets - doubly[:, -1].sum()) / sources, rtol=0, atol=1e-9)
    # It is the map with its rows and columns scaled: the logarithm of the quotient has rank one, as r_t + c_s has.
    scales = np.log(doubly[:, :-1] / word_map[:, :-1])
    np.testing.assert_allclose(scales, scales[:, :1] + scales[:1] - scales[0, 0], rtol=0, atol=1e-9)


def test_sinkhorn_without_null_column() -> None:
    doubly = sinkhorn(random_map(2, 6, 4), null=False, iterations=100_000)
    np.testing.assert_allclose(doubly.sum(1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(doubly.sum(0), 6 / 4, rtol=0, atol=1e-9)


def test_sinkhorn_leaves_rows_and_columns_of_zeros_alone() -> None:
    word_map = random_map(3, 5, 5)
    word_map[1] = 0
    word_map[:, 2] = 0
    word_map[3, :-1] = 0  # null alone
    doubly = sinkhorn(word_map, iterations=100_000)
    live = np.delete(np.arange(4), 2)
    assert not doubly[1].any()
    assert doubly[3].tolist() == [0, 0, 0, 0, 1]
    assert not doubly[:, 2].any()
    np.testing.assert_allclose(doubly[:, live].sum(0), (4 - doubly[:, -1].sum()) / 3, rtol=0, atol=1e-9)


def test_sinkhorn_stays_finite_where_the_sums_cannot_be_reached() -> None:
    # Two rows have only the first column to go to, which may not take both.
    word_map = np.array([[1, 0, 0], [1, 0, 0], [1e-300, 1, 1e-300]])
    doubly = sinkhorn(word_map, null=False, iterations=5_000)
    np.testing.assert_allclose(doubly.sum(1), 1, rtol=0, atol=1e-12)
    assert np.isfinite(doubly).all()


@pytest.mark.parametrize("smallest", [1e-100, 1e-290, 1e-307])
def test_sinkhorn_does_not_depend_on_the_scale_of_a_column(smallest: float) -> None:
    word_map = random_map(5, 6, 4)
    scaled = word_map * [1, smallest, 1, smallest]
    found, expected = (sinkhorn(one, null=False, iterations=100_000) for one in (scaled, word_map))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.parametrize("null", [True, False])
def test_smoothed_product_is_the_product_of_mixtures(null: bool) -> None:
    maps = [random_map(seed, 4, 5) for seed in range(2)]
    maps[0][1] = 0  # undecided: uniform
    for word_map in maps:
        word_map[2] = 0  # nothing is known
    found = smoothed_product(*maps, null=null)
    for t in (0, 1, 3):
        factors = []
        for word_map in maps:
            total = math.fsum(word_map[t].tolist())
            shares = [value / total if total else 0.2 for value in word_map[t].tolist()]
            factors.append([(share + 0.2) / 2 for share in shares])
        products = [math.prod(column) for column in zip(*factors, strict=True)]
        assert found[t].tolist() == pytest.approx([value / math.fsum(products) for value in products], rel=1e-13)
    assert not found[2].any()
    with pytest.raises(InvalidInputError, match=r"got maps of shapes \(4, 5\) and \(5, 4\), expected one shape"):
        smoothed_product(maps[0], maps[1].T)


@pytest.mark.parametrize(
    "transform",
    [
        normalize_rows,
        sinkhorn,
        pytest.param(lambda word_map: smoothed_product(word_map, word_map), id="smoothed_product"),
    ],
)
@pytest.mark.parametrize(
    ("word_map", "message"),
    [
        ([1.0, 2.0], r"shape \(2,\), expected \(target words, source words \+ 1\)"),
        (np.zeros((3, 0)), r"shape \(3, 0\)"),
        ([[1.0, np.nan]], "NaN or infinity"),
        ([[1.0, -2.0]], r"negative entry -2\.0"),
    ],
)
def test_what_is_no_map_is_refused(
    transform: Callable[[ArrayLike], WordMap], word_map: ArrayLike, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        transform(word_map)


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (0, 1)])
def test_sentences_without_words_are_defined(shape: tuple[int, int]) -> None:
    word_map = np.ones(shape)
    for result in (normalize_rows(word_map), sinkhorn(word_map)):
        np.testing.assert_array_equal(result, word_map)


def test_maps_are_left_as_they_were() -> None:
    word_map = random_map(5, 4, 4)
    before = word_map.copy()
    normalize_rows(word_map)
    sinkhorn(word_map)
    smoothed_product(word_map, word_map)
    np.testing.assert_array_equal(word_map, before)
