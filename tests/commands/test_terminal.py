"""Nothing that comes from elsewhere is obeyed by the terminal, nor written into files that people look at."""

import ast
import csv
import io
import json
import sys
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matplotlib.text import Text as FigureText
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import alignment.cli
from captum_norm import InvalidInputError, cli
from captum_norm.bars import to_stderr
from captum_norm.commands.program import Command, Options, Program
from captum_norm.commands.terminal import Terminal
from captum_norm.show import Panel, draw_heatmaps, figure_bytes
from tests.tiny import bert_config

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "captum_norm/show/assets/page.js").read_text(encoding="utf-8").strip()
HOSTILE = "\x1b[31m\x1b]8;;http://e.x\x07\x9b31m\u202e\u200b[red]a[/red]:smile:<b>\u2028"
SPELLED = "\\x1b[31m\\x1b]8;;http://e.x\\x07\\x9b31m\\u202e\\u200b[red]a[/red]:smile:<b>\\u2028"
NAMED = HOSTILE.replace("/", "|")
WORDS = ["[PAD]", HOSTILE, "[CLS]", "a", "=cmd"]


@dataclass(frozen=True, kw_only=True)
class Nothing(Options):
    pass


def is_safe(text: str) -> bool:
    return not {unicodedata.category(c) for c in text if c != "\n"} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with hostile names of classes, of the unknown token, and of itself."""
    torch.manual_seed(0)
    labels = {0: HOSTILE, 1: "$\\frac{" + HOSTILE}
    config = transformers.BertConfig(**bert_config().to_dict() | {"vocab_size": len(WORDS), "id2label": labels})
    folder = tmp_path_factory.mktemp("models") / NAMED
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    core = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=HOSTILE))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer(tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]").save_pretrained(folder)
    return folder


def drawn(show: Callable[[Terminal], object]) -> str:
    terminal = Terminal(width=400)
    with terminal.capture() as captured:
        show(terminal)
    return captured.get()


def test_terminal_spells_whatever_it_is_given() -> None:
    def table(terminal: Terminal) -> None:
        table = Table(title=HOSTILE, caption=HOSTILE)
        table.add_column(HOSTILE, footer=HOSTILE)
        table.add_row(HOSTILE)
        terminal.print(table)

    shown = [
        drawn(lambda terminal: terminal.print(HOSTILE)),
        drawn(lambda terminal: terminal.print(HOSTILE, markup=True, emoji=True, highlight=True)),
        drawn(lambda terminal: terminal.say(HOSTILE)),
    ]
    assert set(shown) == {f"{SPELLED}\n"}
    within = drawn(table)
    assert within.count(SPELLED) == 4
    # Rich drops some control characters of its own kind of text before anybody sees them.
    foreign = drawn(lambda terminal: terminal.print(Text(HOSTILE), Text.assemble((HOSTILE, "bold"))))
    assert foreign.count(SPELLED.replace("\\x07", "")) == 2
    assert all(map(is_safe, (within, foreign)))


def test_messages_on_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_options: object) -> None:
        warnings.warn(HOSTILE, UserWarning, stacklevel=1)
        raise InvalidInputError(HOSTILE)

    warned = list[str]()
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: warned.append(str(message)))
    monkeypatch.setattr(warnings, "filters", [])
    assert Program("trial", "A trial.", [Command("run", "run", Nothing, fails)]).main(["run"]) == 2
    to_stderr(HOSTILE)
    assert capsys.readouterr().err == f"trial: error: {SPELLED}\n{SPELLED}\n"
    assert warned == [SPELLED]


COMMANDS = [
    ["explain", "a b =cmd"],
    ["explain", "a b", "--target", HOSTILE, "--method", "decompx"],
    ["compare", "a b =cmd a", "--methods=weights,norm"],
    ["models", "--check"],
]


@pytest.mark.few
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: f"{words[0]} {len(words)}")
def test_what_commands_print_and_write(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("json",) if words[0] == "models" else ("json", "csv", "html", "png")
    outs = [tmp_path / f"{NAMED[:20]}.{kind}" for kind in kinds]
    more = [str(folder)] if words[0] == "models" else ["--model", str(folder)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that are missing
        assert cli.main([*words, *more, *(f"--out={out}" for out in outs)]) == 0
    said = "".join(capsys.readouterr())
    assert SPELLED.replace("/", "|") in said
    assert is_safe(said)
    written = {
        path.name: path.read_text(encoding="utf-8").replace(SCRIPT, "")
        for path in tmp_path.iterdir()
        if path.suffix != ".png"
    }
    assert len(written) == len(kinds) - ("png" in kinds)
    assert all(map(is_safe, written.values()))
    for path in tmp_path.glob("*.json"):
        assert str(folder) == json.loads(path.read_text(encoding="utf-8"))["model"]
    if words[0] == "explain" and len(words) == 2:
        tokens = json.loads(outs[0].read_text(encoding="utf-8"))["tokens"]
        rows = list(csv.DictReader(io.StringIO(outs[1].read_text(encoding="utf-8"))))
        assert tokens == ["a", HOSTILE.strip(), "=cmd"]  # its last character is white space
        assert [row["token"] for row in rows] == ["a", SPELLED.removesuffix(r"\u2028"), "=cmd"]
        assert "<b>" not in outs[2].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("norm", ["explain", "a", "--target", f"no {HOSTILE}", "--model", "MODEL"]),
        ("norm", ["explain", "a", "--model", f"./{HOSTILE}"]),
        ("norm", ["explain", "a", f"--out={HOSTILE}"]),
        ("norm", ["analyze", "mixing-ratio", f"--corpus={HOSTILE}"]),
        ("norm", ["demo", f"--{HOSTILE}"]),
        ("align", ["extract", HOSTILE]),
        ("align", ["translate", HOSTILE]),
        ("align", ["sweep", f"--corpus={HOSTILE}"]),
        ("align", ["evaluate", HOSTILE, HOSTILE, "--gold-base=0"]),
    ],
    ids=map(str, range(9)),
)
def test_what_commands_complain_of(
    program: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = cli.main if program == "norm" else alignment.cli.main
    assert main([str(folder) if word == "MODEL" else word for word in words]) == 2
    output, said = capsys.readouterr()
    assert output == ""
    assert "\\x1b[31m" in said
    assert said.count("\n") == 1
    assert is_safe(said)


def test_translations_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """In a pipe they are data."""
    Path("text").write_text("oui\n", encoding="utf-8")
    monkeypatch.setattr("alignment.translation.translate", lambda *_, **__: [[HOSTILE]])
    shown = []
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert alignment.cli.main(["translate", "text", "--quiet"]) == 0
        shown.append(capsysbinary.readouterr().out.decode())
    assert shown == [f"{SPELLED}\n", f"{HOSTILE}\n"]


def test_figures() -> None:
    figure = draw_heatmaps([Panel(HOSTILE, torch.ones(1, 1), HOSTILE)], [HOSTILE], title=f"$\\frac{{ {HOSTILE}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svg = figure_bytes(figure, "svg").decode()
        assert figure_bytes(figure).startswith(b"\x89PNG")
    assert is_safe(svg)
    assert {SPELLED, "$\\frac{ " + SPELLED} <= {text.get_text() for text in figure.findobj(FigureText)}


def test_commands_print_through_the_terminal_alone() -> None:
    """The places that write anywhere else are known, and what they write is spelled or data."""
    streams = {
        "captum_norm/commands/program.py": 2,  # where standard output is opened and flushed, and complaints
        "alignment/commands/evaluate.py": 2,  # JSON and CSV
        "alignment/commands/inspect.py": 2,  # rows of numbers
    }
    for path in [*ROOT.glob("captum_norm/**/*.py"), *ROOT.glob("alignment/**/*.py")]:
        name = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert "print" not in calls, name
        assert "Console" not in calls or name.endswith("commands/terminal.py"), name
        assert calls.count("sys.stdout.write") + calls.count("sys.stderr.write") <= streams.get(name, 0), name
        assert not {"csv.writer", "csv.DictWriter"} & set(calls) or name == "captum_norm/results/tables.py", name
