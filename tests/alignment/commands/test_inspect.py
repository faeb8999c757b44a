"""``norm-align inspect``: what the API gives line by line, as a table or JSON, summaries, and lines that are bad."""

import json
from functools import partial

import pytest

from alignment.fairseq.loading import load_shipped_model
from alignment.inspection import MEASURES, Inspection
from alignment.inspector import Inspector
from tests.alignment.commands.conftest import Printed, Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, set_stdin, write

TARGETS = [
    ENGLISH[0],
    "We have adopted the motion for a resolution on fishing .",
    "Thank you",
    "The school of Europe of Europe of Europe",
    ENGLISH[4],
    "We have adopted",
]
FLAGS = ["", "unrelated", "truncated", "repeated", "", "truncated"]
CHOICE = ["--layer=0", "--head=2"]
HEAD = ["line", "flags", *MEASURES, "uncovered", "added", "repeated", "source", "target"]


@pytest.fixture(autouse=True)
def _files() -> None:
    write("fr", FRENCH)
    write("en", ENGLISH)
    write("bad", TARGETS)


@pytest.fixture
def run(printed: Printed) -> Printed:
    return partial(printed, "inspect")


@pytest.fixture(scope="module")
def inspections() -> list[Inspection]:
    """What the API finds."""
    inspector = Inspector(*load_shipped_model("fr-en"), layer=0, head=2)
    return inspector.inspect([line.split() for line in FRENCH], [line.split() for line in TARGETS])


def test_table(run: Printed, inspections: list[Inspection]) -> None:
    found, told = run("fr", "bad", *CHOICE)
    rows = [line.split("\t") for line in found]
    assert rows[0] == HEAD
    for number, (row, one) in enumerate(zip(rows[1:], inspections, strict=True), 1):
        values = [getattr(one, name) for name in MEASURES]
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        source, target = FRENCH[number - 1].split(), TARGETS[number - 1].split()
        places = (source, one.uncovered), (target, one.added), (target, one.repeated)
        words = [" ".join(side[index] for index in indices) for side, indices in places]
        assert row == [str(number), ",".join(one.flags), *cells, *words, " ".join(source), " ".join(target)]
    assert [row[1] for row in rows[1:]] == FLAGS
    assert told[-1] == "6 lines, 4 flagged: 1 unrelated, 2 truncated, 1 repeated; 0 bad lines"
    flagged, _ = run("fr", "bad", "--flagged", *CHOICE)
    assert flagged == [found[0], *(line for line, flag in zip(found[1:], FLAGS, strict=True) if flag)]


def test_json_and_all_measures(run: Printed) -> None:
    found, told = run("fr", "bad", "--format=json", "--all-measures", "--quiet", *CHOICE)
    records = [json.loads(line) for line in found]
    assert told == []
    inspector = Inspector(*load_shipped_model("fr-en"), layer=0, head=2, all_measures=True)
    for number, record in enumerate(records, 1):
        (one,) = inspector.inspect([FRENCH[number - 1].split()], [TARGETS[number - 1].split()])
        assert list(record) == ["line", *MEASURES, "uncovered", "added", "repeated", "flags", "source", "target"]
        assert record["line"] == number
        assert [record[name] for name in MEASURES] == pytest.approx([getattr(one, name) for name in MEASURES], abs=2e-4)
        assert tuple(record["uncovered"]) == one.uncovered
        assert (record["source"], record["target"]) == (FRENCH[number - 1].split(), TARGETS[number - 1].split())


def test_exchanged_files_are_named(run: Printed) -> None:
    found, told = run("en", "fr", *CHOICE)
    assert [line.split("\t")[1] for line in found[1:]] == ["exchanged"] * 6
    assert told[-1] == "most pairs are more probable with source and target exchanged: exchange SOURCE and TARGET"
    _, told = run("en", "fr", "--model=en-fr")
    assert told[-1].startswith("6 lines, 0 flagged")


def test_bad_lines_and_streams(run: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, ["", *TARGETS[:2]])
    write("three", FRENCH[:3])
    found, told = run("three", "-", "--format=json", *CHOICE)
    assert found[0] == "null"
    assert [json.loads(line)["line"] for line in found[1:]] == [2, 3]
    assert "<stream>, line 1: got no word on the target side, expected at least one" in told
    set_stdin(monkeypatch, [f"{FRENCH[0]} ||| {TARGETS[0]}", "no bars"])
    found, told = run("-")
    assert found[2] == "2" + "\t" * (len(HEAD) - 1)
    assert "chose AWI layer" in "\n".join(told)
    assert told[-1] == "2 lines, 0 flagged; 1 bad lines: 1 unreadable"


def test_raw_text(run: Printed) -> None:
    write("raw", ["Je n'ai pas l'intention de voter."])
    write("raw-en", ["I don't intend to vote."])
    found, _ = run("raw", "raw-en", "--tokenize", *CHOICE)
    assert found[1].split("\t")[-2:] == ["Je n' ai pas l' intention de voter .", "I don 't intend to vote ."]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-", "-"], "got - more than once; standard input can be read only once"),
        (["fr", "none"], "cannot read none: there is no such file"),
        (["fr", "bad", "--head=all"], "argument --head: got all; expected a number or auto"),
        (["fr", "bad", "--layer=7", "--head=0"], "got layer 7; the model has 3: 0 to 2"),
        (["fr", "bad", "--layer=0", "--head=9"], "got head 9; the model has 4: 0 to 3"),
    ],
)
def test_what_is_refused_is_one_sentence(words: list[str], message: str, refused: Refused) -> None:
    refused(message, "inspect", *words)
