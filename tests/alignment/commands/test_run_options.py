"""What long commands have in common: threads, messages and sources."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from alignment.commands import models
from captum_norm import InvalidInputError
from tests.alignment.commands.texts import set_stdin
from tests.commands import calls


def parsed(*words: str) -> models.RunOptions:
    return calls.parsed(models.RunOptions, *words)


def test_threads_are_set_for_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    with suppress(KeyboardInterrupt), models.set_up(parsed(f"--threads={before + 1}")) as report:
        report(f"{torch.get_num_threads() - before} more")
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
    with models.set_up(parsed("--quiet")) as report:
        assert torch.get_num_threads() == before
        report("nothing")
    assert capsys.readouterr() == ("", "1 more\n")


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, ["a"])
    assert models.text_source("-") is sys.stdin.buffer
    (tmp_path / "text").touch()
    assert models.text_source(str(tmp_path / "text")) == str(tmp_path / "text")
    for name, reason in {"": "it is a folder", "none": "there is no such file"}.items():
        path = tmp_path / name
        with pytest.raises(InvalidInputError, match=f"^cannot read {path}: {reason}$"):
            models.text_source(str(path))


@pytest.mark.parametrize("option", ["--max-words", "--max-tokens", "--threads"])
def test_numbers_begin_at_one(option: str) -> None:
    for number in ("0", "-1", "x"):
        with pytest.raises(argparse.ArgumentError, match=f"argument {option}: got {number}; expected a number from 1"):
            parsed(f"{option}={number}")


def test_threads_end_where_the_system_could_not_start_them() -> None:
    assert parsed("--threads=1024").threads == 1024
    with pytest.raises(argparse.ArgumentError, match="argument --threads: got 1025; expected a number from 1 to 1024"):
        parsed("--threads=1025")
