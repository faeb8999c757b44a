"""``norm-align translate``: what the API gives line by line, columns, scores, raw text, and lines that are bad."""

from functools import partial
from pathlib import Path

import pytest

from alignment import cli
from alignment.aligner import WordAligner
from alignment.commands import translate as command
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import format_pharaoh
from alignment.translation import translate
from tests.alignment.commands.conftest import Printed, Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, set_stdin, write
from tests.alignment.fairseq.small import save_checkpoint
from tests.pages import content as content_of


@pytest.fixture(autouse=True)
def _files() -> None:
    write("fr", FRENCH)
    write("en", ENGLISH)


@pytest.fixture
def run(printed: Printed) -> Printed:
    return partial(printed, "translate")


@pytest.fixture(scope="module")
def translations() -> list[list[str]]:
    """What the model makes of the French sentences."""
    return translate(*load_shipped_model("fr-en"), [line.split() for line in FRENCH])


def test_lines_are_those_of_the_api(
    run: Printed, translations: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(map(" ".join, translations))
    assert expected[1] == "the debate is closed ."
    assert run("fr") == (expected, ["6 lines; 0 bad lines"])
    monkeypatch.setattr(command, "_BLOCK_LINES", 2)
    set_stdin(monkeypatch, [*FRENCH[:3], "", " \t", *FRENCH[3:], ""])
    assert run("--quiet") == ([*expected[:3], "", "", *expected[3:], ""], [])


def test_options_reach_the_search(run: Printed) -> None:
    model, tokenizer = load_shipped_model("en-fr")
    expected = translate(model, tokenizer, [line.split() for line in ENGLISH], beam=2, max_length=4)
    assert run("en", "--model=en-fr", "--beam=2", "--max-length=4")[0] == list(map(" ".join, expected))
    assert expected != translate(model, tokenizer, [line.split() for line in ENGLISH], beam=2)


def test_columns(run: Printed, translations: list[list[str]]) -> None:
    model, tokenizer = load_shipped_model("fr-en")
    sources = [line.split() for line in FRENCH]
    aligner = WordAligner(model, tokenizer, setting="auto", recipe="mutual", head="auto")
    links = list(map(format_pharaoh, aligner.align(sources, translations)))
    texts = list(map(" ".join, translations))
    found, told = run("fr", "--alignments", "--setting=auto", "--recipe=mutual")
    assert found == [" ||| ".join(row) for row in zip(texts, links, strict=True)]
    assert told == [f"chose {aligner.choice}", "6 lines; 0 bad lines"]


def test_a_page_has_the_links_printed(
    run: Printed, translations: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_BLOCK_LINES", 4)
    write("fr", ["a " * 9, *FRENCH])
    words = ("fr", "--max-words=8", "--setting=auto", "--recipe=mutual", "--quiet")
    printed, _ = run(*words, "--alignments")
    assert run(*words, "--page=p.html") == (["", *map(" ".join, translations)], [])
    examples = content_of(Path("p.html").read_text(encoding="utf-8"))["examples"]
    # The first block, which decides on the layer.
    assert [example["inputs"]["texts"] for example in examples] == [line.split() for line in FRENCH[:3]]
    assert [example["outputs"]["texts"] for example in examples] == translations[:3]
    found = [{f"{source}-{target}" for target, source, _ in example["links"][0]["links"]} for example in examples]
    assert found == [set(line.partition(" ||| ")[2].split()) for line in printed[1:4]]


def test_bad_lines_stay_empty_or_end_the_run(
    run: Printed, translations: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write("bad", [FRENCH[1], b"\xe9", "a " * 9, "\u200b", "", FRENCH[1]])
    line = " ".join(translations[1])
    found, told = run("bad", "--max-words=8", "--alignments", "--layer=0", "--recipe=mutual", "--head=all")
    assert found == [f"{line} ||| 0-0 1-1 2-2 3-3", "", "", "", "", f"{line} ||| 0-0 1-1 2-2 3-3"]
    assert [message.split("; ")[0] for message in told] == [
        "bad, line 2: got byte 0xe9 at byte 1 of the line, expected UTF-8",
        "bad, line 3: got 9 words, expected at most 8",
        "bad, line 4: got a source side without a word, expected at least one that the tokenizer keeps",
        "6 lines",
    ]
    assert told[-1] == "6 lines; 3 bad lines"
    assert cli.main(["translate", "bad", "--bad-lines=stop"]) == 2
    assert capsys.readouterr().err.startswith("norm-align: error: bad, line 2: got byte 0xe9")


def test_a_translation_that_cannot_be_aligned_is_printed(
    run: Printed, translations: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ["\u200b"]
    monkeypatch.setattr("alignment.translation.translate", lambda *_, **__: [lost, translations[1]])
    write("two", FRENCH[:2])
    found, told = run("two", "--alignments", "--layer=0", "--recipe=mutual", "--head=all")
    assert found == ["\u200b ||| ", f"{' '.join(translations[1])} ||| 0-0 1-1 2-2 3-3"]
    assert told[0].startswith("two, line 1: got a target side without a word")
    assert told[1] == "2 lines; 1 bad lines"


def test_raw_text(run: Printed) -> None:
    write("raw", ["L\u2019école est petite, n\u2019est-ce pas ?"])
    words = ["L'", "école", "est", "petite", ",", "n'", "est-ce", "pas", "?"]
    assert run("raw", "--tokenize")[0] == list(map(" ".join, translate(*load_shipped_model("fr-en"), [words])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "cannot read none: there is no such file"),
        (["fr", "--alignments", "--layer=5"], "got layer 5; the model has 3"),
        (["fr", "--model=model.pt", "--data=.", "--tokenize"], "--tokenize is for the shipped models"),
    ],
)
def test_what_is_refused_is_one_sentence(refused: Refused, words: list[str], message: str) -> None:
    save_checkpoint(Path())
    refused(message, "translate", *words)


def test_nothing_to_translate(run: Printed) -> None:
    write("empty", [])
    assert run("empty", "--alignments") == ([], ["0 lines; 0 bad lines"])
