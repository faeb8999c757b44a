"""Decoders against enumeration, and at ties, zeros and edges."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from numpy.typing import ArrayLike

from alignment import Alignment
from alignment.decoding import argmax, hmm_posteriors, link_probabilities, mutual_argmax, probable_links
from alignment.formats import format_pharaoh
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError


def random_map(seed: int, targets: int, columns: int) -> WordMap:
    return np.random.default_rng(seed).gamma(0.5, size=(targets, columns)) + 1e-3


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
