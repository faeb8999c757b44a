"""Measures of a translation, each derived a second time, and the flags that they raise."""

from dataclasses import replace
from math import log, nan
from typing import Any

import numpy as np
import pytest

from alignment.inspection import (
    REPEATED_WORDS,
    RULES,
    Inspection,
    coverage,
    flags_of,
    link_entropy,
    longest_run,
    repeated_words,
)
from captum_norm import InvalidInputError

GOOD = Inspection(
    log_probability=-1.0,
    end_log_probability=-0.1,
    source_share=0.7,
    link_entropy=0.3,
    source_coverage=0.9,
    target_coverage=0.9,
    gap=0.1,
    repetition=0.0,
    information=0.6,
    exchange=-4.0,
    uncovered=(),
    repeated=(),
)


@pytest.mark.parametrize("seed", range(5))
def test_link_entropy_is_that_of_each_row(seed: int) -> None:
    draw = np.random.default_rng(seed)
    word_map = draw.random((6, 5)) * (draw.random((6, 5)) < 0.7)
    word_map[2] = 0
    entropies = []
    for row in word_map:
        if row.sum():
            shares = [entry / row.sum() for entry in row if entry]
            entropies.append(-sum(share * log(share) for share in shares) / log(5))
    assert link_entropy(word_map) == pytest.approx(sum(entropies) / len(entropies), abs=1e-12)


def test_link_entropy_of_extremes() -> None:
    assert link_entropy(np.eye(4)) == 0
    assert link_entropy(np.ones((3, 4))) == pytest.approx(1)
    assert link_entropy(np.zeros((3, 4))) == link_entropy(np.ones((3, 1))) == link_entropy(np.ones((0, 3))) == 0
    with pytest.raises(InvalidInputError, match="NaN"):
        link_entropy([[nan, 1.0]])


@pytest.mark.parametrize("seed", range(3))
def test_coverage_is_the_best_link_of_each_word(seed: int) -> None:
    links = np.random.default_rng(seed).random((4, 3))
    by_source, by_target = coverage(links)
    assert by_source.tolist() == [max(links[target, source] for target in range(4)) for source in range(3)]
    assert by_target.tolist() == [max(links[target, source] for source in range(3)) for target in range(4)]


@pytest.mark.parametrize("seed", range(20))
def test_longest_run_by_enumeration(seed: int) -> None:
    draw = np.random.default_rng(seed)
    indices = set(np.flatnonzero(draw.random(12) < 0.6).tolist())
    runs = [
        end - start
        for start in range(12)
        for end in range(start, 13)
        if all(index in indices for index in range(start, end))
    ]
    assert longest_run(sorted(indices)) == max(runs)


def repeated_by_enumeration(words: list[str]) -> list[int]:
    """All spans that are compared with all earlier ones."""
    found: set[int] = set()
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            size = end - start
            for earlier in range(start):
                equal = words[earlier : earlier + size] == words[start:end]
                # A copy may overlap with what it copies, as in "a a a".
                if equal and (start - earlier <= size or size >= REPEATED_WORDS):
                    found |= set(range(start, end))
    return sorted(found)


@pytest.mark.parametrize("seed", range(30))
def test_repeated_words_by_enumeration(seed: int) -> None:
    draw = np.random.default_rng(seed)
    words = draw.choice(list("abcd"[: 2 + seed % 3]), 14).tolist()
    assert list(repeated_words(words)) == repeated_by_enumeration(words)


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("", ""),
        ("one", ""),
        ("a b c d", ""),
        ("No no no , never", "no no"),
        ("we have we have agreed", "we have"),
        ("of the house and of the garden", ""),
        ("at the end of the day and at the end of the night", "at the end of the"),
        ("Straße STRASSE straße", ""),
        ("10 10", "10"),
        (". . .", ". ."),
    ],
)
def test_repeated_words_of_texts(text: str, repeated: str) -> None:
    words = text.split()
    assert " ".join(words[index] for index in repeated_words(words)) == repeated


@pytest.mark.parametrize("measure", RULES)
def test_a_flag_is_raised_beyond_its_limit_alone(measure: str) -> None:
    rule = RULES[measure]
    step = 1e-6 if rule.above else -1e-6
    at: Any = {measure: rule.limit}
    beyond: Any = {measure: rule.limit + step}
    assert flags_of(GOOD) == ()
    assert flags_of(replace(GOOD, **at)) == ()
    assert flags_of(replace(GOOD, **beyond)) == (rule.flag,)


def test_flags_that_explain_others() -> None:
    assert flags_of(replace(GOOD, information=0.0, gap=0.9)) == ("unrelated",)
    assert flags_of(replace(GOOD, information=0.0, gap=0.9, exchange=3.0)) == ("exchanged",)
    assert flags_of(replace(GOOD, end_log_probability=-9.0, repetition=0.4)) == ("truncated", "repeated")
    missing = replace(GOOD, end_log_probability=None, information=None, exchange=None)
    assert flags_of(missing) == ()
