"""Inspections of sentence pairs, each measure against its definition, on random models and a shipped one."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment.aligner import WordAligner
from alignment.corpora import load_alibi
from alignment.fairseq.loading import load_shipped_model
from alignment.inspection import DOUBT, Inspection, flags_of, link_entropy, repeated_words
from alignment.inspector import NO_SOURCE, Inspector
from alignment.links import calibrated
from alignment.teacher_forcing import attention_maps, teacher_forced_batches, word_maps
from alignment.translation import emitted_steps, target_log_probabilities
from captum_norm import InvalidInputError, NormAttribution, NormMeter
from tests.alignment.translation_models import PAIRS, made
from tests.families import state_of

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
            link_entropy(maps[index]["AWI"][0, HEAD]),
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
        assert one.flags == flags_of(one)


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
    assert isinstance(found[1], Inspection)
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
    assert repeated_words(echo[1].split())
    assert "repeated" not in found[1].flags
    assert set(DOUBT) == {"coverage", "log_probability"}
    story = load_alibi("last-lesson")  # no limit was chosen on it
    sources, targets = story.sources[:40], story.targets[:40]
    halves = [
        [*target[: len(target) // 2], *source[len(source) // 2 :]]
        for source, target in zip(sources, targets, strict=True)
    ]
    for least, most, changed in ((38, 40, sources), (36, 40, halves), (0, 1, targets)):
        flagged = sum("untranslated" in one.flags for one in inspector.inspect(sources, changed))
        assert least <= flagged <= most
