"""Completion in a shell: the words that bash offers while a command line is typed, by shtab's script."""

import contextlib
import io
import os
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import alignment.cli
import captum_norm.cli
from captum_norm.methods import METHODS

CAPTUM_NORM, NORM_ALIGN = captum_norm.cli.main, alignment.cli.main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of both programs, as users write them to a file."""
    folder = tmp_path_factory.mktemp("completion")
    for name, main in (("captum-norm", CAPTUM_NORM), ("norm-align", NORM_ALIGN)):
        for shell in ("bash", "zsh"):
            printed = io.StringIO()
            with redirect_stdout(printed), contextlib.suppress(SystemExit):
                main(["--completion", shell])
            (folder / f"{name}.{shell}").write_text(printed.getvalue(), encoding="utf-8")
        assert printed.getvalue().startswith(f"#compdef {name}")
    return folder


def offered(scripts: Path, *words: str, folder: Path) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(words)
    script = f"""
        source {scripts / words[0]}.bash
        COMP_WORDS=({line}{' ""' if words[-1] == "" else ""}); COMP_CWORD={len(words) - 1}
        COMP_LINE="{line}"; COMP_POINT={len(line)}
        function=$(complete -p {words[0]} | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function {words[0]} "{words[-1]}" "{words[-2]}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {"PATH": os.environ["PATH"]}
    found = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, cwd=folder, env=environment
    )
    return sorted(filter(None, found.stdout.split("\n")))


OFFERED = [
    (("captum-norm", "co"), ["compare"]),
    (("norm-align", "ev"), ["evaluate"]),
    (("captum-norm", "explain", "--ag"), ["--against", "--aggregation"]),
    (("captum-norm", "explain", "--method", "at"), sorted(name for name in METHODS if name.startswith("at"))),
    (("captum-norm", "explain", "--out", "gui"), ["guitar.html"]),
    (("norm-align", "extract", "--recipe", "mut"), ["mutual"]),
]


@pytest.mark.parametrize(("words", "expected"), OFFERED)
def test_bash_offers(scripts: Path, words: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "guitar.html").touch()
    assert offered(scripts, *words, folder=tmp_path) == expected


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert CAPTUM_NORM(["--completion", "fish"]) == 2
    output, error = capsys.readouterr()
    assert (output, "expected" in error or "choose from" in error, error.count("\n")) == ("", True, 1)
