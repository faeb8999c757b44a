"""``norm-align extract --page``: the links that are written, and gold links beside them."""

from pathlib import Path

import pytest

from alignment import cli
from tests.alignment.commands.texts import FRENCH, PAIRS, lines, write, write_texts
from tests.pages import content as content_of

MUTUAL = ("--recipe=mutual", "--head=all")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts()


def test_a_page_has_the_links_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["extract", "pairs", *MUTUAL, "--layer=0", "--out=links", "--page=links.html", "--quiet"]) == 0
    del capsys
    examples = content_of(Path("links.html").read_text(encoding="utf-8"))["examples"]
    found = [{f"{source}-{target}" for target, source, _ in example["links"][0]["links"]} for example in examples]
    assert found == [set(line.split()) for line in lines("links")]
    assert [example["inputs"]["texts"] for example in examples] == [line.split() for line in FRENCH]


def test_a_page_leaves_out_improbable_links_as_the_file_does() -> None:
    words = ["--layer=0", "--head=2", "--reverse-head=0", "--min-score=0.9", "--quiet"]
    assert cli.main(["extract", "pairs", *words, "--out=links", "--page=links.html"]) == 0
    assert cli.main(["extract", "pairs", *words[:3], "--out=all", "--quiet"]) == 0
    examples = content_of(Path("links.html").read_text(encoding="utf-8"))["examples"]
    found = [{f"{source}-{target}" for target, source, _ in example["links"][0]["links"]} for example in examples]
    assert found == [set(line.split()) for line in lines("links")] != [set(line.split()) for line in lines("all")]


GOLD = {
    "talp": ("--gold-base=1", ["1-1 2p2", "", "1-1", "", "3-2", ""]),
    "naacl": ("--gold-format=naacl", ["1 1 1 S", "1 2 2 P", "3 1 1", "5 3 2 S"]),
    "alibi": ("--gold-format=alibi", ["a 0-0 1p1", "b", "c 0-0", "d", "e 2-1", "f"]),
    "swapped": ("--gold-base=0 --gold-swapped", ["0-0 1p1", "", "0-0", "", "1-2", ""]),
    "tsv": (
        "--gold-format=tsv",
        [
            f"{pair.replace(' ||| ', chr(9))}\t{links}"
            for pair, links in zip(PAIRS, ["0-0 1p1", "", "0-0", "", "2-1", ""], strict=True)
        ],
    ),
}


@pytest.mark.parametrize("name", GOLD)
def test_the_gold_links_on_a_page_are_those_of_their_lines(name: str) -> None:
    options, gold = GOLD[name]
    write("gold", gold)
    # The second line cannot be used, and the page leaves it out.
    text = [PAIRS[0], PAIRS[1] if name == "tsv" else "a |||", *PAIRS[2:]]
    write("text", text)
    words = [*MUTUAL, "--layer=0", "--out=links", "--page=p.html", "--quiet", *options.split()]
    assert cli.main(["extract", "text", "--gold=gold", *words]) == 0
    examples = content_of(Path("p.html").read_text(encoding="utf-8"))["examples"]
    found = [
        (example["inputs"]["texts"], example["links"][0]["sure"], example["links"][0]["possible"])
        for example in examples
    ]
    sure = [[[0, 0]], [], [[0, 0]], [], [[1, 2]], []]  # the target first
    possible = [[[0, 0], [1, 1]], *sure[1:]]
    rows = [(line.split(), *links) for line, *links in zip(FRENCH, sure, possible, strict=True)]
    assert found == (rows if name == "tsv" else [rows[0], *rows[2:]])


@pytest.mark.parametrize(
    ("words", "gold", "message"),
    [
        ("", "0-0", "got --gold without --page, which shows gold links; add --page FILE.html"),
        ("--page=p.html", "0-0", "talp files count from 0 or from 1; give --gold-base 0 or --gold-base 1"),
        ("--page=p.html --gold-base=0", "0-0", "gold: got 1 alignments, expected 6, as many as source sentences"),
        ("--page=p.html --gold-base=0", "0-9\n\n\n\n\n", "gold, line 1: got target index 9, expected 0 to 4"),
        ("--page=p.html --gold-format=tsv", "a\tb\t0-0", "gold: got 1 sentence pairs, the text has 6"),
        (
            "--page=p.html --gold-format=tsv",
            "\n".join("La maison\tb\t0-0" for _ in PAIRS),
            "gold, line 1: got the source 'La maison', but the text has 'La maison est petite .'",
        ),
    ],
)
def test_gold_that_is_not_of_the_text_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, gold: str, message: str
) -> None:
    write("gold", [gold])
    assert cli.main(["extract", "pairs", "--out=links", "--gold=gold", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"norm-align: error: {message}")
    assert error.count("\n") == 1
    assert not Path("links").exists()
    assert not Path("p.html").exists()
