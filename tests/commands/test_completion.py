"""Completion in a shell: the words that bash and zsh offer while a command line is typed."""

import contextlib
import io
import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
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


class Zsh:
    """An interactive zsh in a terminal of its own; our programs print their arguments there."""

    def __init__(self, scripts: Path, folder: Path) -> None:
        names = ("captum-norm", "norm-align")
        lines = ["autoload -Uz compinit && compinit -D -u", "setopt MENU_COMPLETE NO_LIST_BEEP NO_BEEP", "PS1="]
        lines += [f'eval "$(<{scripts / name}.zsh)"' for name in names]
        lines += [f'{name}() {{ print -r -- "RUN[$*]" }}' for name in names]
        (folder / ".zshrc").write_text("\n".join([*lines, "print READY", ""]), encoding="utf-8")
        environment = {"PATH": os.environ["PATH"], "ZDOTDIR": str(folder), "TERM": "vt100", "LANG": "C.UTF-8"}
        ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["zsh", "-d", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._terminal = ours
        self._until("READY")

    def offered(self, line: str) -> list[str]:
        """What each further Tab puts in the place of the line's last word, until the first one comes again."""
        found: list[str] = []
        while len(found) < 100:
            os.write(self._terminal, f"{line}{chr(9) * (len(found) + 1)}\r".encode())
            words = self._until(r"RUN\[(.*?)\]").split()
            # Behind the only choice, Tab goes on with the next word.
            if words[-1] in found or len(words) > len(line.split()) - 1:
                break
            found.append(words[-1])
        return sorted(found)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _until(self, pattern: str) -> str:
        """Read the terminal until the pattern comes; return its last group."""
        text, end = "", time.monotonic() + 120
        while time.monotonic() < end:
            if select.select([self._terminal], [], [], 1)[0]:
                text += os.read(self._terminal, 4096).decode(errors="replace")
            if match := re.search(pattern, text, re.DOTALL):
                return match[match.re.groups]
        raise AssertionError(f"zsh did not print {pattern}, but {text!r}")


@pytest.fixture
def zsh(scripts: Path, tmp_path: Path) -> Iterator[Zsh]:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    shell = Zsh(scripts, tmp_path)
    yield shell
    shell.close()


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


def test_zsh_offers(zsh: Zsh, tmp_path: Path) -> None:
    (tmp_path / "guitar.html").touch()
    for words, expected in OFFERED:
        assert zsh.offered(" ".join(words)) == expected


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert CAPTUM_NORM(["--completion", "fish"]) == 2
    output, error = capsys.readouterr()
    assert (output, "expected" in error or "choose from" in error, error.count("\n")) == ("", True, 1)
