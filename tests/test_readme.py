"""What the README shows works: its Python runs, its commands parse, its make targets exist."""

import argparse
import doctest
import re
import shlex
from pathlib import Path
from typing import Any, Never

import pytest

from captum_norm import cli

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in a language, each preceded by blank lines so that errors have the file's lines."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = list(re.finditer(rf"^```{language}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL))
    assert found, f"README.md has no ```{language} block"
    return ["\n" * readme.count("\n", 0, match.start(1)) + match[1] for match in found]


def commands() -> list[list[str]]:
    """The words of every command in the README's console blocks, after the prompt."""
    lines = "".join(blocks("console")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shared: dict[str, Any] = {"__name__": "readme"}
    for block in blocks("python"):
        if ">>>" in block:
            examples = doctest.DocTestParser().get_doctest(block, shared, "README.md", "README.md", 0)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            output: list[str] = []
            failures = runner.run(examples, out=output.append, clear_globs=False).failed
            assert failures == 0, "".join(output)
            shared = examples.globs
        else:
            exec(compile(block, "README.md", "exec"), shared)


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Never:
        parse(parser, *arguments, **options)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    ours = [words[1:] for words in commands() if words[:1] == ["captum-norm"]]
    assert ours, "README.md shows no captum-norm command"
    for words in ours:
        with pytest.raises(ParsedError):
            cli.main(words)


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = [target for words in commands() if words[:1] == ["make"] for target in words[1:]]
    assert {"demo", "test"} <= set(shown)
    assert set(shown) <= set(targets)
