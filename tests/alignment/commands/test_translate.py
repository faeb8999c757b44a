"""``norm-align translate``: what the API gives line by line, columns, scores, raw text, and lines that are bad."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from alignment import cli
from alignment.aligner import WordAligner
from alignment.commands import translate as command
from alignment.fairseq import load_fairseq_checkpoint
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import format_pharaoh
from alignment.huggingface import HuggingFaceTokenizer
from alignment.normalization import normalize_words, tokenize
from alignment.translation import translate
from tests.alignment.commands.texts import ENGLISH, FRENCH, set_stdin, write
from tests.alignment.fairseq.small import SOURCE, TARGET, settings, weights, write_dictionary
from tests.alignment.translation_models import FAMILIES, SOURCES, random_model
from tests.pages import content as content_of

Run = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("fr", FRENCH)
    write("en", ENGLISH)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``translate`` and hands over the lines of standard output and of standard error."""

    def run(*words: str) -> tuple[list[str], list[str]]:
        assert cli.main(["translate", *words]) == 0
        output, error = capsys.readouterr()
        assert output.endswith("\n") or not output
        return output.split("\n")[:-1], error.splitlines()

    return run


@pytest.fixture(scope="module")
def translations() -> list[list[str]]:
    """What the model makes of the French sentences."""
    return translate(*load_shipped_model("fr-en"), [line.split() for line in FRENCH])


