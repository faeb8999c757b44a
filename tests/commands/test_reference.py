"""The reference has every command, and every option of each."""

import argparse
from pathlib import Path

import pytest

import alignment.cli
import captum_norm.cli
from captum_norm.commands.program import Command, Program, add_options

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
# Pages of options that several commands share.
SHARED = {
    "captum-norm": ("captum-norm-options", "captum-norm-explain-answers", "worker-options"),
    "norm-align": ("norm-align-options", "worker-options"),
}
PROGRAMS: list[Program] = [main.__self__ for main in (captum_norm.cli.main, alignment.cli.main)]  # type: ignore[attr-defined]
COMMANDS = [
    pytest.param(program.name, command, id=f"{program.name} {command.name}")
    for program in PROGRAMS
    for command in program.commands
]


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_a_command_has_a_page_with_all_its_options(program: str, command: Command) -> None:
    own = f"{program}-{command.name}"
    text = "".join((REFERENCE / f"{name}.md").read_text(encoding="utf-8") for name in (own, *SHARED[program]))
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, command.options)
    options = {option for action in parser._actions for option in action.option_strings}
    assert {option for option in options if f"`{option}" not in text} == set()
    assert f"[`{program} {command.name}`]({own}.md)" in (REFERENCE / "command-line.md").read_text(encoding="utf-8")
