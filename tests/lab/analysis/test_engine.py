"""A run over a corpus: its memory, what it is of, and what is refused."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis import corpus as reading
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.statistics import Analysis
from tests.lab.analysis.small import TEXTS, bert, tokenizer, write_texts


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
