"""``norm-align extract``: scores, formats, and pages with the links that are written and gold links beside them."""

from pathlib import Path

import numpy as np
import pytest

from alignment import cli
from alignment.aligner import WordAligner
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import Output
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, PAIRS, lines, set_stdin, write, write_texts
from tests.pages import content as content_of


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts()


def test_scores_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    sources, targets = ([line.split() for line in text] for text in (FRENCH, ENGLISH))
    aligner = WordAligner(*load_shipped_model("fr-en"), layer=0, head=2, recipe="hmm")
    found = aligner.align_scored(sources, targets)
    write("text", ["a |||", *PAIRS])
    words = ["extract", "text", "--layer=0", "--head=2", "--reverse-model=none", "--quiet"]
    for options, output in (
        (["--scores"], Output(scores=True)),
        (["--scores", "--min-score=0.9", "--format=naacl"], Output("naacl", scores=True, min_score=0.9)),
        (["--format=tsv", "--base=1"], Output("tsv", 1)),
        (["--format=matrix"], Output("matrix")),
    ):
        assert cli.main([*words, *options]) == 0
        rows = enumerate(zip(sources, targets, found, strict=True), 2)
        texts = [
            output.text(number, source, target, one.at_least(output.min_score))
            for number, (source, target, one) in rows
        ]
        printed, error = capsys.readouterr()
        assert printed == "".join([output.nothing(), *texts])
        assert error == ""
    kept = sum(len(one.at_least(0.9).links) for one in found)
    assert 0 < kept < sum(len(one.links) for one in found)
    assert cli.main([*words[:-1], "--min-score=0.9", "--out=links"]) == 0
    assert f"7 lines, {kept} links" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe=paper", "--scores"], "got scores and links that have no probabilities; use the recipe hmm"),
        (["--combine=union", "--min-score=0.5"], "got scores and links that have no probabilities"),
        (["--format=naacl", "--base=0"], "got base 0 for naacl, which counts from 1; leave it out"),
        (["--min-score=1.5"], "argument --min-score: got 1.5; expected a number from 0 to 1, such as 0.5"),
    ],
)
def test_scores_where_there_are_none(refused: Refused, words: list[str], message: str) -> None:
    refused(message, "extract", "fr", "en", "--layer=0", "--out=links", "--quiet", *words)


def test_arrays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write("text", ["a |||", *PAIRS])
    words = ["--layer=0", "--head=2", "--reverse-head=0", "--format=npz", "--quiet", "--block-lines=2"]
    assert cli.main(["extract", "text", *words, "--lexicon", "--out=counted.npz"]) == 0
    assert cli.main(["extract", "text", *words, "--out=links.npz"]) == 0
    set_stdin(monkeypatch, ["a |||", *PAIRS])
    assert cli.main(["extract", "-", *words, "--out=piped.npz"]) == 0
    assert Path("piped.npz").read_bytes() == Path("links.npz").read_bytes()
    for name in ("links", "counted"):
        with np.load(f"{name}.npz") as file:
            arrays = dict(file)
        sizes = [(len(target.split()), len(source.split())) for source, target in zip(FRENCH, ENGLISH, strict=True)]
        assert arrays["shapes"].tolist() == [[0, 0], *map(list, sizes)]
        assert arrays["corpus_statistics"].tolist() == [False, *[name == "counted"] * len(PAIRS)]
        assert arrays["links"][arrays["links"][:, 0] == 1, 1:].tolist() == [[n, n] for n in range(5)]
    names = {"fr", "en", "pairs", "text", "counted.npz", "links.npz", "piped.npz"}
    assert {path.name for path in Path().iterdir()} == names
    capsys.readouterr()
    for options, message in (
        (["--out=links.gz"], f"got {Path.cwd() / 'links.gz'} for npz; give the name of a .npz file"),
        ([], "got a stream for npz; give the name of a .npz file"),
    ):
        assert cli.main(["extract", "text", *words, *options]) == 2
        assert capsys.readouterr() == ("", f"norm-align: error: {message}\n")


MUTUAL = ("--recipe=mutual", "--head=all")


def test_a_page_has_the_links_written() -> None:
    assert cli.main(["extract", "pairs", *MUTUAL, "--layer=0", "--out=links", "--page=links.html", "--quiet"]) == 0
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
def test_gold_that_is_not_of_the_text_is_refused(refused: Refused, words: str, gold: str, message: str) -> None:
    write("gold", [gold])
    refused(message, "extract", "pairs", "--out=links", "--gold=gold", *words.split())
