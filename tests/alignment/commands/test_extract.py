"""``norm-align extract``: what the API gives, from files and pipes, interrupted and shared, bad lines included."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from alignment import cli
from alignment.aligner import WordAligner, without_head
from alignment.commands import extract
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import format_pharaoh
from alignment.normalization import tokenize
from captum_norm import AttentionBlockAttribution, AttentionWeights, NormAttribution
from captum_norm.runs import RayBackend
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, PAIRS, lines, set_stdin, write, write_texts

MUTUAL = ("--recipe=mutual", "--head=all")
PAPER = "--recipe=paper"  # one model, and so the least work
LINKS = "0-0 1-1 2-2 3-3"  # of the first two pairs, with the recipe "mutual"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts()


def test_from_two_files_to_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["extract", "fr", "en", *MUTUAL, "--out=links"]) == 0
    found = lines("links")
    assert found[:2] == [LINKS, LINKS]
    assert len(found) == len(FRENCH)
    count = sum(len(line.split()) for line in found)
    assert capsys.readouterr() == ("", f"chose AWI layer 0\n6 lines, {count} links; 0 bad lines\n")
    assert {path.name for path in Path().iterdir()} == {"fr", "en", "pairs", "links"}


@pytest.mark.parametrize(
    ("words", "method", "options"),
    [
        ("--layer=1 --recipe=paper", "norm", {"layer": 1}),
        ("--layer=-1 --setting=AWO --method=weights --recipe=paper", "weights", {"layer": -1, "setting": "AWO"}),
        ("--layer=1 --head=2 --recipe=mutual", "norm", {"layer": 1, "head": 2, "recipe": "mutual"}),
        ("--layer=0 --scope=attn_res_ln --recipe=paper", "attn_res_ln", {"layer": 0}),
        ("--layer=0 --method=attention-block --recipe=mutual", "attention-block", {"layer": 0, "recipe": "mutual"}),
        (
            "--setting=auto --layer=highest-norm --head=auto --recipe=paper",
            "norm",
            {"setting": "auto", "layer": "highest-norm", "head": "auto"},
        ),
    ],
)
def test_options_are_those_of_the_api(words: str, method: str, options: dict[str, Any]) -> None:
    model, tokenizer = load_shipped_model("fr-en")
    base = without_head(model)
    made: dict[str, Any] = {
        "norm": NormAttribution(base),
        "attn_res_ln": NormAttribution(base, scope="attn_res_ln"),
        "attention-block": AttentionBlockAttribution(base),
        "weights": AttentionWeights(base),
    }
    aligner = WordAligner(model, tokenizer, made[method], **options)
    expected = aligner.align([line.split() for line in FRENCH], [line.split() for line in ENGLISH])
    assert cli.main(["extract", "fr", "en", "--out=links", *words.split()]) == 0
    assert lines("links") == list(map(format_pharaoh, expected))


@pytest.mark.long
def test_pipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--setting=auto", *MUTUAL]
    assert cli.main(["extract", "fr", "en", "--out=links", *options]) == 0
    expected, chosen = Path("links").read_text(encoding="ascii"), capsys.readouterr().err.splitlines()[0]
    assert chosen.startswith("chose ")
    pipes: list[tuple[list[str], list[str]]]
    pipes = [(["-"], PAIRS), (["pairs"], []), (["-", "en"], FRENCH), (["fr", "-"], ENGLISH)]
    for words, piped in pipes:
        set_stdin(monkeypatch, piped)
        assert cli.main(["extract", *words, *options]) == 0
        output, error = capsys.readouterr()
        assert output == expected
        assert chosen in error.splitlines()
        set_stdin(monkeypatch, piped)
        assert cli.main(["extract", *words, *options, "--quiet", "--out=links", "--overwrite"]) == 0
        assert Path("links").read_text(encoding="ascii") == expected
        assert capsys.readouterr() == ("", "")


def test_bad_lines_stay_empty_or_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    bad: list[str | bytes]
    bad = [b"\xe9 ||| a", "a", "a ||| ", f"{'a ' * 9} ||| b", "le \u200b ||| \u200b", ""]
    write("bad", [PAIRS[0], *bad, PAIRS[1]])
    assert cli.main(["extract", "bad", "--layer=0", *MUTUAL, "--max-words=8", "--out=links"]) == 0
    assert lines("links") == [LINKS, *[""] * len(bad), LINKS]
    *told, summary = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in told] == ["bad"] * len(bad)
    assert [line.split(":")[0].split()[-1] for line in told] == ["2", "3", "4", "5", "6", "7"]
    assert "got a target side without a word" in told[4]
    reasons = "3 unreadable, 1 with an empty side, 1 too long, 1 refused by the aligner"
    assert summary == f"8 lines, 8 links; 6 bad lines: {reasons}"
    assert cli.main(["extract", "bad", "--layer=0", PAPER, "--out=other", "--bad-lines=stop"]) == 2
    assert capsys.readouterr().err.startswith("norm-align: error: bad, line 2: got byte 0xe9")
    assert not Path("other").exists()


@pytest.mark.parametrize("text", [[], ["", "a |||", "||| b"]])
def test_nothing_to_decide_on(text: list[str]) -> None:
    write("text", text)
    assert cli.main(["extract", "text", "--out=links", PAPER]) == 0
    assert lines("links") == [""] * len(text)


def test_the_first_block_with_a_usable_pair_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[tuple[Sequence[str], Sequence[str]]]] = []
    choose = WordAligner.choose

    def watched(aligner: WordAligner, pairs: Any) -> Any:
        if aligner.choice is None:
            seen.append([(list(source), list(target)) for source, target in pairs])
        return choose(aligner, pairs)

    monkeypatch.setattr(WordAligner, "choose", watched)
    monkeypatch.setattr(extract, "_BLOCK_LINES", 3)
    text = ["", "a a a a a a a a a ||| b", "a |||", "|||", PAIRS[0], PAIRS[1], *PAIRS]
    write("text", text)
    assert cli.main(["extract", "text", "--max-words=8", "--out=links", PAPER]) == 0
    set_stdin(monkeypatch, text)
    assert cli.main(["extract", "-", "--max-words=8", PAPER]) == 0
    assert capsys.readouterr().out == Path("links").read_text(encoding="ascii")
    assert seen == [[(FRENCH[i].split(), ENGLISH[i].split()) for i in (0, 1)]] * 2


def test_a_run_is_continued_only_as_it_was_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extract, "_BLOCK_LINES", 2)
    assert cli.main(["extract", "pairs", "--out=whole", "--quiet", PAPER]) == 0
    align = WordAligner.read_each
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def failing(aligner: WordAligner, pairs: Any, known: Any) -> Any:
            if len(calls) == 2:
                raise KeyboardInterrupt
            calls.append(len(pairs))
            return align(aligner, pairs, known)

        patch.setattr(WordAligner, "read_each", failing)
        assert cli.main(["extract", "pairs", "--out=links", "--quiet", PAPER]) == 130
    assert not Path("links").exists()
    for words, name in (
        ([*MUTUAL], "recipe"),
        (["--layer=1"], "maps"),
        (["--method=weights"], "method"),
        (["--model=en-fr"], "model"),
        (["--max-tokens=100"], "max_tokens"),
        (["--max-words=9"], "max_words"),
    ):
        assert cli.main(["extract", "pairs", "--out=links", "--quiet", PAPER, *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"norm-align: error: {Path.cwd() / 'links.parts'} holds an unfinished run with {name} ")
        assert error.count("\n") == 1
    assert cli.main(["extract", "pairs", "--out=links", PAPER]) == 0
    assert "2 blocks are finished already" in capsys.readouterr().err
    assert lines("links") == lines("whole")


def test_workers_give_the_output_of_one_process(monkeypatch: pytest.MonkeyPatch, ray: RayBackend) -> None:
    write("text", PAIRS * 5)
    monkeypatch.setattr(extract, "_BLOCK_LINES", 2)
    assert cli.main(["extract", "text", "--out=links", "--quiet", PAPER, f"--workers={ray.workers}"]) == 0
    assert cli.main(["extract", "text", "--out=alone", "--quiet", PAPER]) == 0
    assert lines("links") == lines("alone")
    assert len(lines("links")) == 5 * len(PAIRS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: SOURCE"),
        (["-", "-"], "got - more than once; standard input can be read only once"),
        (["none", "en"], "cannot read none: there is no such file"),
        (["fr", "en", "--out=none/links"], "cannot write none/links: there is no folder none"),
        (["fr", "en", "--out="], "cannot write a file without a name"),
        (["fr", "en", "--out=pairs", "--model=./none"], "pairs exists already; give another name, or replace it with"),
        (["fr", "en", "--out=links", "--model=./none"], "links.parts is in the way of "),
        (["-", "--page=p.html"], "got --page and a stream, which can be read only once; give files"),
        (["fr", "en", "--page=p.html", "--lexicon"], "got --page and --lexicon, whose links depend on the whole text"),
        (["fr", "pairs2", "--layer=0"], "fr, line 7: got no such line, but pairs2 has one"),
        (["pairs", "--layer=0", "--workers=2"], "got a stream; several workers need files or URLs as input and output"),
    ],
)
def test_what_is_refused_is_one_sentence(refused: Refused, words: list[str], message: str) -> None:
    write("pairs2", PAIRS * 2)
    write("links.parts", ["of the user"])
    refused(message, "extract", "--quiet", PAPER, *words)


def test_raw_text_in_small_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    raw = ["C’est l’heure.", "La maison est petite."], ["It is time.", "The house is small."]
    write("raw", [" ||| ".join(pair) for pair in zip(*raw, strict=True)])
    words = [[tokenize(text, "fr") for text in raw[0]], [tokenize(text, "en") for text in raw[1]]]
    aligner = WordAligner(*load_shipped_model("fr-en"), layer=0, head=2, recipe="hmm")
    links = aligner.align(*words)
    options = ["--layer=0", "--head=2", "--reverse-model=none", "--block-lines=1", "--quiet"]
    assert cli.main(["extract", "raw", *options, "--tokenize", "--format=tsv"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        [" ".join(source), " ".join(target), format_pharaoh(found)]
        for source, target, found in zip(*words, links, strict=True)
    ]
    assert rows[0][0].split()[:2] == ["C'", "est"]
    assert cli.main(["extract", "raw", "--model=model", "--tokenize", "--source-language=de"]) == 2
    assert "--tokenize is for the shipped models" in capsys.readouterr().err
