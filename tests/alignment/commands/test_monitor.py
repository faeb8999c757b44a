"""``norm-align monitor``: its numbers by hand, limits that end a pipeline, and lines that are no matrices."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from alignment import Lexicon, cli
from tests.alignment.commands.conftest import Printed, Refused
from tests.alignment.commands.texts import set_stdin, write, write_texts
from tests.fuzzing import at_line

HEADER = "lines\tentropy\tuncovered\tdisagreement\tunusable"


def line(source: str, target: str, probabilities: list[list[float]]) -> str:
    """What ``--format matrix`` writes, of which links and their scores are not read."""
    sides = {"source": source.split(), "target": target.split()}
    return json.dumps({**sides, "links": [], "probabilities": probabilities, "corpus_statistics": False})


SURE = line("le roi", "the king", [[0.9, 0.0], [0.0, 0.9]])
CROSSED = line("le roi", "the king", [[0.0, 0.9], [0.9, 0.0]])
WIDE = line("le roi", "the king", [[0.1, 0.1], [0.1, 0.31]])  # calibrated, 0.31 and 0.65


def table(lines: list[str]) -> dict[str, list[float]]:
    """The numbers by window."""
    assert lines[0] == HEADER
    return {cells[0]: list(map(float, cells[1:])) for cells in (row.split("\t") for row in lines[1:])}


def save_lexicon() -> None:
    lexicon = Lexicon()
    for _ in range(3):
        lexicon.count(["le", "roi"], ["the", "king"], [[1.0, 0.0], [0.0, 1.0]])
    lexicon.save("lexicon")


def test_numbers_of_each_window(printed: Printed) -> None:
    save_lexicon()
    write("lines", [SURE, "null", CROSSED, WIDE, line("le chat", "dog", [[0.9, 0.0]])])
    output, errors = printed("monitor", "lines", "--window=2", "--use-lexicon=lexicon")
    assert not errors
    found = table(output)
    assert list(found) == ["1-2", "3-4", "5-5"]
    wide = -sum(p * math.log2(p) for p in (0.1 / 0.41, 0.31 / 0.41))
    # Of WIDE's words, roi and king are covered by their one link, which the lexicon prefers, too, unlike CROSSED's two.
    assert found["1-2"] == [0, 0, 0, 0]
    assert found["3-4"] == pytest.approx([(0 + (1 + wide) / 2) / 2, 2 / 8, 2 / 3, 0], abs=5e-5)
    assert found["5-5"] == pytest.approx([0, 1 / 3, 0, 0], abs=5e-5)  # no count of the word dog
    assert all(math.isnan(row[2]) for row in table(printed("monitor", "lines")[0]).values())


@pytest.mark.parametrize(
    ("limit", "code", "windows"),
    [
        ("uncovered=0.2", 3, 2),
        ("uncovered=0.25", 0, 3),
        ("entropy=0", 3, 2),
        ("unusable=0", 0, 3),
        ("disagreement=.5", 3, 2),
    ],
)
def test_a_limit_ends_the_pipeline(
    limit: str, code: int, windows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_lexicon()
    set_stdin(monkeypatch, [SURE, SURE, CROSSED, WIDE, SURE])
    words = ["monitor", "-", "--window=2", f"--limit={limit}", "--limit=unusable=0.5", "--use-lexicon=lexicon"]
    assert cli.main(words) == code
    output, error = capsys.readouterr()
    assert len(table(output.splitlines())) == windows
    name, _, number = limit.partition("=")
    assert (f"lines 3-4: {name} is " in error and error.endswith(f", above {float(number)}\n")) == (code == 3)


def test_what_extract_and_decode_write(printed: Printed) -> None:
    write_texts()
    printed("extract", "fr", "en", "--keep-sides", "--format=matrix", "--out=extracted", "--save-lexicon=counts")
    printed("decode", "extracted", "--format=matrix", "--out=decoded")
    [first, second] = (
        table(printed("monitor", name, "--use-lexicon=counts")[0])["1-6"] for name in ("extracted", "decoded")
    )
    assert first == second
    assert 0 < first[0] < 0.5
    assert first[1] < 0.5
    assert first[3] == 0


HOSTILE: list[Any] = [
    b"\xff\xfe",
    "{",
    '{"source": ["a"], "target": ["b"], "probabilities": [[1e999]]}',
    '{"source": ["a"], "target": ["b"], "probabilities": [[1.5]]}',
    '{"source": ["a"], "target": ["b"], "probabilities": [[-0.5]]}',
    '{"source": ["a"], "target": ["b"], "probabilities": [[NaN]]}',
    '{"source": ["a"], "target": ["b", "c", "d"], "probabilities": [[0.5]]}',
    '{"source": [1], "target": ["b"], "probabilities": [[0.5]]}',
    '{"source": "\\ud800", "target": "b", "probabilities": [[0.5]]}',
    "[" * 100_000,
    "0-0 1-1",
    SURE[: len(SURE) // 2],
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_unusable_line_is_counted_and_named(hostile: Any, printed: Printed) -> None:
    write("lines", [SURE, hostile, SURE, SURE])
    output, [error] = printed("monitor", "lines")
    assert error.startswith("lines, line 2: ")
    assert table(output)["1-4"][3] == 0.25
    assert cli.main(["monitor", "lines", "--limit=unusable=0.2"]) == 3


def test_a_stream_that_breaks_off_or_is_empty(printed: Printed) -> None:
    Path("lines").write_text(f"{SURE}\n{SURE[:-9]}", encoding="utf-8")
    output, [error] = printed("monitor", "lines")
    assert table(output)["1-2"] == pytest.approx([0, 0, math.nan, 0.5], nan_ok=True)
    assert error.startswith("lines, line 2: ")
    write("empty", [])
    assert printed("monitor", "empty") == ([HEADER], [])
    write("blank", ["null", "", '{"source": ["a"], "target": [], "probabilities": []}'])
    assert all(map(math.isnan, table(printed("monitor", "blank")[0])["1-3"][:3]))


def test_an_interrupt_leaves_whole_windows(capsys: pytest.CaptureFixture[str]) -> None:
    write("lines", [SURE, WIDE] * 3)
    words, roots = ["monitor", "lines", "--window=2"], (str(Path(cli.__file__).parent),)
    assert cli.main(words) == 0
    whole = capsys.readouterr().out
    for step in (40, 120, 200):
        code, _ = at_line(step, lambda: cli.main(words), roots)
        assert code == 130
        assert whole.startswith(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--limit=uncoverd=0.5", "got limit='uncoverd'; expected one of entropy, uncovered, disagreement, unusable"),
        ("--limit=uncovered", "expected a number from 0 to 1"),
        ("--limit=uncovered=2", "got 2; expected a number from 0 to 1"),
        ("--limit=disagreement=0.5", "got a limit of disagreement without a lexicon; give one with --use-lexicon"),
        ("--use-lexicon=lines", "lines is not a lexicon"),
        ("--window=0", "got 0; expected a number from 1"),
    ],
)
def test_what_is_refused(words: str, message: str, refused: Refused) -> None:
    write("lines", [SURE])
    refused(message, "monitor", "lines", *words.split())
    write("attention", ['{"source": ["a"], "target": ["b"], "attention": [[0.5]]}'])
    assert cli.main(["monitor", "attention"]) == 2
    refused("cannot read nothing: there is no such file", "monitor", "nothing")
