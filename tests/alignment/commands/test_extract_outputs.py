"""``norm-align extract``: scores, formats, and pages with the links that are written and gold links beside them."""

from pathlib import Path

import pytest

from alignment import cli
from alignment.aligner import WordAligner
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import Output
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, PAIRS, lines, write, write_texts
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
        (["--format=tsv"], Output("tsv")),
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
        (["--min-score=1.5"], "argument --min-score: got 1.5; expected a number from 0 to 1, such as 0.5"),
    ],
)
def test_scores_where_there_are_none(refused: Refused, words: list[str], message: str) -> None:
    refused(message, "extract", "fr", "en", "--layer=0", "--out=links", "--quiet", *words)


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
