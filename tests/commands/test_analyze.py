"""``captum-norm analyze``: what it prints and writes is what the API finds; bad input is one sentence."""

import errno
import os
from pathlib import Path

import pytest

from captum_norm import cli
from captum_norm.commands.analyze import NAMES
from captum_norm.lab.analysis import read_result
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import ANALYSES, analyze
from captum_norm.lab.analysis.statistics import Analysis
from captum_norm.loading import load
from captum_norm.text.files import Remote
from tests.commands.calls import refused
from tests.lab.analysis.small import write_model, write_texts


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


@pytest.mark.few
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
def test_interrupted_or_without_room_it_leaves_nothing_half_written(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["analyze", "dispersion", "--model", model, "--corpus", "text", "--out", "out"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Analysis, "measure", interrupted)
        assert cli.main(words) == 130
        assert capsys.readouterr() == ("", "captum-norm: interrupted\n")
    assert not Path("out").exists()
    for failing, code, message in ((interrupted, 130, "interrupted"), (full, 2, "cannot write into out: No space")):
        with monkeypatch.context() as patched:
            patched.setattr("captum_norm.text.files.os.fsync", failing)
            assert cli.main(words) == code
        assert message in capsys.readouterr().err
        assert list(Path("out").iterdir()) == []
    assert cli.main(words) == 0


def test_numbers_are_printed_if_they_cannot_be_written(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Remote, "write", closed)
    assert cli.main(["analyze", "dispersion", "--model", model, "--corpus", "text", "--out", "memory://out"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "captum-norm: error: cannot write into memory://out: Permission denied\n"
    assert "mean over heads" in printed.out
