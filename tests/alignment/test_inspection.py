"""Measures of a translation, each derived a second time, and the flags that they raise."""

from dataclasses import replace
from math import log, nan
from typing import Any

import numpy as np
import pytest

from alignment import inspection
from captum_norm import InvalidInputError

GOOD = inspection.Inspection(
    log_probability=-1.0,
    end_log_probability=-0.1,
    source_share=0.7,
    link_entropy=0.3,
    source_coverage=0.9,
    target_coverage=0.9,
    gap=0.1,
    target_gap=0.1,
    repetition=0.0,
    copied=0.0,
    numbers=1.0,
    names=None,
    information=0.6,
    exchange=-4.0,
    uncovered=(),
    added=(),
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
    assert inspection.link_entropy(word_map) == pytest.approx(sum(entropies) / len(entropies), abs=1e-12)


def test_link_entropy_of_extremes() -> None:
    assert inspection.link_entropy(np.eye(4)) == 0
    assert inspection.link_entropy(np.ones((3, 4))) == pytest.approx(1)
    assert (
        inspection.link_entropy(np.zeros((3, 4)))
        == inspection.link_entropy(np.ones((3, 1)))
        == inspection.link_entropy(np.ones((0, 3)))
        == 0
    )
    with pytest.raises(InvalidInputError, match="NaN"):
        inspection.link_entropy([[nan, 1.0]])


@pytest.mark.parametrize("seed", range(3))
def test_coverage_is_the_best_link_of_each_word(seed: int) -> None:
    links = np.random.default_rng(seed).random((4, 3))
    by_source, by_target = inspection.coverage(links)
    assert by_source.tolist() == [max(links[target, source] for target in range(4)) for source in range(3)]
    assert by_target.tolist() == [max(links[target, source] for source in range(3)) for target in range(4)]


@pytest.mark.parametrize("seed", range(20))
def test_longest_run_by_enumeration(seed: int) -> None:
    draw = np.random.default_rng(seed)
    marks = draw.random(12) < 0.6
    runs = [end - start for start in range(12) for end in range(start, 13) if marks[start:end].all()]
    assert inspection.longest_run(marks.tolist()) == max(runs)


def repeated_by_enumeration(words: list[str]) -> list[int]:
    """All spans that are compared with all earlier ones."""
    found: set[int] = set()
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            size = end - start
            for earlier in range(start):
                equal = words[earlier : earlier + size] == words[start:end]
                # A copy may overlap with what it copies, as in "a a a".
                if equal and (start - earlier <= size or size >= inspection.REPEATED_WORDS):
                    found |= set(range(start, end))
    return sorted(found)


@pytest.mark.parametrize("seed", range(30))
def test_repeated_words_by_enumeration(seed: int) -> None:
    draw = np.random.default_rng(seed)
    words = draw.choice(list("abcd"[: 2 + seed % 3]), 14).tolist()
    assert list(inspection.repeated_words(words)) == repeated_by_enumeration(words)


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
    assert " ".join(words[index] for index in inspection.repeated_words(words)) == repeated


@pytest.mark.parametrize("seed", range(10))
def test_copied_words_by_enumeration(seed: int) -> None:
    draw = np.random.default_rng(seed)
    source, target = (draw.choice(["a", "b", "c", "Ann", "Bo", ",", "7"], 9).tolist() for _ in range(2))
    words, others = ([word for word in side if word.isalpha()] for side in (target, source))
    spans = [others[start : start + 2] for start in range(len(others) - 1)]
    held = 0
    for place in range(len(words)):
        around = [words[start : start + 2] for start in (place - 1, place) if start >= 0]
        held += any(span in spans and not (span[0].istitle() and span[1].istitle()) for span in around)
    assert inspection.copied(source, target) == pytest.approx(held / len(words))


SENTENCE = "Je n' ai vu que la maison de M. Jean Dupont à Paris , hier ."


@pytest.mark.parametrize(
    ("target", "share"),
    [
        (SENTENCE, 13 / 14),  # Jean is between names
        (SENTENCE.upper(), 13 / 14),
        (SENTENCE.lower(), 1),
        ("je n’ ai vu que la maison de m jean dupont à paris hier", 1),
        ("I only saw the house of M. Jean Dupont in Paris , yesterday .", 0),
        ("I only saw the house of M. Jean Dupont à Paris , hier .", 4 / 12),
        ("hier", 0),
        ("14 % ( 1999 ) .", 0),
        ("", 0),
    ],
)
def test_copied_words_of_texts(target: str, share: float) -> None:
    assert inspection.copied(SENTENCE.split(), target.split()) == pytest.approx(share)
    assert inspection.copied(target.split(), []) == inspection.copied([], target.split()) == 0


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        ("10 000 euros", "10,000 euros", 1),
        ("10\u202f000 et 3,5 %", "3.5 % of 10'000", 1),
        ("1.234,56", "1,234.56", 1),
        ("1 234 567", "1234567", 1),
        ("en 1999 200 personnes", "200 people in 1999", 1),
        ("à 9 heures", "at 09.00", 1),
        ("le 1er mai 2005", "May 1st , 2005", 1),
        ("A5-0156 / 2001", "( A5-0156 / 2001 )", 1),
        ("١٢ ٣", "12 and 3", 1),
        ("3,05", "3.5", 0.5),
        ("15", "51", 0),
        ("15 et 15", "15", 2 / 3),
        ("15", "fifteen", 0),
        ("zéro , 0", "none", None),
        ("", "", None),
    ],
)
def test_numbers_are_compared_by_their_digits(source: str, target: str, share: float | None) -> None:
    for sides in ((source, target), (target, source)):
        assert inspection.shared_numbers(*(side.split(" ") for side in sides)) == (share and pytest.approx(share))


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        ("Hier Clara vit Rome .", "Yesterday Clara saw Rome .", 1),
        ("Hier Clara vit Rome .", "Clara saw Rome on Friday .", 1),  # Friday has a capital in English alone
        ("Hier Clara vit Rome .", "Yesterday Clara saw Paris .", 0.5),
        ("Hier Clara vit Rome .", "Yesterday she left .", 0),
        ("Hier . Clara partit .", "Yesterday . She left .", None),  # each begins a sentence
        ("Le cardinal Jérôme et l' Européen", "Cardinal JEROME and the Europeans", 1),
        ("VIVE LA FRANCE !", "Long live France !", 1),
        ("il partit .", "he left .", None),
        ("", "", None),
    ],
)
def test_names_are_compared_by_their_first_letters(source: str, target: str, share: float | None) -> None:
    for sides in ((source, target), (target, source)):
        assert inspection.shared_names(*(side.split() for side in sides)) == share


