"""Calls of ``captum-norm``."""

import argparse
import json
from pathlib import Path
from typing import Any, TypeVar

import pytest

from captum_norm import cli
from captum_norm.commands.program import Options, add_options

SomeOptions = TypeVar("SomeOptions", bound=Options)

TEXT = "a dog sees the cat"
TOKENS = ["[CLS]", "a", "dog", "sees", "the", "cat", "[SEP]"]


def explain(*words: str, text: str = TEXT) -> int:
    return cli.main(["explain", text, *words])


def written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def parsed(options: type[SomeOptions], *words: str) -> SomeOptions:
    """The options that the words say; raises ``argparse.ArgumentError``."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, options)
    return options(**vars(parser.parse_args(words)))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence on standard error with which the command refuses."""
    capsys.readouterr()
    assert cli.main(list(words)) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("captum-norm: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("captum-norm: error: ").removesuffix("\n")
