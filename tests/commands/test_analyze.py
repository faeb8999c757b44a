"""``captum-norm analyze``: what it prints and writes is what the API finds; bad input is one sentence."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_norm import cli
from captum_norm.analysis.corpus import Corpus
from captum_norm.analysis.engine import analyze
from captum_norm.analysis.registry import ANALYSES
from captum_norm.analysis.report import read
from captum_norm.commands.analyze import NAMES
from captum_norm.loading import load
from tests.analysis.small import TEXTS, bert, tokenizer, write_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    bert(dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "text")


def test_the_names_are_those_of_the_registry() -> None:
    assert tuple(ANALYSES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_the_api_finds(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", name, "--model", model, "--corpus", "text", "--limit", "5", "--seed", "3", "--out", "out"]
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{name}: {model}, 5 texts of text, ")
    expected = analyze(name, *load(model), Corpus("text", limit=5), seed=3)
    assert expected is not None
    found = read("out")
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


def test_standard_input_is_read_as_a_file_is(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["analyze", "special-tokens", "--model", model]
    assert cli.main([*words, "--corpus", "text"]) == 0
    expected = capsys.readouterr().out.replace("texts of text", "texts of standard input")
    stream = io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode()))
    monkeypatch.setattr("sys.stdin", stream)
    assert cli.main([*words, "--corpus", "-"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("name", ANALYSES)
def test_a_text_of_which_nothing_can_be_ordered(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Yes.\n")))
    assert cli.main(["analyze", name, "--model", model, "--corpus", "-"]) == 0
    assert "1 text of standard input" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["special-token"], "argument NAME: invalid choice: 'special-token'"),
        (["dispersion", "--corpus", "nowhere"], "cannot read nowhere: there is no such file"),
        (["dispersion", "--limit", "0"], "argument --limit: got 0; expected a number from 1"),
        (["dispersion", "--lines", "--documents"], "argument --documents: not allowed with argument --lines"),
        (["dispersion", "--corpus", "text", "--out", "a/b"], "cannot make the folder a/b: there is no folder a"),
        (["dispersion", "--tokens", "a/b.parquet"], "cannot write a/b.parquet: there is no folder a"),
        (["mixing-ratio", "--corpus", "text", "--mask-rate", "2"], "got mask_rate=2.0"),
        (["special-tokens", "--corpus", "text", "--frequencies", "text"], "got a list of frequencies, which the"),
        (["dispersion", "--corpus", "text", "--device", "nowhere"], "cannot put the model on the device nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_is_one_sentence(
    model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["analyze", *words, "--model", model]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"captum-norm: error: {message}")
    assert error.count("\n") == 1


def test_results_that_cannot_be_written_are_one_sentence(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("captum_norm.analysis.report.write", full)
    assert cli.main(["analyze", "dispersion", "--model", model, "--corpus", "text", "--out", "out"]) == 2
    assert capsys.readouterr().err.endswith("cannot write into out: No space left on device\n")
