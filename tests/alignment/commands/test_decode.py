"""``norm-align decode``: matrices of Marian, CTranslate2 and our own decode to the links of ``extract``.

The fixtures follow the code that writes them: for Marian (marian-nmt/marian-dev) ``SoftAlignToString`` in
src/data/alignment.cpp, ``OutputPrinter::print`` in src/translator/output_printer.h and ``ScoreCollector`` in
src/rescorer/score_collector.cpp; a row for each target piece and ``</s>``, a column for each source piece and ``</s>``.
For CTranslate2 (OpenNMT/CTranslate2) ``EncoderDecoderReplica::run_translation`` in src/models/sequence_to_sequence.cc,
which drops the ends of sentence, and python/cpp/translation_result.cc.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from alignment import cli
from alignment.aligner import without_head
from alignment.fairseq.loading import load_shipped_model
from alignment.teacher_forcing import attention_maps, teacher_forced_batches
from captum_norm import AttentionWeights
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, lines, set_stdin, write, write_texts

Sentence = tuple[list[str], list[str], NDArray[Any]]


@pytest.fixture(autouse=True)
def _files() -> None:
    write_texts()


def marked(words: list[str], word_ids: list[int | None]) -> list[str]:
    """As many SentencePiece pieces of each word as its model has, without the end of sentence."""
    pieces = []
    for index, word in enumerate(words):
        count = word_ids.count(index)
        assert count <= len(word)
        pieces += [f"\u2581{word[0]}", *word[1 : count - 1], word[count - 1 :]] if count > 1 else [f"\u2581{word}"]
    assert len(pieces) == len(word_ids) - 1
    return pieces


@cache
def sentences() -> list[Sentence]:
    """The pieces of each pair without their ends, and the last layer's weights with the ends, heads averaged."""
    model, tokenizer = load_shipped_model("fr-en")
    pairs = [(source.split(), target.split()) for source, target in zip(FRENCH, ENGLISH, strict=True)]
    maps = attention_maps(AttentionWeights(without_head(model)), layers=[-1])
    answers: dict[int, Sentence] = {}
    for batch in teacher_forced_batches(model, tokenizer, pairs):
        for row, index in enumerate(batch.indices):
            source, target = batch.source[row], batch.target[row]
            weights = maps(batch)[row, 0, : len(target.ids), : len(source.ids)].numpy()
            words = pairs[index]
            answers[index] = marked(words[0], source.word_ids), marked(words[1], target.word_ids), weights
    return [answers[index] for index in range(len(pairs))]


def rows(weights: NDArray[Any]) -> str:
    """A soft alignment as Marian prints it, as floats of six digits, target by target."""
    return " ".join(",".join(f"{float(weight):.6g}" for weight in row) for row in weights)


def shown(pieces: list[str]) -> str:
    return " ".join(pieces)


def marian(source: list[str], target: list[str], weights: NDArray[Any]) -> str:
    del source
    return f"{shown(target)} ||| {rows(weights)}"


def with_scores(source: list[str], target: list[str], weights: NDArray[Any]) -> str:
    return f"{marian(source, target, weights)} ||| WordScores= -0.12345 -1.20000"


def n_best(source: list[str], target: list[str], weights: NDArray[Any]) -> str:
    return f"7 ||| {with_scores(source, target, weights)} ||| F0= -3.1 F1= -2 ||| -0.51"


def scorer(source: list[str], target: list[str], weights: NDArray[Any]) -> str:
    del source, target
    return f"-12.345678 ||| {rows(weights)}"


def ctranslate2(source: list[str], target: list[str], weights: NDArray[Any]) -> str:
    matrix = weights[:-1, :-1].tolist()
    return json.dumps({"source": source, "hypotheses": [target, ["no"]], "attention": [matrix, [[1.0]]], "scores": []})


def ctranslate2_with_ends(source: list[str], target: list[str], weights: NDArray[Any]) -> str:
    # Hugging Face's tokenizers give the ends of the source and the language as tokens, return_end_token the target's.
    matrix = np.insert(weights, 0, 0.0, axis=1).tolist()
    tokens = {"source": ["fra_Latn", *source, "</s>"], "target": [*target, "</s>"]}
    return json.dumps({**tokens, "attention": matrix})


RECIPES = ["hmm,combination=none", "mutual", "paper"]


