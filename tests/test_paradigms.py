"""The pairs of the benchmark of components, and its test of differences."""

from itertools import islice

import pytest
import torch

from benchmarks.components import GRADIENT, INTRODUCTION, KINDS, against, ahead, encoded, p_value
from benchmarks.paradigms import PARADIGMS, accuracy, new_models, pairs, sentences, word_tokenizer
from tests.support import ROOT


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_one_word_of_a_pair_differs_and_decides(paradigm: str) -> None:
    tokenizer, drawn = word_tokenizer(), list(pairs(paradigm, 200, 3))
    known = tokenizer.get_vocab()
    for pair in drawn:
        assert pair.paradigm == paradigm
        ids, others = (tokenizer(text)["input_ids"] for text in (pair.text, pair.counterfactual))
        assert len(ids) == len(others) == 1 + len(pair.text.split())
        assert sum(this != that for this, that in zip(ids, others, strict=True)) == 1
        assert tokenizer.unk_token_id not in ids + others
        assert pair.answer in known
        assert pair.other in known
        assert pair.answer != pair.other
    assert drawn == list(pairs(paradigm, 200, 3))
    assert drawn != list(pairs(paradigm, 200, 4))
    assert len({pair.text for pair in drawn}) > 190
    assert 60 < sum(pair.answer < pair.other for pair in drawn) < 140  # both are right equally often


def test_sentences_end_with_the_answer_and_a_full_stop() -> None:
    texts = list(islice(sentences(5), 300))
    assert texts == list(islice(sentences(5), 300))
    assert all(text.endswith(" .") for text in texts)
    assert max(len(text.split()) for text in texts) < 32 - 1  # positions of the models


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA"])
def test_accuracy_reads_the_word_after_each_text(name: str) -> None:
    tokenizer = word_tokenizer()
    model = new_models(tokenizer)[name].train(False)
    drawn = [pair for paradigm in PARADIGMS for pair in pairs(paradigm, 3, 1)]
    predicted = list[str]()
    with torch.no_grad():
        for pair in drawn:
            for text in (pair.text, pair.counterfactual):
                logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
                predicted.append(str(tokenizer.decode(logits.argmax())))
    told = [
        pair._replace(answer=this, other=that)
        for pair, this, that in zip(drawn, predicted[::2], predicted[1::2], strict=True)
    ]
    assert accuracy(model, tokenizer, told) == 1
    _, _, target = encoded(tokenizer, told)
    assert [tokenizer.decode(torch.tensor(choice)) for choice in (target.target, target.other)] == [
        " ".join(predicted[start::2]) for start in (0, 1)
    ]


def test_p_is_that_of_all_signs() -> None:
    """Of three differences of one sign, 2 of 8 draws of signs are as extreme; of 20, next to none."""
    assert p_value([1.0, 2.0, 3.0], [0.5, 0.5, 0.5]) == pytest.approx(0.25, abs=0.02)
    assert p_value([1.0, 2.0], [2.0, 1.0]) == 1
    assert against([0.5 + place / 100 for place in range(20)], [0.4] * 20) == "< .001"
    assert against([0.3] * 20, [0.4] * 20) == "*< .001*"
    assert against([0.4], [0.4]) == "–"


def test_the_page_says_where_relp_is_not_ahead() -> None:
    plain = [place / 100 for place in range(20)]
    relp = [[value + 0.1 for value in plain], [value - 0.1 for value in plain], plain]
    rows = {kind: {GRADIENT: plain, "RelP": values} for kind, values in zip(KINDS, relp, strict=True)}
    assert ahead([{"model": "M", "correlations": rows}]) == (
        "**RelP is ahead of attribution patching** (p < .05) for residual streams of M. "
        "It is **behind** for heads of M. Their difference may be chance for feed-forward networks of M. "
        "No method is above RelP for residual streams of M. "
        "No method is above attribution patching for heads of M, feed-forward networks of M."
    )
    assert (ROOT / "docs" / "components-benchmark.md").read_text(encoding="utf-8").startswith(INTRODUCTION)
