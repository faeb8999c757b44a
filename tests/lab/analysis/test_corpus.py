"""Texts in files, tokens, masks and batches; a run over them, its memory, and what is refused."""

import gzip
import hashlib
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis import corpus as reading
from captum_norm.lab.analysis.corpus import Corpus, Encoder, longest
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.statistics import Analysis
from tests import families
from tests.lab.analysis.small import TEXTS, bert, tokenizer, write_texts

NUMBERED = list(enumerate(TEXTS, 1))
CONTENT = "one\n\n  \ntwo\nthree\r\n\nfour"


def test_texts_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(CONTENT.encode()))
    assert list(Corpus(path).texts()) == [(1, "one"), (4, "two"), (5, "three"), (7, "four")]
    assert list(Corpus(path, 2).texts()) == [(1, "one"), (4, "two")]
    monkeypatch.setattr(reading, "BLOCK_TEXTS", 3)
    assert list(Corpus(path).blocks()) == [[(1, "one"), (4, "two"), (5, "three")], [(7, "four")]]
    assert Corpus(path).digest() == (hashlib.sha256(b"one\ntwo\nthree\nfour\n").hexdigest(), 4)


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"good\nb\xffd\n")
    with pytest.raises(InvalidInputError, match="line 2: got byte 0xff at byte 2 of the line, expected UTF-8"):
        Corpus(path).digest()
    path.write_bytes(b"\n \n")
    with pytest.raises(InvalidInputError, match="has no text"):
        Corpus(path).digest()


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such file"):
        Corpus(tmp_path / "absent")
    with pytest.raises(InvalidInputError, match="it is a folder"):
        Corpus(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInputError, match=r"pipe more than once; expected a regular file$"):
        Corpus(tmp_path / "pipe")
    (tmp_path / "text").write_text("a\n")
    with pytest.raises(InvalidInputError, match="limit=0"):
        Corpus(tmp_path / "text", limit=0)


def encoder(**options: float) -> Encoder:
    return Encoder(tokenizer(), **{"max_length": 64, **options})  # type: ignore[arg-type]


def test_masks_depend_on_seed_and_line_alone() -> None:
    plain = encoder().sequences(NUMBERED)
    masked = encoder(mask_rate=0.12).sequences(NUMBERED)
    assert encoder(mask_rate=0.12).sequences(NUMBERED[4:]) == masked[4:]
    assert encoder(mask_rate=0.12, seed=1).sequences(NUMBERED) != masked
    for before, after in zip(plain, masked, strict=True):
        ordinary = range(1, len(before.ids) - 1)
        assert len(after.masked) == max(1, int(len(ordinary) * 0.12))
        assert set(after.masked) <= set(ordinary)
        for place, (was, now) in enumerate(zip(before.ids, after.ids, strict=True)):
            assert now == (tokenizer().mask_token_id if place in after.masked else was)


def test_batches_hold_every_sequence_once_within_the_budget() -> None:
    sequences = encoder().sequences(NUMBERED)
    batches = list(encoder().batches(sequences, 40))
    rows = [ids[real].tolist() for batch in batches for ids, real in zip(batch.ids, batch.real, strict=True)]
    assert sorted(rows) == sorted(sequence.ids for sequence in sequences)
    assert all(batch.ids.numel() <= 40 or len(batch.ids) == 1 for batch in batches)


def test_lines_are_cut_off() -> None:
    (sequence,) = encoder(max_length=12).sequences([(7, " ".join(TEXTS))])
    (whole,) = encoder(max_length=512).sequences([(7, " ".join(TEXTS))])
    assert sequence.ids == [*whole.ids[:11], tokenizer().sep_token_id]


def test_categories_of_a_batch() -> None:
    sequences = encoder().sequences([(1, "Yes, no."), (2, "Yes")])
    (batch,) = encoder().batches(sequences, 100)
    names = (*encoder().categories.names, "padding")
    found = [[names[place] for place in row] for row in batch.categories.tolist()]
    assert found[1] == ["[CLS]", "other", "comma, period", "other", "comma, period", "[SEP]"]
    assert found[0] == ["[CLS]", "other", "[SEP]", "padding", "padding", "padding"]
    assert batch.inputs(torch.device("cpu"))["attention_mask"].sum() == 9


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("bert", 10**30, 64),  # its table of positions
        ("bert", 30, 30),
        ("bert", 512, 64),
        ("roberta", 512, 63),  # counts from its padding id on
        ("llama", 10**30, 64),  # no table: the configuration's
        ("llama", 100, 100),
        ("t5-encoder", 10**30, 512),
    ],
)
def test_the_longest_input_is_what_tokenizer_and_model_allow(name: str, known: int, expected: int) -> None:
    said: Any = SimpleNamespace(model_max_length=known)
    assert longest(families.build(name), said) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mask_rate": 1.0}, "mask_rate=1.0"), ({"mask_rate": -0.1}, "mask_rate"), ({"max_length": 2}, "at least 3")],
)
def test_bad_options_of_an_encoder(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        encoder(**options)


@pytest.mark.long
def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_TEXTS", 4)
    model, peaks = bert(), []
    for texts in (8, 8, 200):  # once to warm up
        path = write_texts(tmp_path / "text", ("a " * 1000,) * texts)
        tracemalloc.start()
        result = analyze("dispersion", model, tokenizer(), Corpus(path), max_length=8)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.metadata["corpus"]["texts"] == texts
    assert peaks[2] - peaks[1] < 150_000  # the further texts have 384,000 bytes


def test_a_text_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, measure = write_texts(tmp_path / "text"), Analysis.measure
    monkeypatch.setattr(reading, "BLOCK_TEXTS", 4)

    def changing(analysis: Analysis, batch: Any) -> Any:
        path.write_text(path.read_text().replace("Agreed", "Aggreed"))
        return measure(analysis, batch)

    monkeypatch.setattr(Analysis, "measure", changing)
    long = (*TEXTS[:4], *("No. " * 10_000 for _ in range(2)), *TEXTS[4:])  # more than is read ahead
    write_texts(path, long)
    with pytest.raises(InvalidInputError, match="text has changed since the start; start again"):
        analyze("dispersion", bert(), tokenizer(), Corpus(path), max_length=8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no-such", {}, "got the analysis no-such; expected one of dispersion"),
        ("dispersion", {"batch_tokens": 0}, "got batch_tokens=0; expected at least 1"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        analyze(name, bert(), tokenizer(), Corpus(write_texts(tmp_path / "text")), **options)
