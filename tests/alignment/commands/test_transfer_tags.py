"""``norm-align transfer-tags``: what the API gives, by a model's links and by given ones; bad input."""

from functools import partial
from pathlib import Path

import pytest

from alignment import parse_markup, split_text, transfer_tags
from alignment.aligner import BidirectionalAligner, WordAligner
from alignment.commands import transfer_tags as command
from alignment.fairseq.loading import load_shipped_model
from tests.alignment.commands.conftest import Printed, Refused
from tests.alignment.commands.texts import set_stdin, write

SOURCE = ["<p>La <b>maison</b> est petite.</p>", "Le débat est clos.", "", "L'école de <i>l'Europe</i><br/>"]
TARGET = ["The house is small.", "The  debate is closed .", "", "Europe's school"]
TAGGED = ["<p>The <b>house</b> is small.</p>", TARGET[1], "", "<i>Europe's</i> school<br/>"]
FIXED = ("--layer=0", "--head=2", "--reverse-head=0")  # as they are chosen
ONE = ("--layer=0", "--head=2", "--reverse-model=none")


@pytest.fixture(autouse=True)
def _files() -> None:
    write("fr", SOURCE)
    write("en", TARGET)


@pytest.fixture
def run(printed: Printed) -> Printed:
    return partial(printed, "transfer-tags")


