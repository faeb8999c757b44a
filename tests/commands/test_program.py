"""A command line of subcommands: what it prints, and the exit code of everything that can go wrong."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from captum_norm import InvalidInputError, cli
from captum_norm.commands.program import Command, Options, Program, option
from captum_norm.commands.shared import natural, positive, resamples


@dataclass(frozen=True, kw_only=True)
class Say(Options):
    word: str | None = option("the word to say")


def program(run: Callable[[Say], None]) -> Program:
    return Program("trial", "A trial.", [Command("say", "say a word in LaTeX", Say, run)])


def say(options: Say) -> None:
    sys.stdout.write(f"{options.word}\n")


def failing(error: BaseException) -> Callable[[Say], None]:
    def run(_options: Say) -> None:
        sys.stdout.write("begun\n")
        raise error

    return run


def test_libraries_log_only_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the roundings of bitsandbytes, and of kernels of torchao that are not for this machine."""
    loggers = [logging.getLogger(name) for name in ("bitsandbytes.autograd", "torchao", "torch.utils._pytree", "mine")]

    def run(_options: Say) -> None:
        for logger in loggers:
            logger.warning("%s warns", logger.name)
            logger.error("%s fails", logger.name)

    handler = logging.StreamHandler(sys.stderr)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        assert program(run).main(["say"]) == 0
        loggers[0].warning("again")
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    *told, last = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.endswith("warns")] == ["mine warns"]
    assert sum(line.endswith("fails") for line in told) >= len(loggers)
    assert last == "again"


def test_bad_input_and_interruptions_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert program(failing(InvalidInputError("got\n  nothing;\ngive some"))).main(["say"]) == 2
    assert capsys.readouterr() == ("begun\n", "trial: error: got nothing; give some\n")
    assert program(failing(KeyboardInterrupt())).main(["say"]) == 130
    assert capsys.readouterr() == ("begun\n", "trial: interrupted\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out"), "cannot write out: No space left on device"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "name"), "cannot read or write name: File name too long"),
        (OSError(errno.EIO, "Input/output error"), "cannot read or write: Input/output error"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: OSError, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file of its own, since what its descriptor stands for may be exchanged.
    with Path("output").open("w", encoding="utf-8") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert program(failing(error)).main(["say"]) == 2
    assert capsys.readouterr() == ("", f"trial: error: {message}\n")


def test_defect_is_not_hidden() -> None:
    for defect in (RuntimeError("defect"), OSError("defect")):
        with pytest.raises(type(defect), match="defect"):
            program(failing(defect)).main(["say"])


@pytest.mark.parametrize("words", [["say", "--word", "hello"], ["say", "--word", "hello" * 10_000], ["--help"]])
def test_reader_that_left_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert program(say).main(words) == 1
    # Leaving the context closed the pipe, which raises if anything is left to be written into it.
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["say", "--word", "hello"], ["say", "--word", "hello" * 10_000], ["--help"]])
def test_full_disk_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert program(say).main(words) == 2
    # Leaving the context closed the file, which raises if anything is left to be written into it.
    assert capsys.readouterr() == ("", "trial: error: cannot write: No space left on device\n")


def test_whole_numbers() -> None:
    assert (positive("1"), natural("0"), resamples("0"), resamples("2"), natural("9" * 9)) == (1, 0, 0, 2, 10**9 - 1)


@pytest.mark.parametrize(("parse", "texts"), [(positive, ["0"]), (natural, []), (resamples, ["1"])])
def test_what_is_no_such_number_is_refused(parse: object, texts: list[str]) -> None:
    for text in [*texts, "", "-1", "1.5", "x", "²", "9" * 10, "9" * 5000, "\x1b[31m"]:
        with pytest.raises(InvalidInputError) as raised:
            parse(text)  # type: ignore[operator]
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 300  # a long text shows 240 characters of its ends


@pytest.mark.parametrize("words", [["explain", "a dog", "--layer"], ["compare", "a dog", "--seed"]])
def test_a_number_of_thousands_of_digits_is_refused_in_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "9" * 5000]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) <= 1100
