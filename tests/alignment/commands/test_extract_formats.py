"""``norm-align extract``: scores and formats."""

from pathlib import Path

import numpy as np
import pytest

from alignment import cli
from alignment.aligner import WordAligner
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import Output
from tests.alignment.commands.texts import ENGLISH, FRENCH, PAIRS, set_stdin, write, write_texts


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
def test_scores_where_there_are_none(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    before = sorted(path.name for path in Path().iterdir())
    assert cli.main(["extract", "fr", "en", "--layer=0", "--out=links", "--quiet", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"norm-align: error: {message}")
    assert error.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == before


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