def of_extract(capsys: pytest.CaptureFixture[str], setting: str, recipe: str) -> list[str]:
    """The links of ``extract`` by the same weights."""
    options = ["--method=weights", "--layer=-1", "--head=all", "--reverse-model=none", "--keep-sides"]
    assert cli.main(["extract", "fr", "en", "--out=expected", "--overwrite", *options, setting, recipe]) == 0
    capsys.readouterr()
    return lines("expected")


@pytest.mark.parametrize("setting", ["AWO", "AWI"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_matrices_of_other_tools_decode_to_the_links_of_extract(
    setting: str, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [f"--setting={setting}", f"--recipe={recipe}"]
    expected = of_extract(capsys, *options)
    assert sum(map(len, expected)) > 60
    write("sources", [shown(source) for source, _, _ in sentences()])
    write("both", [f"{shown(source)} ||| {shown(target)}" for source, target, _ in sentences()])
    tools: list[tuple[Callable[..., str], str | None]] = [
        (marian, "sources"),
        (with_scores, "sources"),
        (n_best, "sources"),
        (scorer, "both"),
        (ctranslate2_with_ends, None),
        *([(ctranslate2, None)] if setting == "AWO" and recipe != "paper" else []),
    ]
    for tool, text in tools:
        matrices = [tool(*sentence) for sentence in sentences()]
        write("matrices", matrices)
        words = ["decode", "matrices", *([text] if text else []), *options]
        assert cli.main([*words, "--out=links", "--overwrite"]) == 0
        assert lines("links") == expected, tool.__name__
        capsys.readouterr()
        set_stdin(monkeypatch, matrices)
        assert cli.main(["decode", "-", *words[2:]]) == 0
        assert capsys.readouterr().out.splitlines() == expected


def test_pieces_with_other_marks_make_words(capsys: pytest.CaptureFixture[str]) -> None:
    maps = [[0.9, 0.1, 0.0], [0.0, 0.2, 0.8]]
    sides = {
        "words": (["Häuser", "am", "See"], ["lake", "houses"]),
        "bpe": (["Häus@@", "er", "am", "See"], ["lake", "hou@@", "ses"]),
        "wordpiece": (["[CLS]", "Häus", "##er", "am", "See", "[SEP]"], ["lake", "hou", "##ses"]),
        "sentencepiece": (["▁H", "<0xC3>", "<0xA4>", "user", "▁am", "▁", "See"], ["</s>", "▁lake", "▁hou", "ses"]),
    }
    owners: dict[str, tuple[list[int | None], list[int | None]]] = {
        "words": ([0, 1, 2], [0, 1]),
        "bpe": ([0, 0, 1, 2], [0, 1, 1]),
        "wordpiece": ([None, 0, 0, 1, 2, None], [0, 1, 1]),
        "sentencepiece": ([0, 0, 0, 0, 1, 2, 2], [None, 0, 1, 1]),
    }
    matrices = []
    for name, (source, target) in sides.items():
        columns, targets = owners[name]
        matrix = [
            [0.0 if row is None or at is None else maps[row][at] / columns.count(at) for at in columns]
            for row in targets
        ]
        matrices.append(json.dumps({"source": source, "target": target, "attention": matrix}))
    write("matrices", matrices)
    assert cli.main(["decode", "matrices", "--format=tsv", "--recipe=mutual"]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {"Häuser am See\tlake houses\t0-0 2-1"}


def test_our_own_matrices_are_decoded_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["extract", "fr", "en", "--layer=0", "--reverse-model=none", "--no-lexicon"]
    assert cli.main([*options, "--format=matrix", "--out=own"]) == 0
    assert cli.main([*options, "--out=links"]) == 0
    own = Path("own").read_text(encoding="utf-8").splitlines()
    write("matrices", [*own, "null", ""])
    capsys.readouterr()
    assert cli.main(["decode", "matrices", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines("links"), "", ""]
    assert cli.main(["decode", "matrices", "--quiet", "--format=matrix"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry and entry["probabilities"] for entry in again] == [
        *(json.loads(line)["probabilities"] for line in own),
        None,
        None,
    ]
    assert cli.main(["decode", "matrices", "--quiet", "--recipe=hmm,min_probability=0.9"]) == 0
    assert 0 < len(capsys.readouterr().out.split()) < sum(len(line.split()) for line in lines("links"))


GOOD = json.dumps({"source": ["a", "b"], "target": ["x"], "attention": [[0.5, 0.5]]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x ||| 0.1,0.2,0.3,0.4", "got a matrix of 1 × 4 for 1 target and 2 source pieces"),
        ("x y z ||| 0.1,0.2", "got a matrix of 1 × 2 for 3 target and 2 source pieces"),
        ("x ||| 0.1,0.2 0.1", "inhomogeneous"),
        ("x ||| 0-0 1-0", "could not convert string to float: '0-0'"),
        ("x ||| nan,1", "NaN or infinity"),
        ("x ||| -1,1", "negative entry"),
        ("x", "could not convert"),
        ('{"attention": [[1, 1]]}', "got no target"),
        ('{"target": ["x"], "attention": [["a", 1]]}', "could not convert"),
        ('{"target": [1], "attention": [[1, 1]]}', "expected str instance, int found"),
        ('{"target": ["\\ud800"], "attention": [[1, 1]]}', "surrogates not allowed"),
        ('{"target": ["x y"], "attention": [[1, 1]]}', "expected"),
        ('{"target": ["x"]}', "got no attention"),
        ('{"target": ["x"], "attention": 1}', "expected"),
        ('{"target": {"x": 1}, "attention": [[1, {}]]}', "expected"),
        ("[" * 100_000 + "}", "recursion"),
        ('{"target": ["x"], "attention": [[1, 1', "could not convert"),
        ('{"target": ["x"]]}', "Expecting"),
        (b"\xe9 ||| 1,1", "got byte 0xe9"),
    ],
)
def test_a_hostile_line_is_named_in_one_sentence(
    line: str | bytes, message: str, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    write("text", ["a b", "a b"])
    write("matrices", ["x ||| 0.5,0.5", line])
    refused(message, "decode", "matrices", "text", "--quiet")
    capsys.readouterr()
    assert cli.main(["decode", "matrices", "text", "--bad-lines=empty", "--recipe=mutual", "--quiet"]) == 0
    assert capsys.readouterr() == ("0-0\n\n", "")
    write("matrices", ["x ||| 0.5,0.5", line])
    capsys.readouterr()
    assert cli.main(["decode", "matrices", "text"]) == 2
    assert "matrices, line 2: " in capsys.readouterr().err


def test_files_that_do_not_fit(refused: Refused) -> None:
    write("matrices", ["x ||| 0.5,0.5", "x ||| 0.5,0.5"])
    write("text", ["a b"])
    refused("expected equally many", "decode", "matrices", "text", "--quiet")
    refused("got no source", "decode", "matrices", "--quiet")
    refused("standard input can be read only once", "decode", "-", "-")
    write("good", [GOOD])
    refused("got scores and links that have no probabilities", "decode", "good", "--scores", "--recipe=mutual")
    refused("so nothing is counted", "decode", "good", "--save-lexicon=counts", "--no-lexicon")
    refused("cannot write good: it is the input", "decode", "good", "--out=good")


def test_a_text_is_its_own_lexicon(capsys: pytest.CaptureFixture[str]) -> None:
    write("sources", [shown(source) for source, _, _ in sentences()])
    write("matrices", [marian(*sentence) for sentence in sentences()])
    assert cli.main(["decode", "matrices", "sources", "--save-lexicon=counts", "--out=counted"]) == 0
    assert "hold corpus statistics" in capsys.readouterr().err
    assert cli.main(["decode", "matrices", "sources", "--use-lexicon=counts", "--scores"]) == 0
    assert capsys.readouterr().out.count(":") > 20


def test_a_stopped_run_goes_on(refused: Refused) -> None:
    good = [json.dumps({"source": ["a", "b"], "target": ["x"], "attention": [[0.5, 0.4]]})] * 5
    write("matrices", [*good, "broken"])
    words = ["decode", "matrices", "--block-lines=2", "--out=links"]
    assert cli.main(words) == 2
    assert Path("links.parts").is_dir()
    assert not Path("links").exists()
    refused('unfinished run with setting "AWO"', *words, "--bad-lines=empty", "--setting=AWI")
    assert cli.main([*words, "--bad-lines=empty"]) == 0
    assert lines("links") == ["0-0"] * 5 + [""]
