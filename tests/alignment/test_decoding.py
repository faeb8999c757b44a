"""Decoders against enumeration, and at ties, zeros and edges."""

import itertools
import math

import numpy as np
import pytest

from alignment import (
    DECODERS,
    Alignment,
    WordMap,
    argmax,
    hmm_posteriors,
    hmm_viterbi,
    mutual_argmax,
    mutual_hmm,
    mutual_posterior,
    threshold,
)
from alignment.formats import format_pharaoh
from captum_norm import InvalidInputError

SETTINGS = {
    "threshold": {"share": 0.2},
    "hmm-viterbi": {"jump_penalty": 0.5},
    "mutual-hmm": {"jump_penalty": 0.5},
    "mutual-posterior": {"jump_penalty": 0.5},
}


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
    several = {(s, t) for s, t in cells if rows[t][s] > 0.2 * math.fsum(rows[t])}
    assert threshold(word_map, share=0.2, null=null).links == several
    assert len({t for _, t in several}) < len(several)


def test_signed_maps_have_a_highest_entry_too() -> None:
    word_map = [[-1.0, -2.0, -3.0], [-3.0, 0.5, 0.2]]
    assert argmax(word_map) == Alignment([(0, 0), (1, 1)])
    assert mutual_argmax(word_map) == Alignment([(0, 0), (1, 1)])