@pytest.mark.parametrize("measure", inspection.RULES)
def test_a_flag_is_raised_beyond_its_limit_alone(measure: str) -> None:
    rule = inspection.RULES[measure]
    step = 1e-6 if rule.above else -1e-6
    at: Any = {measure: rule.limit}
    beyond: Any = {measure: rule.limit + step}
    assert inspection.flags_of(GOOD) == ()
    assert inspection.flags_of(replace(GOOD, **at)) == ()
    assert inspection.flags_of(replace(GOOD, **beyond)) == (rule.flag,)


def test_flags_that_explain_others() -> None:
    assert inspection.flags_of(replace(GOOD, information=0.0, gap=0.9)) == ("unrelated",)
    assert inspection.flags_of(replace(GOOD, information=0.0, gap=0.9, exchange=3.0)) == ("exchanged",)
    assert inspection.flags_of(replace(GOOD, information=0.0, copied=0.9)) == ("untranslated",)
    assert inspection.flags_of(replace(GOOD, exchange=3.0, copied=0.9)) == ("untranslated",)
    assert inspection.flags_of(replace(GOOD, information=0.0, target_gap=0.9)) == ("unrelated",)
    assert inspection.flags_of(replace(GOOD, repetition=0.4, target_gap=0.9)) == ("repeated",)
    assert inspection.flags_of(replace(GOOD, gap=0.4, target_gap=0.9)) == ("truncated", "added")
    assert inspection.flags_of(replace(GOOD, end_log_probability=-9.0, repetition=0.4)) == ("truncated", "repeated")
    missing = replace(GOOD, end_log_probability=None, information=None, exchange=None)
    assert inspection.flags_of(missing) == ()
