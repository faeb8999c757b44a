"""``norm-align extract`` with two directions, a lexicon, and exchanged sides."""

from pathlib import Path

import pytest
import torch

from alignment import cli
from alignment.aligner import BidirectionalAligner, WordAligner
from alignment.commands import aligners, extract
from alignment.corpora import load_alibi
from alignment.fairseq.loading import load_shipped_model
from alignment.formats import format_pharaoh
from alignment.huggingface import HuggingFaceTokenizer
from alignment.lexicon import Lexicon
from tests.alignment.commands.texts import ENGLISH, FRENCH, PAIRS, lines, set_stdin, write, write_texts
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def counted(lexicon: str) -> int:
    return Lexicon.load(lexicon).sentence_pairs


def test_two_directions_by_default_and_a_lexicon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From files and through pipes, whole and interrupted, the links are those of the API."""
    sources, targets = ([line.split() for line in text] for text in (FRENCH, ENGLISH))
    one = {name: WordAligner(*load_shipped_model(name), head="auto", recipe="hmm") for name in ("fr-en", "en-fr")}
    forward, reverse = one.values()
    expected = BidirectionalAligner(forward, reverse).align(sources, targets)
    assert cli.main(["extract", "fr", "en", "--out=links"]) == 0
    assert lines("links") == list(map(format_pharaoh, expected))
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [f"forward: chose {forward.choice}", f"reverse: chose {reverse.choice}"]
    heads = [aligner.choice.head for aligner in (forward, reverse) if aligner.choice]
    words = ["--layer=0", f"--head={heads[0]}", f"--reverse-head={heads[1]}"]
    expected = BidirectionalAligner(forward, reverse, count_text=True).align(sources, targets)
    written = list(map(format_pharaoh, expected))
    monkeypatch.setattr(extract, "_BLOCK_LINES", 4)  # the lexicon is of all blocks
    kept = ["--lexicon", "--save-lexicon=counts"]
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
    expected = BidirectionalAligner(forward, reverse, lexicon=used).align(sources, targets)
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
        (["--save-lexicon=counts"], "got --save-lexicon without --lexicon, so nothing is counted"),
        (["--use-lexicon=en"], "en is not a lexicon; give a file that --save-lexicon wrote"),
        (["--use-lexicon=none"], "cannot read none: No such file or directory"),
        (["--lexicon", "--save-lexicon=pairs"], "pairs exists already; give another name"),
        (["--lexicon", "--save-lexicon=./links"], "got ./links for the links and for the lexicon; give two names"),
        (["--use-lexicon=pairs", "--out=./pairs", "--overwrite"], "cannot write ./pairs: it is the input"),
        (["--use-lexicon=en-fr.lexicon"], "got a lexicon of en–fr text for fr–en; count one with the sides in this"),
    ],
)
def test_directions_and_lexicons_that_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    Lexicon(languages=("en", "fr")).save("en-fr.lexicon")
    before = sorted(path.name for path in Path().iterdir())
    assert cli.main(["extract", "fr", "en", "--layer=0", "--quiet", "--out=links", *words]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"norm-align: error: {message}")
    assert (error.count("\n"), len(error) < 420) == (1, True)
    assert sorted(path.name for path in Path().iterdir()) == before


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
    aligners = [
        WordAligner(
            model, HuggingFaceTokenizer(tokenizer, source_language=one, target_language=other), layer=0, recipe="hmm"
        )
        for one, other in (codes, codes[::-1])
    ]
    write("pairs", [f"{source} ||| {target}" for source, target in zip(SOURCES, TARGETS, strict=True)])
    sides = ([line.split() for line in text] for text in (SOURCES, TARGETS))
    expected = list(map(format_pharaoh, BidirectionalAligner(aligners[0], aligners[1], "multiply").align(*sides)))
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
