"""What long commands have in common: threads, messages, and what the system refuses."""

import argparse
import errno
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from alignment.commands import running
from captum_norm import InvalidInputError
from tests.alignment.commands.texts import set_stdin


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    running.add_arguments(parser)
    return parser.parse_args(words)


def test_threads_are_set_for_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    with suppress(KeyboardInterrupt), running.set_up(parsed(f"--threads={before + 1}")) as report:
        report(f"{torch.get_num_threads() - before} more")
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
    with running.set_up(parsed("--quiet")) as report:
        assert torch.get_num_threads() == before
        report("nothing")
    assert capsys.readouterr() == ("", "1 more\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out"), "cannot read or write out: No space left on device"),
        (OSError(errno.EIO, "Input/output error"), "cannot read or write: Input/output error"),
        (OSError("no reason"), "cannot read or write: no reason"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error: OSError, message: str) -> None:
    with pytest.raises(InvalidInputError) as refused, running.set_up(parsed()):
        raise error
    assert str(refused.value) == message
    assert refused.value.__cause__ is error


def test_a_reader_that_left_is_no_bad_input() -> None:
    with pytest.raises(BrokenPipeError), running.set_up(parsed()):
        raise BrokenPipeError


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, ["a"])
    assert running.text_source("-") is sys.stdin.buffer
    (tmp_path / "text").touch()
    assert running.text_source(str(tmp_path / "text")) == str(tmp_path / "text")
    for name in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidInputError, match=f"^cannot read {name}: there is no such file$"):
            running.text_source(str(name))


@pytest.mark.parametrize("option", ["--max-words", "--max-tokens", "--threads"])
def test_numbers_begin_at_one(option: str) -> None:
    for number in ("0", "-1", "x"):
        with pytest.raises(argparse.ArgumentError, match=f"argument {option}: got {number}; expected a number from 1"):
            parsed(f"{option}={number}")
