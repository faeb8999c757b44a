"""The command line as a whole: version, help, completion, the reference, and arguments that are refused early."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import alignment.cli
from captum_norm import cli
from captum_norm.commands.program import Command, Program, add_options
from tests.commands.calls import refused

PROGRAMS: list[Program] = [main.__self__ for main in (cli.main, alignment.cli.main)]  # type: ignore[attr-defined]
PACKAGES = {"captum-norm": "captum_norm", "norm-align": "alignment"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_version_and_help_without_torch(program: Program) -> None:
    """``--help`` of every command is fast: nothing slow is imported."""
    code = f"""
import contextlib, io, sys
from {PACKAGES[program.name]}.cli import main
for words in {[["--version"], ["--help"], *([command.name, "--help"] for command in program.commands)]}:
    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
        main(words)
    assert printed.getvalue().startswith({(program.name, f"usage: {program.name}")}), words
assert not {{"torch", "transformers", "matplotlib"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "argument COMMAND: invalid choice: 'frobnicate'"),
        (["explian", "a"], "argument COMMAND: invalid choice: 'explian' (choose from "),
        (["explain", "a", "--metod", "alti"], "unrecognized arguments: --metod alti; did you mean --method?"),
        (["explain", "a", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["explain"], "got no text; give a text"),
        (["explain", "a", "--method", "magic"], "argument --method: got magic; expected one of norm, "),
        (
            ["explain", "a", "--method", "no.such:Method"],
            "argument --method: cannot import no.such:Method: No mod",
        ),
        (["explain", "a", "--method", ":Method"], "argument --method: cannot import :Method: Empty module name"),
        (["explain", "a", "--method", "captum_norm:ALTo"], "argument --method: cannot import captum_norm:ALTo: "),
        (
            ["explain", "a", "--method", "captum_norm.forward.record:Layer"],
            "argument --method: got Layer; expected a class derived",
        ),
        (["compare", "a", "--methods", "alti,no.such:Method"], "argument --methods: cannot import no.such"),
        (["explain", "a", "--aggregation", "sum"], "argument --aggregation: invalid choice: 'sum'"),
        (["explain", "a", "--layer", "two"], "argument --layer: got two; expected a whole number"),
        (["explain", "a", "--position", "middle"], "argument --position: got middle; expected a number, first"),
        (
            ["explain", "a", "--out", "e.docx"],
            "argument --out: cannot write e.docx: the name must end in .png or .html",
        ),
        (["explain", "a", "--out", "no/such/e.png"], "argument --out: cannot write no/such/e.png: there is no folder"),
        (["demo", "--out", "e.html"], "argument --out: cannot write e.html: the name must end in .png"),
        (["explain", ""], "the text is empty; give some words"),
        (["explain", " \n"], "the text is empty; give some words"),
        (["explain", "a", "--model", "./no-such-folder"], "cannot load the model ./no-such-folder: there is no such"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *words).startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("module", "program"), [("captum_norm.cli", "captum-norm"), ("alignment.cli", "norm-align")])
def test_a_command_line_runs_as_a_module(module: str, program: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{program}: error: argument COMMAND: invalid choice: 'nonsense'")


REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
# Pages of options that several commands share.
SHARED = {
    "captum-norm": (
        "captum-norm-options",
        "captum-norm-explain-answers",
        "captum-norm-explain-components",
        "worker-options",
    ),
    "norm-align": ("norm-align-options", "worker-options"),
}
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


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_help_fits_one_screen_and_help_all_has_all_options(
    program: str, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (main,) = (one.main for one in PROGRAMS if one.name == program)
    shown = {}
    for flag in ("-h", "--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([command.name, flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert shown["-h"] == shown["--help"]
    lines = shown["--help"].splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[-2:] == ["example:", f"  $ {command.example}"]
    parser = argparse.ArgumentParser(add_help=False)
    command.declare(parser, short=False)
    options = [action.option_strings[-1] for action in parser._actions if action.option_strings]
    assert [option for option in options if option not in shown["--help-all"]] == []
    short = [line.split()[0] for line in lines if line.startswith("  -")]
    assert len(short) <= 12
    assert set(short) <= {"-h,", *options, *(option.replace("--no-", "--") + "," for option in options)}
    name, own, *words = shlex.split(command.example)
    assert (name, own) == (program, command.name)
    parser.parse_args(words)
