"""Ctrl-C at any line: files are old or new, nothing is left behind, the next call is right; commands say one line."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
import transformers

import captum_norm
from captum_norm import AttributionMaps, NormAttribution, cli, explain
from captum_norm.commands.shared import write_outputs
from captum_norm.loading import load
from captum_norm.runs import run_job
from captum_norm.show import figure_bytes, render_page
from tests.fuzzing import FACTOR, at_line
from tests.runs.test_blocks import Sum
from tests.tiny import bert_config, save_tiny

# An interrupt may come before a file is closed, which the garbage collector does then.
pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

ROOTS = (str(Path(captum_norm.__file__).parent),)
TEXT = "a dog sees the cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return str(save_tiny(transformers.BertModel(bert_config()), tmp_path_factory.mktemp("bert")))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    # An interrupt at a command's very end leaves loggers quiet, which ends with its process, but not with this one.
    monkeypatch.setattr("captum_norm.commands.program._TALKATIVE", ())


def lines_of(call: Callable[[], Any], count: int, roots: tuple[str, ...] = ROOTS) -> list[int]:
    """Lines of a call to interrupt it at: the last, and others at random; not the first, which no ``try`` encloses."""
    lines = 10**9 - at_line(10**9, call, roots)[1]
    return [*range(lines - 8, lines + 1), *random.Random(0).sample(range(2, lines + 1), min(lines - 1, count * FACTOR))]


def test_an_interrupted_file_is_old_or_new(folder: str, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    maps = NormAttribution(model).maps(tokenizer(TEXT, return_tensors="pt"))
    explanation: Any = explain(TEXT, model, tokenizer)
    page, figure = render_page(explanation.page()).encode(), figure_bytes(explanation.plot())
    writes: dict[str, tuple[Callable[[], Any], Callable[[], bool]]] = {
        ".safetensors": (lambda: maps.save(path), lambda: AttributionMaps.load(path) == maps),
        ".html": (lambda: explanation.save(path), lambda: path.read_bytes() == page),
        ".png": (lambda: write_outputs({path: figure}), lambda: path.read_bytes() == figure),
    }
    for suffix, (write, is_whole) in writes.items():
        path = tmp_path / f"file{suffix}"
        for line in lines_of(write, 100):
            path.write_bytes(b"old")
            at_line(line, write, ROOTS)
            assert [file.name for file in tmp_path.iterdir()] == [path.name]
            assert path.read_bytes() == b"old" or is_whole(), line
        write()
        assert is_whole()
        path.unlink()


@pytest.mark.long
@pytest.mark.parametrize("suffixes", [(".json", ".csv", ".html"), (".png",)])
def test_an_interrupted_command_says_one_line(
    suffixes: tuple[str, ...], folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"out{suffix}" for suffix in suffixes]

    def command() -> int:
        return cli.main(["explain", TEXT, "--text", "--model", folder, *(f"--out={file}" for file in files)])

    assert command() == 0
    whole = {file: file.read_bytes() for file in files}
    for line in lines_of(command, 4):
        for file in files:
            file.write_bytes(b"old")
        capsys.readouterr()
        code, _ = at_line(line, command, ROOTS)
        # What was verified of the model may have been said before.
        last = capsys.readouterr().err.splitlines()[-1:]
        assert code == 0 or (code, last) == (130, ["captum-norm: interrupted"]), line
        assert set(tmp_path.iterdir()) == set(files)
        assert all(file.read_bytes() in (b"old", content) for file, content in whole.items()), line
    assert command() == 0
    assert whole == {file: file.read_bytes() for file in files}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_job_can_begin_again_at_once(tmp_path: Path) -> None:
    """Even if the traceback is kept, as notebooks do, and if the interrupt comes as the lock is taken."""
    path = tmp_path / "text"
    path.write_text("".join(f"{number}\n" for number in range(9)))
    kept = list[KeyboardInterrupt]()

    def job() -> float:
        try:
            total: float = run_job(Sum(str(path)))
        except KeyboardInterrupt as error:
            kept.append(error)
            raise
        return total

    runs = str(Path(captum_norm.__file__).parent / "runs")
    for roots in (ROOTS, (runs, str(Path(filelock.__file__).parent))):
        for line in lines_of(job, 40, roots):
            at_line(line, job, roots)
            assert job() == 36.0, line
            assert [file.name for file in tmp_path.iterdir()] == ["text"], line
    assert len(kept) > 60
    kept.clear()
    gc.collect()  # here, not in another test: a traceback keeps the file that was being opened
