"""``norm-align extract``: what the API gives, from files and pipes, interrupted and shared, bad lines included."""

from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment import cli, pipeline
from alignment.aligner import BidirectionalAligner, WordAligner, without_head
from alignment.commands import aligners, extract, models
from alignment.corpora import load_alibi
from alignment.encoder import EncoderAligner
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import Output, format_pharaoh
from alignment.huggingface import HuggingFaceTokenizer
from alignment.lexicon import Lexicon
from alignment.normalization import tokenize
from captum_norm import AttentionBlockAttribution, AttentionWeights, NormAttribution
from captum_norm.runs import Journal, RayBackend, cut
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import ENGLISH, FRENCH, PAIRS, lines, set_stdin, write, write_texts
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model, sentence_pieces
from tests.pages import content as content_of

MUTUAL = ("--recipe=mutual", "--head=all")

PAPER = "--recipe=paper"  # one model, and so the least work

LINKS = "0-0 1-1 2-2 3-3"  # of the first two pairs, with the recipe "mutual"


@pytest.fixture(autouse=True)
def _files() -> None:
    write_texts()


@pytest.mark.few
@pytest.mark.parametrize(
    ("words", "method", "options"),
    [
        ("--layer=1 --recipe=paper", "norm", {"layer": 1, "recipe": "paper"}),
        (
            "--layer=-1 --setting=AWO --method=weights --recipe=product --head=all --reverse-model=none",
            "weights",
            {"layer": -1, "setting": "AWO", "recipe": "product", "head": "all"},
        ),
        (
            "--layer=1 --recipe=product,decoder=argmax --reverse-model=none",
            "norm",
            {"layer": 1, "recipe": "product,decoder=argmax"},
        ),
        ("--recipe=product --reverse-model=none --add-similarity", "norm", {"recipe": "product"}),
        ("--layer=1 --head=2 --recipe=mutual", "norm", {"layer": 1, "head": 2, "recipe": "mutual"}),
        ("--layer=0 --scope=attn_res_ln --recipe=paper", "attn_res_ln", {"layer": 0, "recipe": "paper"}),
        ("--layer=0 --method=attention-block --recipe=mutual", "attention-block", {"layer": 0, "recipe": "mutual"}),
        (
            "--setting=auto --layer=highest-norm --head=auto --recipe=paper",
            "norm",
            {"setting": "auto", "layer": "highest-norm", "head": "auto", "recipe": "paper"},
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
    if "--add-similarity" in words:
        options = {**options, "similarity": EncoderAligner(model, tokenizer, source="embeddings", **options)}
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
    assert [line.split(",")[0] for line in told] == ["bad"] * (len(bad) - 1)  # a blank line is not bad
    assert [line.split(":")[0].split()[-1] for line in told] == ["2", "3", "4", "5", "6"]
    assert "got a target side without a word" in told[4]
    reasons = "2 unreadable, 1 with an empty side, 1 too long, 1 refused by the aligner"
    assert summary == f"8 lines, 8 links; 5 bad lines: {reasons}"
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
    text = ["", "a a a a a a a a a ||| b", "a |||", "|||", PAIRS[0], PAIRS[1], *PAIRS]
    write("text", text)
    assert cli.main(["extract", "text", "--max-words=8", "--block-lines=3", "--out=links", PAPER]) == 0
    set_stdin(monkeypatch, text)
    assert cli.main(["extract", "-", "--max-words=8", "--block-lines=3", PAPER]) == 0
    assert capsys.readouterr().out == Path("links").read_text(encoding="ascii")
    assert seen == [[(FRENCH[i].split(), ENGLISH[i].split()) for i in (0, 1)]] * 2


@pytest.mark.long
def test_a_run_is_continued_only_as_it_was_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["extract", "pairs", "--block-lines=2", PAPER]
    assert cli.main([*command, "--out=whole", "--quiet"]) == 0
    align = WordAligner.read_each
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def failing(aligner: WordAligner, pairs: Any) -> Any:
            if len(calls) == 2:
                raise KeyboardInterrupt
            calls.append(len(pairs))
            return align(aligner, pairs)

        patch.setattr(WordAligner, "read_each", failing)
        assert cli.main([*command, "--out=links", "--quiet"]) == 130
    assert capsys.readouterr().err == "norm-align: interrupted\n"
    assert not Path("links").exists()
    for words, name in (
        ([*MUTUAL], "recipe"),
        (["--layer=1"], "maps"),
        (["--method=weights"], "method"),
        (["--model=en-fr"], "model"),
        (["--max-tokens=100"], "max_tokens"),
        (["--max-words=9"], "max_words"),
    ):
        assert cli.main([*command, "--out=links", "--quiet", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"norm-align: error: {Path.cwd() / 'links.parts'} holds an unfinished run with {name} ")
        assert error.count("\n") == 1
    assert cli.main([*command, "--out=links"]) == 0
    assert "2 blocks are finished already" in capsys.readouterr().err
    assert lines("links") == lines("whole")


def test_workers_give_the_output_of_one_process(monkeypatch: pytest.MonkeyPatch, ray: RayBackend) -> None:
    """Of a TMX file, too, whose lines workers get with their blocks, and with a page, which one of them writes."""
    write("text", PAIRS * 5)
    write_tmx("text.tmx", list(zip(FRENCH, ENGLISH, strict=True)) * 5)
    cut_lines = list[bool]()

    def watched(*inputs: Any, **given: Any) -> Any:
        blocks = cut(inputs[:2], 2) if given["backend"] != "local" else ()
        cut_lines.extend(part.content is not None for block in blocks for part in block.parts)
        return pipeline.extract(*inputs, **given)

    monkeypatch.setattr(models, "extract", watched)
    for name, words in (("text", []), ("text.tmx", [f"--workers={ray.workers}"])):
        written = [f"--out={name}.links", f"--page={name}.html", f"--save-lexicon={name}.lexicon"]
        assert cli.main(["extract", name, *words, *written, "--block-lines=2", "--quiet"]) == 0
    assert lines("text.tmx.links") == lines("text.links")
    assert len(lines("text.links")) == 5 * len(PAIRS)
    assert Path("text.tmx.html").read_bytes() == Path("text.html").read_bytes()
    assert Path("text.tmx.lexicon").exists()
    assert len(cut_lines) == 2 * 15
    assert all(cut_lines)


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


def test_a_document_is_aligned_in_sections() -> None:
    story = load_alibi("master-cat")
    sides = [[word for words in side[:12] for word in words] for side in (story.sources, story.targets)]
    write("documents", [" ||| ".join(map(" ".join, sides)), PAIRS[0]])
    forward, reverse = (WordAligner(*load_shipped_model(name), layer=0, head=0) for name in ("fr-en", "en-fr"))
    aligner = BidirectionalAligner(forward, reverse)
    pairs = [(sides[0], sides[1]), (FRENCH[0].split(), ENGLISH[0].split())]
    found = aligner.align(*zip(*pairs, strict=True))
    assert len(aligner.cut(pairs)) > 10
    options = ["--layer=0", "--head=0", "--max-words=1000", "--quiet"]
    assert cli.main(["extract", "documents", *options, "--out=links", "--page=links.html"]) == 0
    assert lines("links") == [format_pharaoh(alignment) for alignment in found]
    examples = content_of(Path("links.html").read_text(encoding="utf-8"))["examples"]
    shown = [list(section.words[0]) for section in aligner.cut(pairs)]
    assert [example["inputs"]["texts"] for example in examples] == shown


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


@pytest.mark.parametrize("lexicon", ["--lexicon", "--no-lexicon"])
def test_a_page_has_the_links_of_the_file(lexicon: str) -> None:
    write("pairs", PAIRS * 2)
    blocks = f"--block-lines={len(FRENCH)}"  # the page has the first block
    words = ["--layer=0", "--head=2", "--reverse-head=0", lexicon, blocks, "--quiet"]
    assert cli.main(["extract", "pairs", *words, "--min-score=0.95", "--out=links", "--page=links.html"]) == 0
    assert cli.main(["extract", "pairs", *words, "--out=all", "--quiet"]) == 0
    examples = content_of(Path("links.html").read_text(encoding="utf-8"))["examples"]
    found = [{f"{source}-{target}" for target, source, _ in example["links"][0]["links"]} for example in examples]
    written, every = ([set(line.split()) for line in lines(name)][: len(FRENCH)] for name in ("links", "all"))
    assert found == written != every
    assert [example["inputs"]["texts"] for example in examples] == [line.split() for line in FRENCH]


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [["--layer=0", "--head=2", "--reverse-head=0"], [PAPER]], ids=["default", "paper"])
def test_links_appear_when_their_page_is_there(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["extract", "pairs", "--block-lines=2", *options]
    assert cli.main([*words, "--out=whole", "--page=whole.html", "--quiet"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(aligners, "page", interrupted)
        assert cli.main([*words, "--out=links", "--page=links.html", "--quiet"]) == 130
    assert {path.name for path in Path().glob("links*")} == {"links.parts"}
    capsys.readouterr()
    assert cli.main([*words, "--out=links", "--page=links.html"]) == 0
    assert "3 blocks are finished already" in capsys.readouterr().err
    assert lines("links") == lines("whole")
    assert Path("links.html").read_bytes() == Path("whole.html").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", interrupted)
        assert cli.main([*words, "--out=late", "--page=links.html", "--quiet"]) == 130
    assert cli.main([*words, "--out=late", "--page=other.html", "--quiet"]) == 2
    assert "late is complete, but " in capsys.readouterr().err


def counted(lexicon: str) -> int:
    return Lexicon.load(lexicon).sentence_pairs


def test_two_directions_by_default_and_a_lexicon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From files and through pipes, whole and interrupted, the links are those of the API."""
    sources, targets = ([line.split() for line in text] for text in (FRENCH, ENGLISH))
    forward, reverse = (WordAligner(*load_shipped_model(name)) for name in ("fr-en", "en-fr"))
    expected = BidirectionalAligner(forward, reverse).align(sources, targets)
    assert cli.main(["extract", "fr", "en", "--out=links"]) == 0
    assert lines("links") == list(map(format_pharaoh, expected))
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [f"forward: chose {forward.choice}", f"reverse: chose {reverse.choice}"]
    assert cli.main(["extract", "fr", "en", "--format=naacl", "--out=numbered", "--quiet"]) == 0
    numbers = [str(number) for number, links in enumerate(expected, 1) for _ in links.links]
    assert [line.split()[0] for line in lines("numbered")] == numbers
    each = BidirectionalAligner(forward, reverse, count_text=False).align(sources, targets)
    for words, text in ((["fr", "en", "--no-lexicon"], []), (["-"], PAIRS)):
        set_stdin(monkeypatch, text)
        assert cli.main(["extract", *words]) == 0
        output, error = capsys.readouterr()
        assert output.splitlines() == list(map(format_pharaoh, each))
        assert "corpus statistics" not in error
    heads = [aligner.choice.head for aligner in (forward, reverse) if aligner.choice]
    blocks = "--block-lines=4"  # the lexicon is of all of them
    words = ["--layer=0", f"--head={heads[0]}", f"--reverse-head={heads[1]}", blocks]
    written = list(map(format_pharaoh, expected))
    kept = ["--save-lexicon=counts"]
    finish = Lexicon.save
    with monkeypatch.context() as patch:
        patch.setattr(Lexicon, "save", interrupted)
        assert cli.main(["extract", "fr", "en", *words, *kept, "--out=links2", "--quiet"]) == 130
    assert not Path("counts").exists()
    assert Lexicon.save is finish
    Path("counts").touch()  # as if the run was killed after writing it
    assert cli.main(["extract", "fr", "en", *words, "--lexicon", "--save-lexicon=counts2", "--out=links2"]) == 2
    assert "links2.parts holds an unfinished run with save_lexicon" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # all blocks are finished: no model is run again
        patch.setattr(BidirectionalAligner, "map_each", None)
        assert cli.main(["extract", "fr", "en", *words, *kept, "--out=links2"]) == 0
    assert lines("links2") == written
    assert "the links hold corpus statistics" in capsys.readouterr().err
    assert (counted("counts"), Path("links2.parts").exists()) == (len(FRENCH), False)
    set_stdin(monkeypatch, PAIRS)
    assert cli.main(["extract", "-", *words, "--lexicon", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == written
    used = Lexicon.load("counts")
    expected = BidirectionalAligner(forward, reverse, lexicon=used, count_text=False).align(sources, targets)
    set_stdin(monkeypatch, PAIRS)
    assert cli.main(["extract", "-", *words, "--use-lexicon=counts", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == list(map(format_pharaoh, expected))
    both = ["--lexicon", "--use-lexicon=counts", "--save-lexicon=sums", "--reverse-model=none"]
    assert cli.main(["extract", "fr", "en", *words[:2], *both, "--out=links3", "--quiet"]) == 0
    alone = WordAligner(
        *load_shipped_model("fr-en"), layer=0, head=heads[0], recipe="hmm", lexicon=used, count_text=True
    )
    assert lines("links3") == list(map(format_pharaoh, alone.align(sources, targets)))
    assert (counted("sums"), counted("counts")) == (2 * len(FRENCH), len(FRENCH))


@pytest.mark.few
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reverse-model=fr-en"], "got a reverse model that translates fr–en beside a forward model that translates"),
        (["--model=en-fr", "--reverse-model=en-fr"], "got a reverse model that translates en–fr"),
        (["--reverse-model=none", "--combine=add"], "got --combine and only one model; give the other one with"),
        (["--recipe=paper", "--reverse-head=1"], "got --reverse-head and only one model"),
        (["--recipe=paper", "--reverse-model=en-fr", "--combine=add"], "got combine='add' and a recipe with a null"),
        (["--combine=union", "--lexicon"], "got a lexicon and combine='union', which makes no map of both"),
        (["--recipe=paper", "--lexicon"], "got a lexicon and a recipe with a null column"),
        (["--save-lexicon=counts", "--no-lexicon"], "got --save-lexicon and --no-lexicon, so nothing is counted"),
        (["--save-lexicon=counts", "--reverse-model=none", "--recipe=paper"], "got a lexicon and a recipe with a null"),
        (
            ["--recipe=hmn"],
            "argument --recipe: got the recipe 'hmn'; expected one of paper, mutual, sinkhorn, balanced",
        ),
        (["--recipe=hmm,jump=1"], "argument --recipe: got 'jump' in the recipe hmm,jump=1; expected one of null, "),
        (["--reverse-model=none", "--lexikon"], "unrecognized arguments: --lexikon; did you mean --lexicon?"),
        (["--use-lexicon=en"], "en is not a lexicon; give a file that --save-lexicon wrote"),
        (["--use-lexicon=none"], "cannot read none: there is no such file"),
        (["--lexicon", "--save-lexicon=pairs"], "pairs exists already; give another name"),
        (["--lexicon", "--save-lexicon=./links"], "got ./links for the links and for the lexicon; give two names"),
        (["--use-lexicon=pairs", "--out=./pairs", "--overwrite"], "cannot write ./pairs: it is the input"),
        (["--use-lexicon=en-fr.lexicon"], "got a lexicon of en–fr text for fr–en; count one with the sides in this"),
        (["--recipe=paper", "--scores"], "got scores and links that have no probabilities; use the recipe hmm"),
        (["--combine=union", "--min-score=0.5"], "got scores and links that have no probabilities"),
        (["--min-score=1.5"], "argument --min-score: got 1.5; expected a number from 0 to 1, such as 0.5"),
    ],
)
def test_directions_lexicons_and_scores_that_are_refused(refused: Refused, words: list[str], message: str) -> None:
    Lexicon(languages=("en", "fr")).save("en-fr.lexicon")
    refused(message, "extract", "fr", "en", "--layer=0", "--quiet", "--out=links", *words)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("mBART", ["de_DE", "en_XX"]),
        ("mBART-50", ["de_DE", "en_XX"]),
        ("M2M100", ["de", "en"]),
        ("NLLB", ["deu_Latn", "eng_Latn"]),
    ],
)
def test_a_multilingual_model_is_loaded_once_for_both_directions(
    name: str, codes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    tokenizer = family.tokenizer(Path())
    model = random_model(family, tokenizer)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    way = HuggingFaceTokenizer(tokenizer, source_language=codes[0], target_language=codes[1])
    forward, reverse = (WordAligner(model, one, layer=0, head="all") for one in (way, way.reversed()))
    write("pairs", [f"{source} ||| {target}" for source, target in zip(SOURCES, TARGETS, strict=True)])
    sides = ([line.split() for line in text] for text in (SOURCES, TARGETS))
    expected = list(map(format_pharaoh, BidirectionalAligner(forward, reverse, "multiply").align(*sides)))
    languages = [f"--source-language={codes[0]}", f"--target-language={codes[1]}"]
    words = ["extract", "pairs", "--model=model", "--layer=0", "--head=all", "--combine=multiply", "--quiet"]
    assert cli.main([*words, *languages]) == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert cli.main([*words, "--reverse-model=model", f"--source-language={codes[0]}"]) == 2
    assert "got the same model for both directions" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("options", [["--reverse-model=none"], []])
def test_exchanged_sides_are_refused(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aligners, "CHECKED", 30)
    story = load_alibi("blue-beard")
    sides = {"fr": story.sources[:30], "en": story.targets[:30]}
    for name, sentences in sides.items():
        write(name, map(" ".join, sentences))
    words = ["--layer=0", "--head=2", "--reverse-head=0"][: 3 - len(options)]
    assert cli.main(["extract", "en", "fr", "--out=links", *words, *options, "--quiet"]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("norm-align: error: got sides that look exchanged: ")
    assert not list(Path().glob("links*"))
    assert cli.main(["extract", "en", "fr", *words, *options, "--keep-sides", "--quiet"]) == 0
    assert cli.main(["extract", "fr", "en", *words, *options, "--quiet"]) == 0


def write_tmx(name: str, texts: Sequence[tuple[str, str]], *others: str) -> None:
    seg = '<tuv xml:lang="{}"><seg>{}</seg></tuv>'
    units = [f"<tu>{seg.format('en-GB', english)}{seg.format('fr', french)}</tu>" for french, english in texts]
    write(name, ['<tmx><header srclang="en-GB"/><body>', *units, *others, "</body></tmx>"])


def test_tab_separated_text_tmx_and_xliff(capsys: pytest.CaptureFixture[str]) -> None:
    texts = list(zip(FRENCH, ENGLISH, strict=True))
    write("tabs", [*map("\t".join, texts), ""])
    write_tmx("memory.tmx", texts, "<tu/>")
    units = [
        f"<trans-unit><source>{french}</source><target>{english}</target></trans-unit>" for french, english in texts
    ]
    write("text.xlf", ['<xliff><file source-language="fr" target-language="en">', *units, "</file></xliff>"])
    assert cli.main(["extract", "pairs", "--out=links", PAPER]) == 0
    for name, blank in (("tabs", [""]), ("memory.tmx", [""]), ("text.xlf", [])):
        assert cli.main(["extract", name, "--out=found", "--overwrite", PAPER]) == 0
        assert lines("found") == [*lines("links"), *blank]
        assert "; 0 bad lines" in capsys.readouterr().err
    assert cli.main(["inspect", "memory.tmx", "--format=json", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "null"
    assert cli.main(["extract", "text.xlf", "--model=en-fr"]) == 2
    assert "text.xlf is from fr to en, but the model translates en–fr; give the model of" in capsys.readouterr().err
    assert cli.main(["extract", "text.xlf", "--out=./text.xlf", "--overwrite"]) == 2
    assert "cannot write ./text.xlf: it is the input" in capsys.readouterr().err
    assert cli.main(["extract", "text.xlf", "fr"]) == 2
    assert "got text.xlf, which has both sides, and fr; give one of them" in capsys.readouterr().err


@pytest.mark.long
def test_python_and_the_command_align_alike() -> None:
    """With what both choose by themselves: recipe, layer, head, both directions, and the text as its own lexicon."""
    story = load_alibi("master-cat")
    sides = [list(map(" ".join, sentences)) for sentences in (story.sources, story.targets)]
    write("story.fr", sides[0])
    write("story.en", sides[1])
    assert cli.main(["extract", "story.fr", "story.en", "--out=links", "--quiet"]) == 0
    forward, reverse = (WordAligner(*load_shipped_model(name)) for name in ("fr-en", "en-fr"))
    found = BidirectionalAligner(forward, reverse).align(story.sources, story.targets)
    assert lines("links") == list(map(format_pharaoh, found))


@pytest.mark.parametrize(("asked", "on_ray"), [({}, False), ({"workers": 2}, True), ({"ray": "auto"}, True)])
def test_a_run_is_here_unless_workers_or_a_cluster_are_asked_for(asked: dict[str, Any], on_ray: bool) -> None:
    backend = extract.ExtractOptions(source="-", **{"ray": None, **asked}).backend()
    assert backend == (RayBackend(workers=asked.get("workers"), address=asked.get("ray")) if on_ray else "local")


def test_links_of_pieces_are_those_that_marian_reads(refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    # src/data/alignment.cpp of marian-nmt/marian-dev reads a line as source and target indices by turns, split at
    # spaces and hyphens, without weights, and adds the link of both ends of sentence, alone if the line is empty.
    sides = [
        sentence_pieces(Path(f"{side}.spm"), texts, vocab_size=size)
        for side, texts, size in (("source", FRENCH, 60), ("target", ENGLISH, 50))
    ]
    write("text", [*PAIRS, "", "a |||"])
    options = ["extract", "text", "--layer=0", "--no-lexicon"]
    assert cli.main([*options, "--out=links"]) == 0
    vocabularies = ["--pieces=source.spm", "--pieces=target.spm"]
    assert cli.main([*options, "--out=guided", *vocabularies]) == 0
    expected = []
    for pair, links in zip(PAIRS, lines("links"), strict=False):
        owners = []
        for model, text in zip(sides, pair.split(" ||| "), strict=True):  # Marian encodes whole sentences
            begun = accumulate(piece.startswith("\u2581") for piece in model.encode(text, out_type=str))
            owners.append([count - 1 for count in begun])
        words = {tuple(map(int, link.split("-"))) for link in links.split()}
        places = product(*map(enumerate, owners))
        expected.append([f"{i}-{j}" for (i, word), (j, other) in places if (word, other) in words])
    assert [line.split() for line in lines("guided")] == [*expected, [], []]
    assert sum(map(len, expected)) > sum(len(line.split()) for line in lines("links"))
    capsys.readouterr()
    assert cli.main([*options, *vocabularies, "--scores", "--format=tsv"]) == 0
    first = capsys.readouterr().out.splitlines()[0].split("\t")
    assert first[:2] == [
        " ".join(model.encode(text, out_type=str)) for model, text in zip(sides, PAIRS[0].split(" ||| "), strict=True)
    ]
    assert [link.split(":")[0] for link in first[2].split()] == expected[0]
    refused("got --pieces 3 times", *options, *vocabularies, "--pieces=source.spm")
    refused("there is no file nowhere", *options, "--pieces=nowhere")
    refused("the style matrix, which is of words", *options, *vocabularies, "--format=matrix")
    refused("got --pieces and --tokenize", *options, *vocabularies, "--tokenize")
    assert cli.main([*options, "--out=guided", "--overwrite", "--pieces=source.spm"]) == 0
    assert lines("guided")[: len(PAIRS)] != [" ".join(links) for links in expected]
    cuts = [
        str(extract._output(extract.ExtractOptions(source="-", pieces=[f"{side}.spm"])))
        for side in ("source", "source", "target")
    ]
    assert cuts[0] == cuts[1] != cuts[2]  # a run is continued with the same pieces alone
