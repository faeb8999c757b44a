"""Transforms of word maps, by their definitions; decoders against enumeration, and at ties, zeros and edges."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import ArrayLike

from alignment import Alignment
from alignment.decoding import argmax, hmm_posteriors, link_probabilities, mutual_argmax, probable_links
from alignment.formats import format_pharaoh
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


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_links_are_those_of_their_definition(seed: int, null: bool) -> None:
    word_map = random_map(seed, 6, 5 + null)
    rows = word_map.tolist()
    cells = list(itertools.product(range(5), range(6)))
    highest = {(s, t) for s, t in cells if rows[t][s] == max(rows[t])}
    assert argmax(word_map, null=null).links == highest
    mutual = {(s, t) for s, t in highest if rows[t][s] == max(row[s] for row in rows)}
    assert mutual_argmax(word_map, null=null).links == mutual


def test_signed_maps_have_a_highest_entry_too() -> None:
    word_map = [[-1.0, -2.0, -3.0], [-3.0, 0.5, 0.2]]
    assert argmax(word_map) == Alignment([(0, 0), (1, 1)])
    assert mutual_argmax(word_map) == Alignment([(0, 0), (1, 1)])


def path_score(word_map: WordMap, path: tuple[int, ...], jump_penalty: float, null: bool) -> float:
    """Log-probability of one path; −1 is null."""
    score, last = 0.0, -1
    for row, position in zip(word_map.tolist(), path, strict=True):
        if position < 0:
            if not null and any(row):
                return -math.inf
            score += math.log(row[-1]) if null else 0.0
        else:
            score += math.log(row[position]) - jump_penalty * abs(position - last - 1)
            last = position
    return score


def enumerated(word_map: WordMap, jump_penalty: float, null: bool) -> WordMap:
    """Posteriors by adding up all paths."""
    targets, sources = word_map.shape[0], word_map.shape[1] - null
    shares, total = np.zeros((targets, sources)), 0.0
    for path in itertools.product(range(-1, sources), repeat=targets):
        weight = math.exp(path_score(word_map, path, jump_penalty, null))
        total += weight
        for target, position in enumerate(path):
            if position >= 0:
                shares[target, position] += weight
    return shares / total


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize("jump_penalty", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("seed", range(6))
def test_posteriors_are_those_of_all_paths(seed: int, jump_penalty: float, null: bool) -> None:
    word_map = random_map(seed, 2 + seed % 4, 1 + seed % 5 + null)
    found = hmm_posteriors(word_map, jump_penalty=jump_penalty, null=null)
    np.testing.assert_allclose(found, enumerated(word_map, jump_penalty, null), rtol=1e-10)


@pytest.mark.parametrize("min_probability", [0.0, 0.4])
@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_probable_links_are_what_both_directions_find_likeliest(seed: int, null: bool, min_probability: float) -> None:
    word_map = random_map(seed, 5, 4 + null)
    over_source = enumerated(word_map, 0.6, null)
    over_target = enumerated(word_map[:, :4].T, 0.6, False)
    mean = [[math.sqrt(over_source[t, s] * over_target[s, t]) for s in range(4)] for t in range(5)]
    expected = {
        (s, t)
        for s, t in itertools.product(range(4), range(5))
        if mean[t][s] == max(mean[t]) == max(row[s] for row in mean) and mean[t][s] > min_probability
    }
    probabilities = link_probabilities(word_map, jump_penalty=0.6, null=null)
    np.testing.assert_allclose(probabilities, mean, rtol=1e-10)
    assert probable_links(probabilities, min_probability).links == expected


@pytest.mark.parametrize("jump_penalty", [0.5, 50.0, 1e4])
def test_posteriors_step_over_rows_of_zeros_and_reach_the_only_cell(jump_penalty: float) -> None:
    word_map = np.zeros((4, 31))
    word_map[0, 0] = word_map[2, 29] = word_map[3, 1] = 1
    found = hmm_posteriors(word_map, jump_penalty=jump_penalty)
    np.testing.assert_allclose(found, word_map[:, :-1], atol=1e-12)


def test_posteriors_do_not_depend_on_the_scale_of_a_row() -> None:
    word_map = random_map(0, 8, 7)
    scaled = word_map * np.logspace(-200, 200, 8)[:, None]
    found, expected = (hmm_posteriors(given, jump_penalty=0.4) for given in (scaled, word_map))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def decoded(word_map: ArrayLike, null: bool = True) -> list[Alignment]:
    """What argmax, mutual argmax and mutual posterior make of a map."""
    probabilities = link_probabilities(word_map, jump_penalty=0.5, null=null)
    return [argmax(word_map, null=null), mutual_argmax(word_map, null=null), probable_links(probabilities, 0.0)]


@pytest.mark.parametrize(
    ("word_map", "expected"),
    [
        ([[1, 1, 1]], ["0-0", "0-0", "0-0"]),
        ([[1, 1, 0], [1, 1, 0]], ["0-0 0-1", "0-0", "0-0 1-1"]),
        ([[0, 1, 1]], ["1-0", "1-0", "1-0"]),
        ([[0, 0, 0], [0, 2, 1]], ["1-1"] * 3),
        ([[0, 0, 1]], [""] * 3),
    ],
)
def test_ties_go_to_the_first_and_zeros_get_no_link(word_map: list[list[float]], expected: list[str]) -> None:
    assert list(map(format_pharaoh, decoded(word_map))) == expected


@pytest.mark.parametrize(("shape", "null"), [((0, 4), True), ((3, 1), True), ((0, 1), True), ((3, 0), False)])
def test_sentences_without_words_have_no_links(shape: tuple[int, int], null: bool) -> None:
    assert decoded(np.ones(shape), null) == [Alignment()] * 3


def test_what_cannot_be_decoded_is_refused() -> None:
    for decoder in (argmax, mutual_argmax, partial(hmm_posteriors, jump_penalty=1)):
        with pytest.raises(InvalidInputError, match="NaN or infinity"):
            decoder([[1.0, np.inf]])
    with pytest.raises(InvalidInputError, match="got jump_penalty -1"):
        hmm_posteriors([[1.0, 1.0]], jump_penalty=-1)
    for least in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidInputError, match="expected 0 ≤ min_probability < 1"):
            probable_links([[1.0, 1.0]], least)
