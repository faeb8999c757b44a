"""``captum-norm analyze``: what it prints and writes is what the API finds; bad input is one sentence."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_norm import cli
from captum_norm.commands.analyze import NAMES
from captum_norm.lab.analysis import read_result
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import ANALYSES, analyze
from captum_norm.lab.analysis.statistics import Analysis
from captum_norm.loading import load
from captum_norm.runs import journal
from tests.commands.calls import refused
from tests.lab.analysis.small import bert, tokenizer, write_model, write_texts
from tests.runs.damage import tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "text")


def test_the_names_are_those_of_the_registry() -> None:
    assert tuple(ANALYSES) == NAMES


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])])
def test_what_is_written_is_what_the_api_finds(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", name, "--model", model, "--corpus", "text", "--limit", "5", "--seed", "3", "--out", "out"]
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{name}: {model}, 5 texts of text, ")
    expected = analyze(name, *load(model), Corpus("text", limit=5), seed=3)
    assert expected is not None
    found = read_result("out")
    assert found.tables == expected.tables
    assert found.summary == expected.summary
    assert found.metadata["corpus"] == expected.metadata["corpus"]
    assert found.metadata["seed"] == 3
    assert all(table.title in " ".join(output.split()) for table in expected.tables)
    files = {path.name for path in Path("out").iterdir()}
    assert files == {
        "results.json",
        "report.html",
        *(f"{table.name}.csv" for table in expected.tables),
        *(f"{plot.name}.{suffix}" for plot in expected.plots for suffix in ("png", "pdf")),
    }


@pytest.mark.parametrize("name", ANALYSES)
def test_a_text_of_which_nothing_can_be_ordered(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("short").write_text("Yes.\n", encoding="utf-8")
    assert cli.main(["analyze", name, "--model", model, "--corpus", "short"]) == 0
    assert "1 text of short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["special-token"], "argument NAME: invalid choice: 'special-token'"),
        (["dispersion", "--corpus", "text", "--out", ""], "argument --out: cannot write into a folder without a name"),
        (["mixing-ratio", "--corpus", "text", "--mask-rate", "2"], "got mask_rate=2.0"),
        (["dispersion", "--corpus", "text", "--device", "nowhere"], "cannot put the model on the device nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_is_one_sentence(
    model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "analyze", *words, "--model", model).startswith(message)


@pytest.mark.long
def test_an_unfinished_run_is_continued_or_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    bert(dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    words = ["analyze", "special-tokens", "--model", str(folder), "--corpus", "text", "--batch-tokens", "40", "--out"]
    monkeypatch.setattr(journal, "SAVE_SECONDS", 0.0)
    assert cli.main([*words, "whole"]) == 0
    measure, left = Analysis.measure, iter(range(3))

    def interrupted(analysis: Analysis, batch: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measure(analysis, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Analysis, "measure", interrupted)
        assert cli.main([*words, "out"]) == 130
    parts = Path("out", "special-tokens.parts")
    kept = tree(tmp_path)

    def refuses(message: str, *options: str) -> None:
        assert message in refused(capsys, *words, "out", *options)

    changes = (
        (parts / "job.json", '"seed": 0', '"seed": 1', "its job.json is damaged"),
        (folder / "config.json", '"gelu"', '"relu"', "holds an unfinished run with configuration"),
        (folder / "tokenizer.json", '"the":', '"teh":', "holds an unfinished run with tokenizer"),
        (Path("text"), "Agreed", "Aggreed", "holds an unfinished run with corpus"),
    )
    for path, old, new, message in changes:
        content = path.read_text(encoding="utf-8")
        assert old in content
        path.write_text(content.replace(old, new, 1), encoding="utf-8")
        refuses(message)
        path.write_text(content, encoding="utf-8")
    parts.rename("elsewhere")
    parts.symlink_to(Path("elsewhere").resolve())
    for options in ([], ["--restart"], ["--model", "no such model"]):
        refuses(
            "special-tokens.parts is in the way of out/special-tokens, and not an unfinished run: it is not", *options
        )
    parts.unlink()
    Path("elsewhere").rename(parts)
    with monkeypatch.context() as patched:
        patched.setattr("captum_norm.text.files.os.fsync", full)
        refuses("cannot read or write out/special-tokens.parts: No space left on device")
    assert tree(tmp_path) == kept
    with monkeypatch.context() as patched:
        patched.setattr("captum_norm.show.pages.write_whole", full)
        refuses("cannot write into out: No space left on device")
    assert (parts / "block-000000000").exists()
    damaged = (parts / "block-000000000").read_bytes()
    (parts / "block-000000000").write_bytes(damaged[:-9] + b"0" + damaged[-8:])
    assert cli.main([*words, "out"]) == 0
    assert "block-000000000 is damaged; its work is repeated" in capsys.readouterr().err
    assert Path("out", "results.json").read_bytes() == Path("whole", "results.json").read_bytes()
    assert sorted(path.name for path in Path("out").iterdir()) == sorted(path.name for path in Path("whole").iterdir())


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
