"""Inspections of sentence pairs: each measure derived a second time, the flags, random models and a shipped one."""

from dataclasses import astuple, replace
from math import log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment import inspection
from alignment.aligner import WordAligner
from alignment.corpora import load_alibi
from alignment.fairseq.loading import load_shipped_model
from alignment.inspector import NO_SOURCE, Inspector
from alignment.links import calibrated
from alignment.teacher_forcing import attention_maps, teacher_forced_batches, word_maps
from alignment.translation import emitted_steps, target_log_probabilities
from captum_norm import InvalidInputError, NormAttribution, NormMeter
from tests.alignment.translation_models import PAIRS, made
from tests.families import state_of

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


SIDES = [source for source, _ in PAIRS], [target for _, target in PAIRS]
LAYER, HEAD = 1, 0


def share_by_hand(model: Any, tokenizer: Any, pair: Any) -> float:
    """The source's share: a chain over layers, written out for each position."""
    (batch,) = teacher_forced_batches(model, tokenizer, [pair])
    measured = NormMeter(model).measure(batch.inputs, scopes=["atb"])
    cross, decoder = measured["cross"].mixing_ratio["atb"][0], measured["decoder"].norms["atb"][0]
    share = [0.0] * cross.shape[1]
    for layer in range(len(cross)):
        after = []
        for step in range(len(share)):
            row = [float(entry) for entry in decoder[layer, step]]
            read = sum(entry * before for entry, before in zip(row, share, strict=True)) / sum(row)
            added = float(cross[layer, step])
            after.append(added + (1 - added) * read)
        share = after
    return float(np.mean(share[emitted_steps(batch.target[0])]))


@pytest.mark.parametrize(("name", "seed", "layer"), [("Marian", 0, 1), ("NLLB", 1, 0), ("T5", 2, 1)])
def test_measures_are_as_defined(name: str, seed: int, layer: int, tmp_path: Path) -> None:
    model, tokenizer = made(name, tmp_path, seed)
    before = state_of(model)
    found = Inspector(model, tokenizer, layer=layer, head=HEAD, all_measures=True, max_tokens=80).inspect(*SIDES)
    assert state_of(model) == before
    aligner = WordAligner(model, tokenizer, layer=layer, head=HEAD, recipe="hmm")
    links = aligner.align_scored(*SIDES)
    maps = dict(
        word_maps(model, tokenizer, PAIRS, attention_maps(NormAttribution(model), layers=[layer], per_head=True))
    )
    scores = [dict(target_log_probabilities(model, tokenizer, [pair]))[0] for pair in PAIRS]
    alone = [dict(target_log_probabilities(model, tokenizer, [(NO_SOURCE, pair[1])]))[0].sum() for pair in PAIRS]
    turned = [dict(target_log_probabilities(model, tokenizer, [pair[::-1]]))[0].mean() for pair in PAIRS]
    for index, (pair, one) in enumerate(zip(PAIRS, found, strict=True)):
        best = calibrated(links[index].probabilities)  # type: ignore[arg-type]
        by_source, by_target = best.max(0), best.max(1)
        expected = [
            scores[index].mean(),
            scores[index][-1],
            share_by_hand(model, tokenizer, pair),
            inspection.link_entropy(maps[index]["AWI"][0, HEAD]),
            by_source.mean(),
            by_target.mean(),
            one.gap,
            one.target_gap,
            0.0,
            0.0,
            one.numbers,
            one.names,
            1 - scores[index].sum() / alone[index],
            turned[index] - scores[index].mean(),
        ]
        found_values, expected_values = (np.array(values, float) for values in (astuple(one)[:-4], expected))
        np.testing.assert_allclose(found_values, expected_values, rtol=1e-4, atol=1e-5)
        for side, chances, missing, gap in zip(
            pair, (by_source, by_target), (one.uncovered, one.added), (one.gap, one.target_gap), strict=True
        ):
            assert missing == tuple(word for word, chance in enumerate(chances) if chance < 0.6)
            text = "".join("x" if word in missing else " " for word in range(len(side)))
            assert gap == max(map(len, text.split(" "))) / len(side)
        assert one.flags == inspection.flags_of(one)


