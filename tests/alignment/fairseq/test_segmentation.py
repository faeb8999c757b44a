"""Words cut into pieces by SentencePiece and by BPE codes, and the search for these files."""

import io
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from subword_nmt.learn_bpe import learn_bpe

from alignment.fairseq.tokenizer import (
    SPECIAL,
    BPESegmenter,
    Dictionary,
    Segmenter,
    SentencePieceSegmenter,
    find_segmenter,
)
from captum_norm import InvalidInputError

TEXT = ["le débat est clos .", "la séance est ouverte .", "le vote aura lieu demain .", "la maison est petite ."] * 20
WORDS = ["la", "séance", "est", "clôturée", ",", "le", "☃", "aussi"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of SentencePiece of several kinds, and codes of subword-nmt."""
    path = tmp_path_factory.mktemp("codes")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "no_prefix": {"add_dummy_prefix": False},
        "bytes": {"byte_fallback": True, "vocab_size": 320},
        "suffix": {"treat_whitespace_as_suffix": True},
        "lower": {"normalization_rule_name": "nmt_nfkc_cf"},
    }
    for name, more in options.items():
        chosen: dict[str, Any] = {"model_type": "bpe", "vocab_size": 60, "minloglevel": 2} | more
        SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_prefix=str(path / name), **chosen)
    with (path / "bpe.codes").open("w", encoding="utf-8") as codes:
        learn_bpe(io.StringIO("\n".join(TEXT)), codes, 20)
    return path


def dictionary(*pieces: str) -> Dictionary:
    symbols = (*SPECIAL, *pieces)
    return Dictionary(symbols, {symbol: index for index, symbol in enumerate(symbols)})


@pytest.mark.parametrize("name", ["plain", "no_prefix", "bytes", "suffix", "lower"])
def test_sentencepiece_cuts_sentences_as_it_does_itself(folder: Path, name: str) -> None:
    segmenter = SentencePieceSegmenter(folder / f"{name}.model")
    pieces, ids = segmenter.cut(WORDS)
    assert pieces == SentencePieceProcessor(model_file=str(folder / f"{name}.model")).encode(
        " ".join(WORDS), out_type=str
    )
    assert [index for index, _ in itertools.groupby(ids)] == list(range(len(WORDS)))
    assert segmenter.join(pieces) == WORDS
    for index, word in enumerate(WORDS):
        mine = [piece for piece, owner in zip(pieces, ids, strict=True) if owner == index]
        assert segmenter.join(mine) == [word]
    assert segmenter.by_word == (name != "no_prefix")


def test_words_that_sentencepiece_normalises(folder: Path) -> None:
    for name in ("plain", "lower", "no_prefix"):
        pieces, ids = SentencePieceSegmenter(folder / f"{name}.model").cut(["½", "…", "La", "e\u0301"])
        assert [index for index, _ in itertools.groupby(ids)] == [0, 1, 2, 3], (name, pieces)


def test_words_without_pieces(folder: Path) -> None:
    assert SentencePieceSegmenter(folder / "plain.model").cut(["la", "\u200b", "la"])[1] == [0, 2]
    assert SentencePieceSegmenter(folder / "plain.model").cut([]) == ([], [])
    assert BPESegmenter(folder / "bpe.codes").cut([]) == ([], [])


def test_codes_of_subword_nmt(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    path.write_text("#version: 0.2\ne s\nd e\nes t</w>\n", encoding="utf-8")
    segmenter = BPESegmenter(path)
    pieces, ids = segmenter.cut(["est", "demande", "estest"])
    assert pieces == ["est", "de@@", "m@@", "a@@", "n@@", "d@@", "e", "es@@", "t@@", "est"]
    assert ids == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert segmenter.join(pieces) == ["est", "demande", "estest"]
    assert segmenter.join(["est@@"]) == ["est"]


def test_codes_of_versions_and_of_fastbpe(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    # Version 0.1 has no header and counts the end of a word as a piece; 0.2 and fastBPE join it to the last letter.
    for text, pieces in (
        ("a b\nab </w>\n", ["ab"]),
        ("#version: 0.2\na b</w>\n", ["ab"]),
        ("#version: 0.2\na b\n", ["a@@", "b"]),
        ("a b</w> 30\n", ["ab"]),
        ("a b 30\n", ["a@@", "b"]),
    ):
        path.write_text(text, encoding="utf-8")
        assert BPESegmenter(path).cut(["ab"])[0] == pieces, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b\nab\n", "line 2: got 'ab', expected the two pieces of a merge"),
        ("#version: 0.2\na b 30\n", "line 2: got 'a b 30'"),
        ("", "line 1: got ''"),
    ],
)
def test_codes_of_another_form_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "codes"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        BPESegmenter(path)


def test_files_of_another_kind_are_refused(tmp_path: Path, folder: Path) -> None:
    codes = Path(shutil.copy(folder / "plain.model", tmp_path / "codes"))
    with pytest.raises(
        InvalidInputError,
        match=r"codes: got byte .* the name of a SentencePiece model must end in \.model",
    ):
        BPESegmenter(codes)
    model = Path(shutil.copy(folder / "bpe.codes", tmp_path / "pieces.model"))
    with pytest.raises(InvalidInputError, match="is not a SentencePiece model"):
        SentencePieceSegmenter(model)


@pytest.mark.parametrize(("module", "file"), [("sentencepiece", "plain.model"), ("subword_nmt.apply_bpe", "bpe.codes")])
def test_a_package_that_is_missing_is_named(
    folder: Path, module: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    name = module.partition(".")[0].replace("_", "-")
    with pytest.raises(InvalidInputError, match=f"needs the package {name}: pip install {name}"):
        find_segmenter(folder, "fr", dictionary(), folder / file)


def test_the_search(tmp_path: Path, folder: Path) -> None:
    def found() -> object:
        return type(find_segmenter(tmp_path, "fr", dictionary("le", "@@"), None))

    assert found() is Segmenter
    shutil.copy(folder / "bpe.codes", tmp_path / "fr-en.bpe.codes")
    assert found() is BPESegmenter
    shutil.copy(folder / "plain.model", tmp_path / "spm.fr.model")
    (tmp_path / "spm.en.model").touch()
    with pytest.raises(InvalidInputError, match=r"several files .* of fr: fr-en.bpe.codes, spm.fr.model; give codes"):
        found()
    (tmp_path / "fr-en.bpe.codes").unlink()
    assert found() is SentencePieceSegmenter
    for name in ("code", "codes", "bpecodes", "codes.fr", "bpecodes.fr", "bpe_codes-fr.txt"):
        other = tmp_path / name
        other.mkdir()
        inside = Path(shutil.copy(folder / "bpe.codes", other / name))
        assert type(find_segmenter(other, "fr", dictionary(), None)) is BPESegmenter, inside


def test_codes_can_be_given(tmp_path: Path, folder: Path) -> None:
    marked = dictionary("l@@", "e")
    assert type(find_segmenter(folder, "fr", marked, folder / "bpe.codes")) is BPESegmenter
    assert type(find_segmenter(folder, "fr", marked, str(folder / "plain.model"))) is SentencePieceSegmenter
    assert type(find_segmenter(tmp_path, "fr", marked, False)) is Segmenter
    with pytest.raises(InvalidInputError, match=f"there is no file {tmp_path / 'codes'}"):
        find_segmenter(folder, "fr", marked, tmp_path / "codes")


@pytest.mark.parametrize("piece", ["l@@", "▁le"])
def test_pieces_without_codes_are_no_words(tmp_path: Path, piece: str) -> None:
    with pytest.raises(InvalidInputError, match=f"has pieces such as '{piece}', .* or codes=False"):
        find_segmenter(tmp_path, "fr", dictionary("e", piece), None)