def test_lines_are_those_of_the_api(run: Run, translations: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(map(" ".join, translations))
    assert expected[1] == "the debate is closed ."
    assert run("fr") == (expected, ["6 lines; 0 bad lines"])
    monkeypatch.setattr(command, "_BLOCK_LINES", 2)
    set_stdin(monkeypatch, [*FRENCH[:3], "", " \t", *FRENCH[3:], ""])
    assert run("--quiet") == ([*expected[:3], "", "", *expected[3:], ""], [])


def test_options_reach_the_search(run: Run) -> None:
    model, tokenizer = load_shipped_model("en-fr")
    expected = translate(model, tokenizer, [line.split() for line in ENGLISH], beam=2, max_length=4)
    assert run("en", "--model=en-fr", "--beam=2", "--max-length=4")[0] == list(map(" ".join, expected))
    assert expected != translate(model, tokenizer, [line.split() for line in ENGLISH], beam=2)


def test_columns(run: Run, translations: list[list[str]]) -> None:
    model, tokenizer = load_shipped_model("fr-en")
    sources = [line.split() for line in FRENCH]
    aligner = WordAligner(model, tokenizer, setting="auto", recipe="mutual", head="auto")
    links = list(map(format_pharaoh, aligner.align(sources, translations)))
    texts = list(map(" ".join, translations))
    found, told = run("fr", "--alignments", "--setting=auto", "--recipe=mutual")
    assert found == [" ||| ".join(row) for row in zip(texts, links, strict=True)]
    assert told == [f"chose {aligner.choice}", "6 lines; 0 bad lines"]
    found, _ = run("fr", "--alignments", "--setting=auto", "--recipe=mutual", "--with-source")
    assert found == [" ||| ".join(row) for row in zip(FRENCH, texts, links, strict=True)]
    write("pairs", run("fr", "--with-source")[0])
    assert cli.main(["extract", "pairs", "--setting=auto", "--recipe=mutual", "--out=links"]) == 0
    assert Path("links").read_text(encoding="ascii").splitlines() == links


def test_a_page_has_the_links_printed(run: Run, translations: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
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
    run: Run, translations: list[list[str]], capsys: pytest.CaptureFixture[str]
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
    run: Run, translations: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ["\u200b"]
    monkeypatch.setattr("alignment.translation.translate", lambda *_, **__: [lost, translations[1]])
    write("two", FRENCH[:2])
    found, told = run("two", "--alignments", "--layer=0", "--recipe=mutual", "--head=all")
    assert found == ["\u200b ||| ", f"{' '.join(translations[1])} ||| 0-0 1-1 2-2 3-3"]
    assert told[0].startswith("two, line 1: got a target side without a word")
    assert told[1] == "2 lines; 1 bad lines"


def scores(hypotheses: list[str], references: list[str], tokenizer: str) -> list[str]:
    metrics = (BLEU(tokenize=tokenizer, force=True), CHRF())
    found = [metric.corpus_score(hypotheses, [references]) for metric in metrics]
    return [
        score.format(signature=metric.get_signature().format()) for score, metric in zip(found, metrics, strict=True)
    ]


def test_scores_are_those_of_sacrebleu(run: Run) -> None:
    raw = ["The house\u2019s small.", *ENGLISH[1:]]
    write("raw", raw)
    found, told = run("fr", "--references=raw", "--tokenize")
    normal = [" ".join(normalize_words(tokenize(line, "en"), "en")) for line in raw]
    assert normal[0] == "the house 's small ."
    assert told[-2:] == scores(found, normal, "none")
    assert told[-2].startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:")
    assert run("fr", "--references=en", "--quiet", "--bleu-tokenizer=char")[1] == scores(
        found, [line.lower() for line in ENGLISH], "char"
    )


def test_raw_text(run: Run) -> None:
    write("raw", ["L\u2019école est petite, n\u2019est-ce pas ?"])
    found, _ = run("raw", "--tokenize", "--with-source")
    assert found[0].startswith("L' école est petite , n' est-ce pas ? ||| ")
    assert (
        found[0].split(" ||| ")[1].split()
        == translate(*load_shipped_model("fr-en"), [["L'", "école", "est", "petite", ",", "n'", "est-ce", "pas", "?"]])[
            0
        ]
    )


def test_models_of_hugging_face(run: Run) -> None:
    family = FAMILIES["mBART"]
    torch.manual_seed(0)
    loaded = family.tokenizer(Path())
    model = random_model(family, loaded)
    model.save_pretrained("model")
    loaded.save_pretrained("model")
    write("de", SOURCES)
    tokenizer = HuggingFaceTokenizer(loaded)
    expected = translate(model, tokenizer, [line.split() for line in SOURCES], max_length=7)
    languages = ["--source-language=de_DE", "--target-language=en_XX"]
    found, told = run("de", "--model=model", "--max-length=7", "--references=de", *languages)
    assert found == list(map(" ".join, expected))
    assert any(found)  # of a random model a line may be empty
    assert told[-2:] == scores(found, SOURCES, "13a")
    links = WordAligner(model, tokenizer, layer=0, head="auto", recipe="hmm").align(
        [line.split() for line in SOURCES], expected
    )
    found, _ = run("de", "--model=model", "--max-length=7", "--alignments", "--layer=0", *languages)
    assert [line.partition("|||")[2].strip() for line in found] == list(map(format_pharaoh, links))


def test_checkpoints_of_fairseq(run: Run) -> None:
    torch.save({"model": weights(), "args": argparse.Namespace(**settings())}, "model.pt")
    write_dictionary(Path("dict.fr.txt"), SOURCE)
    write_dictionary(Path("dict.en.txt"), TARGET)
    write("words", ["word4 word9", "word5"])
    expected = translate(*load_fairseq_checkpoint("model.pt", "."), [["word4", "word9"], ["word5"]], max_length=6)
    found, _ = run("words", "--model=model.pt", "--data=.", "--max-length=6")
    assert found == list(map(" ".join, expected))
    assert all(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "cannot read none: there is no such file"),
        (["--references=-"], "got - more than once; standard input can be read only once"),
        (["fr", "--references=one"], "got 6 lines to translate and 1 references, expected equally many"),
        (["fr", "--references=empty"], "empty: got no line, expected references"),
        (["fr", "--references=latin1"], "latin1, line 1: got byte 0xe9"),
        (["fr", "--beam=0"], "argument --beam: got 0; expected a number from 1"),
        (["fr", "--bleu-tokenizer=x"], "argument --bleu-tokenizer: invalid choice: 'x'"),
        (["fr", "--alignments", "--layer=5"], "got layer 5; the model has 3"),
        (["fr", "--model=model.pt", "--data=.", "--tokenize"], "--tokenize is for the shipped models"),
    ],
)
def test_what_is_refused_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    torch.save({"model": weights(), "args": argparse.Namespace(**settings())}, "model.pt")
    write_dictionary(Path("dict.fr.txt"), SOURCE)
    write_dictionary(Path("dict.en.txt"), TARGET)
    write("empty", [])
    write("one", ["a"])
    write("latin1", [b"\xe9"])
    assert cli.main(["translate", *words]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"norm-align: error: {message}")
    assert error.count("\n") == 1


def test_references_of_a_pipe_are_counted_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, translations: list[list[str]]
) -> None:
    set_stdin(monkeypatch, FRENCH[:1])
    assert cli.main(["translate", "--references=en", "--quiet"]) == 2
    output, error = capsys.readouterr()
    assert output.split() == translations[0]
    assert error == "norm-align: error: got 1 lines to translate and 6 references, expected equally many\n"


def test_nothing_to_translate(run: Run) -> None:
    write("empty", [])
    assert run("empty", "--alignments") == ([], ["0 lines; 0 bad lines"])