def test_doubtful_pairs_alone_go_through_the_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = made("Marian", tmp_path)
    every = Inspector(model, tokenizer, layer=LAYER, head=HEAD, all_measures=True).inspect(*SIDES)
    worst = sorted(one.log_probability for one in every)[1] - 1e-3  # one pair is less probable
    monkeypatch.setattr("alignment.inspector.DOUBT", {"coverage": 0.0, "log_probability": worst})
    some = Inspector(model, tokenizer, layer=LAYER, head=HEAD).inspect(*SIDES)
    for one, other in zip(every, some, strict=True):
        doubtful = one.log_probability < worst
        assert (other.information is not None) == (other.exchange is not None) == doubtful
        assert replace(one, information=None, exchange=None, flags=()) == replace(
            other, information=None, exchange=None, flags=()
        )
    assert sum(one.information is not None for one in some) == 1


def test_unusable_pairs_are_reported(tmp_path: Path) -> None:
    model, tokenizer = made("Marian", tmp_path)
    inspector = Inspector(model, tokenizer, layer=LAYER, head=HEAD)
    found = dict(inspector.inspect_each([(["das"] * 200, ["the"]), PAIRS[0], ([], ["the"])]))
    assert isinstance(found[1], inspection.Inspection)
    assert "expected at most 128" in str(found[0])
    assert "got a source side without a word" in str(found[2])
    assert list(inspector.inspect_each([])) == []
    with pytest.raises(InvalidInputError, match="pair 1: got a source side without a word"):
        inspector.inspect([PAIRS[0][0], []], [PAIRS[0][1], ["the"]])
    with pytest.raises(InvalidInputError, match="got 1 source and 2 target sentences"):
        inspector.inspect([["das"]], [["the"], ["a"]])
    with pytest.raises(InvalidInputError, match="got the string 'das Haus'"):
        inspector.inspect(["das Haus"], [["the"]])


SOURCE = "je vous remercie beaucoup de votre attention ."
HARD = {
    "thank you very much for your attention .": (),
    "many thanks for your attention .": (),
    "thank you very much": ("truncated",),
    "thank you very much for": ("truncated",),
    "thank you very much .": (),  # two of eight words without a link are too few
    "thank you very much thank you very much for your attention .": ("repeated",),
    "thank you thank you thank you thank you thank you thank you": ("truncated", "repeated"),
    "the vote will take place tomorrow at noon .": ("unrelated",),
    "thank you very much for your attention . the vote will take place tomorrow at noon .": ("added",),
    SOURCE: ("untranslated",),
    SOURCE.upper(): ("untranslated",),
    "thank you very much de votre attention .": ("untranslated",),
}


@pytest.mark.long
def test_flags_of_hard_cases_exchanged_sides_and_copies() -> None:
    inspector = Inspector(*load_shipped_model("fr-en"), layer=0, head=2)
    found = inspector.inspect([SOURCE.split()] * len(HARD), [target.split() for target in HARD])
    assert {target: one.flags for target, one in zip(HARD, found, strict=True)} == HARD
    english = "thank you very much for your attention ."
    echo = "non , non , non , non !", "no , no , no , no !"
    found = inspector.inspect([english.split(), echo[0].split()], [SOURCE.split(), echo[1].split()])
    assert found[0].flags == ("exchanged",)
    assert found[0].exchange is not None
    assert found[0].exchange > 3
    assert inspection.repeated_words(echo[1].split())
    assert "repeated" not in found[1].flags
    assert set(inspection.DOUBT) == {"coverage", "log_probability"}
    story = load_alibi("last-lesson")  # no limit was chosen on it
    sources, targets = story.sources[:40], story.targets[:40]
    halves = [
        [*target[: len(target) // 2], *source[len(source) // 2 :]]
        for source, target in zip(sources, targets, strict=True)
    ]
    for least, most, changed in ((38, 40, sources), (36, 40, halves), (0, 1, targets)):
        flagged = sum("untranslated" in one.flags for one in inspector.inspect(sources, changed))
        assert least <= flagged <= most
