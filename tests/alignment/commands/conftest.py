"""A small gold alignment with three systems, ``norm-align evaluate`` run on it, and what a refusal looks like."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment import cli
from tests.runs.damage import tree

FILES = {
    "gold": "1-1 2-2 3p3\n1-2\n",
    "forward": "0-0 2-2 1-0\n0-1\n",  # of 4 links 2 sure, 3 possible; 3 sure in all: AER 1 − 5/7
    "perfect": "0-0 1-1\n0-1\n",
    "reverse": "0-0 1-1 2-2\n0-0\n",  # 2 sure, 3 possible
    "source": "a b c\na\n",
    "target": "x y z\nx y\n",
}
Run = Callable[..., str]
Refused = Callable[..., None]
Printed = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a command, and hands over the lines of standard output and of standard error."""

    def run(*words: str) -> tuple[list[str], list[str]]:
        assert cli.main(list(words)) == 0
        output, error = capsys.readouterr()
        assert output.endswith("\n") or not output
        return output.split("\n")[:-1], error.splitlines()

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Checks that a command says one sentence, prints nothing else and leaves all files as they are."""

    def check(message: str, *words: str) -> None:
        capsys.readouterr()
        before = tree(Path())
        assert cli.main(list(words)) == 2
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith("norm-align: error: ")
        assert message in error
        assert error.count("\n") == 1
        assert tree(Path()) == before

    return check


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def files() -> None:
    """The files in the current folder."""
    for name, content in FILES.items():
        Path(name).write_text(content, encoding="utf-8")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``evaluate`` on a gold file that counts from 1 and hands over what it printed."""

    def evaluate(*words: str, gold: tuple[str, ...] = ("gold", "--gold-base=1")) -> str:
        assert cli.main(["evaluate", *gold, *words]) == 0
        output, error = capsys.readouterr()
        assert error == ""
        return output

    return evaluate


def systems(output: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(output)["systems"]
    return records


def rates(output: str) -> list[list[float]]:
    """AER, precision, recall and F1 of each system."""
    return [[record[rate] for rate in ("aer", "precision", "recall", "f1")] for record in systems(output)]


FORWARD = pytest.approx([200 / 7, 75, 200 / 3, 1200 / 17])
PERFECT = [0, 100, 100, 100]