def path_score(word_map: WordMap, path: tuple[int, ...], jump_penalty: float, null_penalty: float, null: bool) -> float:
    """Log-probability of one path; −1 is null."""
    score, last = 0.0, -1
    for row, position in zip(word_map.tolist(), path, strict=True):
        if position < 0:
            if not null and any(row):
                return -math.inf
            score += math.log(row[-1]) - null_penalty if null else 0.0
        else:
            score += math.log(row[position]) - jump_penalty * abs(position - last - 1)
            last = position
    return score


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize("jump_penalty", [0.0, 0.4, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_mutual_hmm_is_the_intersection_of_the_best_paths_both_ways(seed: int, jump_penalty: float, null: bool) -> None:
    word_map = random_map(seed, 4, 3 + null)
    words = word_map[:, :3]
    targets = itertools.product(range(-null, 3), repeat=4)
    over_source = max(targets, key=lambda path: path_score(word_map, path, jump_penalty, 0.0, null))
    sources = itertools.product(range(4), repeat=3)
    over_target = max(sources, key=lambda path: path_score(words.T, path, jump_penalty, 0.0, False))
    both = {(s, t) for t, s in enumerate(over_source) if s >= 0 and over_target[s] == t}
    assert mutual_hmm(word_map, jump_penalty=jump_penalty, null=null).links == both


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize(("jump_penalty", "null_penalty"), [(0.0, 0.0), (0.3, 0.0), (1.0, 0.7), (5.0, 2.0)])
@pytest.mark.parametrize("seed", range(6))
def test_viterbi_finds_the_best_of_all_paths(seed: int, jump_penalty: float, null_penalty: float, null: bool) -> None:
    targets, sources = 2 + seed % 4, 1 + seed % 5
    word_map = random_map(seed, targets, sources + null)
    paths = itertools.product(range(-1, sources), repeat=targets)
    best = max(paths, key=lambda path: path_score(word_map, path, jump_penalty, null_penalty, null))
    decoded = hmm_viterbi(word_map, jump_penalty=jump_penalty, null_penalty=null_penalty, null=null)
    assert decoded == Alignment([(position, target) for target, position in enumerate(best) if position >= 0])


def enumerated(word_map: WordMap, jump_penalty: float, null_penalty: float, null: bool) -> WordMap:
    """Posteriors by adding up all paths."""
    targets, sources = word_map.shape[0], word_map.shape[1] - null
    shares, total = np.zeros((targets, sources)), 0.0
    for path in itertools.product(range(-1, sources), repeat=targets):
        weight = math.exp(path_score(word_map, path, jump_penalty, null_penalty, null))
        total += weight
        for target, position in enumerate(path):
            if position >= 0:
                shares[target, position] += weight
    return shares / total


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize(("jump_penalty", "null_penalty"), [(0.0, 0.0), (0.3, 0.0), (1.0, 0.7), (5.0, 2.0)])
@pytest.mark.parametrize("seed", range(6))
def test_posteriors_are_those_of_all_paths(seed: int, jump_penalty: float, null_penalty: float, null: bool) -> None:
    word_map = random_map(seed, 2 + seed % 4, 1 + seed % 5 + null)
    found = hmm_posteriors(word_map, jump_penalty=jump_penalty, null_penalty=null_penalty, null=null)
    np.testing.assert_allclose(found, enumerated(word_map, jump_penalty, null_penalty, null), rtol=1e-10)


@pytest.mark.parametrize("min_probability", [0.0, 0.4])
@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_mutual_posterior_is_what_both_directions_find_likeliest(seed: int, null: bool, min_probability: float) -> None:
    word_map = random_map(seed, 5, 4 + null)
    over_source = enumerated(word_map, 0.6, 0.0, null)
    over_target = enumerated(word_map[:, :4].T, 0.6, 0.0, False)
    mean = [[math.sqrt(over_source[t, s] * over_target[s, t]) for s in range(4)] for t in range(5)]
    expected = {
        (s, t)
        for s, t in itertools.product(range(4), range(5))
        if mean[t][s] == max(mean[t]) == max(row[s] for row in mean) and mean[t][s] > min_probability
    }
    assert mutual_posterior(word_map, jump_penalty=0.6, min_probability=min_probability, null=null).links == expected


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


@pytest.mark.parametrize("null", [True, False])
def test_viterbi_steps_over_rows_of_zeros_and_around_cells_of_zeros(null: bool) -> None:
    word_map = np.eye(4, 4 + null)
    word_map[1] = 0
    assert hmm_viterbi(word_map, jump_penalty=3, null=null) == Alignment([(0, 0), (2, 2), (3, 3)])
    # The path that the jumps would have is forbidden by zeros: the far cell is the only one.
    assert hmm_viterbi([[1, 0, 0, 0], [0, 0, 1, 0]], jump_penalty=50) == Alignment([(0, 0), (2, 1)])


def test_viterbi_prefers_a_link_to_null_and_the_lowest_last_source() -> None:
    assert hmm_viterbi([[1, 0, 0], [1, 0, 1]], jump_penalty=0) == Alignment([(0, 0), (0, 1)])
    assert hmm_viterbi([[1, 1, 0], [1, 1, 0]], jump_penalty=0) == Alignment([(0, 0), (0, 1)])


def test_threshold_is_exclusive() -> None:
    assert threshold([[1, 3, 0]], share=0.25) == Alignment([(1, 0)])


# A map, and what argmax, mutual argmax, threshold 0.2 and, with penalty 0.5, Viterbi, mutual Viterbi and mutual
# posterior make of it.
TIES_AND_ZEROS = [
    ([[1, 1, 1]], ["0-0", "0-0", "0-0 1-0", "0-0", "0-0", "0-0"]),
    ([[1, 1, 0], [1, 1, 0]], ["0-0 0-1", "0-0", "0-0 0-1 1-0 1-1", "0-0 1-1", "0-0 1-1", "0-0 1-1"]),
    ([[0, 1, 1]], ["1-0", "1-0", "1-0", "", "", "1-0"]),
    ([[0, 0, 0], [0, 2, 1]], ["1-1"] * 6),
    ([[0, 0, 1]], [""] * 6),
]


@pytest.mark.parametrize(("word_map", "expected"), TIES_AND_ZEROS)
def test_ties_go_to_the_first_and_zeros_get_no_link(word_map: list[list[float]], expected: list[str]) -> None:
    decoded = [DECODERS[name](word_map, **SETTINGS.get(name, {})) for name in DECODERS]
    assert list(map(format_pharaoh, decoded)) == expected


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("shape", "null"), [((0, 4), True), ((3, 1), True), ((0, 1), True), ((3, 0), False)])
def test_sentences_without_words_have_no_links(name: str, shape: tuple[int, int], null: bool) -> None:
    assert DECODERS[name](np.ones(shape), null=null, **SETTINGS.get(name, {})) == Alignment()


@pytest.mark.parametrize("name", DECODERS)
def test_maps_that_are_not_finite_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        DECODERS[name]([[1.0, np.inf]], **SETTINGS.get(name, {}))


OUTSIDE = (-0.1, 1.0, math.nan)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *(("threshold", {"share": share}, "expected 0 ≤ share < 1") for share in OUTSIDE),
        *(
            ("mutual-posterior", {"jump_penalty": 0, "min_probability": least}, "expected 0 ≤ min_probability < 1")
            for least in OUTSIDE
        ),
        ("hmm-viterbi", {"jump_penalty": -1}, "got jump_penalty -1"),
        ("hmm-viterbi", {"jump_penalty": 1, "null_penalty": math.inf}, "got null_penalty inf"),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DECODERS[name]([[1.0, 1.0]], **options)