def test_files_and_streams(run: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = run("fr", "en", *ONE)
    assert told == ["4 lines; 0 bad lines"]
    assert run("fr", "en", *ONE, "--out=out", "--quiet") == ([], [])
    assert Path("out").read_text(encoding="utf-8").split("\n") == [*found, ""]
    set_stdin(monkeypatch, SOURCE)
    assert run("-", "en", *ONE, "--out=out", "--overwrite", "--quiet") == ([], [])
    assert Path("out").read_text(encoding="utf-8").split("\n") == [*found, ""]
    set_stdin(monkeypatch, TARGET)
    monkeypatch.setattr(command, "_BLOCK_LINES", 3)
    assert run("fr", "-", *ONE)[0] == found


def test_links_of_a_model_are_those_of_the_api(run: Printed) -> None:
    forward, reverse = (
        WordAligner(*load_shipped_model(name), layer=0, head=head, recipe="hmm")
        for name, head in (("fr-en", 2), ("en-fr", 0))
    )
    aligner = BidirectionalAligner(forward, reverse, count_text=False)
    expected = []
    for line, target in zip(SOURCE, TARGET, strict=True):
        source = parse_markup(line)
        words = split_text(source.text, "fr", breaks=source.breaks), split_text(target, "en")
        [links] = aligner.align([words[0]], [words[1]])
        expected.append(transfer_tags(source, target, links, *words))
    assert expected[0] == TAGGED[0]
    assert run("fr", "en", *FIXED) == (expected, ["4 lines; 0 bad lines"])


def test_the_model_translates(run: Printed) -> None:
    blocks = "<td>Le <b>débat</b> est clos.</td><td>Le vote aura lieu demain.</td> <td><pre>x  =	1</pre></td>"
    write("fr", ["Le <b>débat</b> est clos.", "", "<br/>", "Le débat est clos.", blocks])
    found, told = run("fr", *ONE)
    assert found[:4] == ["the <b>debate</b> is closed .", "", "<br/>", "the debate is closed ."]
    cells = ["the <b>debate</b> is closed .", "the vote will take place tomorrow .", "<pre>x  =\t1</pre>"]
    assert found[4] == "<td>{}</td><td>{}</td> <td>{}</td>".format(*cells)
    assert told == ["5 lines; 0 bad lines"]


def test_blocks_of_a_given_translation(run: Printed) -> None:
    write("fr", ["<li>La <b>maison</b> est petite.</li><li>Le <i>débat</i> est clos.</li>"])
    write("en", ["The house is small. The debate is closed."])
    found, _ = run("fr", "en", *FIXED)
    assert found == ["<li>The <b>house</b> is small.</li><li>The <i>debate</i> is closed.</li>"]


def test_translations_are_text_of_markup(run: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def translate(_: object, __: object, sentences: list[list[str]], **___: object) -> list[list[str]]:
        read.extend(sentences)
        return [["1", "<", "2", "&"]]

    monkeypatch.setattr("alignment.translation.translate", translate)
    write("fr", ["<b>1 &lt; 2 &amp;</b>"])
    assert run("fr", *ONE)[0] == ["<b>1 &lt; 2 &amp;</b>"]
    assert read == [["1", "<", "2", "&"]]
    monkeypatch.setattr(command, "NormalizedWords", ())  # other models read words with their punctuation marks
    write("fr", ["<b>L'1 &lt; 2.</b><img/>3"])
    run("fr", *ONE)
    assert read[1:] == [["L'1", "<", "2.", "3"]]


def test_markers_of_usfm(run: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    write("fr", [r"\p \v 1 La \nd maison\nd*\f + \ft Ou : demeure\f* est petite.", r"\q1", "a & <b>"])
    write("en", ["The house is small.", "", "a & <b>"])
    tagged = r"\p \v 1 The \nd house\nd*\f + \ft Ou : demeure\f* is small."
    assert run("fr", "en", *FIXED, "--syntax=usfm")[0] == [tagged, r"\q1", "a & <b>"]
    # What a model writes is text of USFM.
    write("fr", [r"\q1 1"])
    monkeypatch.setattr("alignment.translation.translate", lambda *_, **__: [["a", "&", r"\b"]])
    assert run("fr", *ONE, "--syntax=usfm")[0] == [r"\q1 a & b"]


def test_pairs_may_be_split(run: Printed) -> None:
    write("en", ["She has a <b>small black</b> dog.", 'She has a <g id="1">small black</g> dog.'])
    write("fr", ["Elle a un petit chien noir."] * 2)
    found, _ = run("en", "fr", "--model=en-fr", "--layer=0", "--head=0", "--reverse-head=2", "--split")
    assert found == ["Elle a un <b>petit</b> chien <b>noir</b>.", 'Elle a un <g id="1">petit chien noir</g>.']


def test_layer_and_head_are_chosen_on_the_first_lines(run: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    _, told = run("fr", "en")
    assert told == ["forward: chose AWI layer 0 head 2", "reverse: chose AWI layer 0 head 0", "4 lines; 0 bad lines"]
    set_stdin(monkeypatch, SOURCE)
    _, again = run("-", "en")
    assert again == told


REFUSED = [
    (["bad", "en"], "bad, line 4: got '</i>' at character 8 inside '<b>' at character 1; expected tags in pairs"),
    (["fr", "tagged"], "tagged, line 1: got '<p>' at character 1 of the translation, expected text without tags"),
    (["fr", "short"], "short, line 3: got no such line, but fr has one; expected equally many in both"),
    (["bad"], "bad, line 4: got '</i>'"),
    (["fr", "en", "--out=en", "--overwrite"], "cannot write en: it is the input"),
    (["-", "-"], "got - more than once; standard input can be read only once"),
    (["usfm", "en", "--syntax=usfm"], r"usfm, line 4: got '\\nd ' at character 6, which nothing closes"),
    (["fr", "usfm", "--syntax=usfm"], r"usfm, line 4: got '\\v 1 ' at character 1 of the translation, expected text"),
    (["xliff", "en"], "xliff, line 4: got '<pc id=\"1\">' at character 1, which nothing closes; expected tags"),
    (["fr", "en", *ONE, "--max-words=4"], "fr, line 1: got 5 words on the source side, expected at most 4"),
    (["fr", "en", *ONE, "--combine=add"], "got --combine and only one model"),
    (["fr", "en", "--out=/dev/null"], "cannot write /dev/null: it is no regular file"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_is_refused_leaves_nothing(refused: Refused, words: list[str], message: str) -> None:
    write("bad", [*SOURCE[:3], "<b>abcd</i></b>"])
    write("tagged", TAGGED)
    write("usfm", ["a", "a", "a", r"\v 1 \nd a"])
    write("xliff", [*SOURCE[:3], '<pc id="1">abcd'])
    write("short", TARGET[:2])
    refused(message, "transfer-tags", *words)
    if not any(word.startswith("--out") for word in words):
        refused(message, "transfer-tags", *words, "--out=out")


def test_bad_lines_may_stay_empty(run: Printed) -> None:
    write("fr", ["<b>a", *SOURCE[1:3], SOURCE[3]])
    found, told = run("fr", "en", *ONE, "--bad-lines=empty")
    assert (found[0], found[2]) == ("", "")
    assert all(found[index] for index in (1, 3))
    assert told[0].startswith("fr, line 1: got '<b>' at character 1, which nothing closes; expected tags in pairs")
    assert told[1:] == ["4 lines; 1 bad lines"]
    found, told = run("fr", "en", *ONE, "--bad-lines=empty", "--max-words=4")
    assert found == ["", "", "", ""]
    assert told[-1] == "4 lines; 3 bad lines"
