"""The command ``norm-align``."""

import pytest

import captum_norm
from alignment import cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"norm-align {captum_norm.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["evaluate", "--help"], ["extract", "--help"], ["translate", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: norm-align")


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr() == ("", "norm-align: error: the following arguments are required: COMMAND\n")
