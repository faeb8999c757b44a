"""Words to pieces and ids, and back: dictionaries, SentencePiece, BPE codes, and the search for their files."""

import io
import itertools
import pickle
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from subword_nmt.learn_bpe import learn_bpe

from alignment.fairseq import FairseqTokenizer
from alignment.fairseq.tokenizer import (
    SPECIAL,
    BPESegmenter,
    Dictionary,
    Segmenter,
    SentencePieceSegmenter,
    find_dictionary,
    find_segmenter,
    read_dictionary,
)
from alignment.subwords import encode_words
from alignment.tokenization import EncodedSentence, TranslationTokenizer
from captum_norm import InvalidInputError


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_ids_follow_the_lines(tmp_path: Path) -> None:
    # A line may hold any white space but a line break before the last space.
    path = write(tmp_path / "dict.fr.txt", "le 10\nl\u2028a 3\r\n\u00a0 2\n▁é 0\n")
    dictionary = read_dictionary(path, 8)
    assert dictionary.symbols == (*SPECIAL, "le", "l\u2028a", "\u00a0", "▁é")
    assert [dictionary.index(piece) for piece in ("le", "l\u2028a", "\u00a0", "▁é", "la")] == [4, 5, 6, 7, 3]


@pytest.mark.parametrize("piece", SPECIAL)
def test_text_never_becomes_a_special_symbol(tmp_path: Path, piece: str) -> None:
    assert read_dictionary(write(tmp_path / "dict.fr.txt", "le 10\n"), 5).index(piece) == 3


def test_a_later_line_overwrites_if_marked(tmp_path: Path) -> None:
    path = write(tmp_path / "dict.fr.txt", "a 3\nb 2\na 9 #fairseq:overwrite\n<unk> 9 #fairseq:overwrite\n")
    dictionary = read_dictionary(path, 8)
    assert dictionary.symbols == (*SPECIAL, "a", "b", "a", "<unk>")
    assert (dictionary.index("a"), dictionary.index("b")) == (6, 5)


def test_missing_padding_is_made_up(tmp_path: Path) -> None:
    path = write(tmp_path / "dict.fr.txt", "a 3\nmadeupword0001 0\nb 2\n")
    assert read_dictionary(path, 7).symbols[4:] == ("a", "madeupword0001", "b")
    assert read_dictionary(path, 8).symbols[7:] == ("madeupword0000",)
    further = read_dictionary(write(path, "a 3\nmadeupword0001 0\n"), 8).symbols[6:]
    assert further == ("madeupword0000", "madeupword0002")


@pytest.mark.parametrize("size", [5, 6, 9, 16])
def test_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "dict.fr.txt", "a 3\nb 2\nc 1\n")
    with pytest.raises(InvalidInputError, match=f"make 7 pieces, but the checkpoint's embedding has {size} rows"):
        read_dictionary(path, size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 3\nb\n", "line 2: got 'b', expected a piece, a space and its count"),
        ("a 3\nb two\n", "line 2: got 'b two'"),
        ("a 3\n\n", "line 2: got ''"),
        ("a 3\nb 2\na 1\n", "line 3: got the piece 'a' a second time"),
        ("</s> 3\n", "line 1: got the piece '</s>' a second time"),
    ],
)
def test_lines_of_another_form_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_dictionary(write(tmp_path / "dict.fr.txt", text), 8)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dict.fr.txt"
    path.write_bytes("é 3\n".encode("latin-1"))
    with pytest.raises(InvalidInputError, match="line 1: got byte 0xe9 at byte 1 of the line, expected UTF-8"):
        read_dictionary(path, 5)


def test_the_dictionary_of_the_language_goes_before_the_joint_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"found no dict\.fr\.txt in"):
        find_dictionary(tmp_path, "fr")
    joint = write(tmp_path / "dictionary.txt", "a 1\n")
    assert find_dictionary(tmp_path, "fr") == joint
    own = write(tmp_path / "dict.fr.txt", "a 1\n")
    assert find_dictionary(tmp_path, "fr") == own
    assert find_dictionary(tmp_path, "en") == joint


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
    processor = SentencePieceProcessor(model_file=str(folder / f"{name}.model"))
    assert pieces == processor.encode(" ".join(WORDS), out_type=str)
    assert [index for index, _ in itertools.groupby(ids)] == list(range(len(WORDS)))
    assert segmenter.join(pieces) == WORDS
    for index, word in enumerate(WORDS):
        mine = [piece for piece, owner in zip(pieces, ids, strict=True) if owner == index]
        assert segmenter.join(mine) == [word]
    assert segmenter.by_word == (name != "no_prefix")


def test_words_that_sentencepiece_normalises_or_has_no_piece_for(folder: Path) -> None:
    for name in ("plain", "lower", "no_prefix"):
        pieces, ids = SentencePieceSegmenter(folder / f"{name}.model").cut(["½", "…", "La", "e\u0301"])
        assert [index for index, _ in itertools.groupby(ids)] == [0, 1, 2, 3], (name, pieces)
    assert SentencePieceSegmenter(folder / "plain.model").cut(["la", "\u200b", "la"])[1] == [0, 2]
    assert SentencePieceSegmenter(folder / "plain.model").cut([]) == ([], [])
    assert BPESegmenter(folder / "bpe.codes").cut([]) == ([], [])


def test_codes_of_subword_nmt(tmp_path: Path) -> None:
    segmenter = BPESegmenter(write(tmp_path / "codes", "#version: 0.2\ne s\nd e\nes t</w>\n"))
    pieces, ids = segmenter.cut(["est", "demande", "estest"])
    assert pieces == ["est", "de@@", "m@@", "a@@", "n@@", "d@@", "e", "es@@", "t@@", "est"]
    assert ids == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert segmenter.join(pieces) == ["est", "demande", "estest"]
    assert segmenter.join(["est@@"]) == ["est"]


def test_codes_of_versions_and_of_fastbpe(tmp_path: Path) -> None:
    # Version 0.1 has no header and counts the end of a word as a piece; 0.2 and fastBPE join it to the last letter.
    for text, pieces in (
        ("a b\nab </w>\n", ["ab"]),
        ("#version: 0.2\na b</w>\n", ["ab"]),
        ("#version: 0.2\na b\n", ["a@@", "b"]),
        ("a b</w> 30\n", ["ab"]),
        ("a b 30\n", ["a@@", "b"]),
    ):
        assert BPESegmenter(write(tmp_path / "codes", text)).cut(["ab"])[0] == pieces, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b\nab\n", "line 2: got 'ab', expected the two pieces of a merge"),
        ("#version: 0.2\na b 30\n", "line 2: got 'a b 30'"),
        ("", "line 1: got ''"),
    ],
)
def test_codes_of_another_form_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BPESegmenter(write(tmp_path / "codes", text))


def test_files_of_another_kind_are_refused(tmp_path: Path, folder: Path) -> None:
    codes = Path(shutil.copy(folder / "plain.model", tmp_path / "codes"))
    with pytest.raises(InvalidInputError, match=r"codes: got byte .* name of a SentencePiece model must end in \.mo"):
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


class Letters(Segmenter):
    """One piece a letter; counts what it is asked."""

    by_word = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cut(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        self.asked += words
        return encode_words(words, list)

    def join(self, pieces: Sequence[str]) -> list[str]:
        return "".join(pieces).split("_")

    def digest(self) -> str:
        return type(self).__name__


class Whole(Letters):
    """Knows whole sentences only: a mark before every word but the first."""

    by_word = False

    def cut(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        pieces = [[*"_" * (index > 0), *word] for index, word in enumerate(words)]
        return encode_words(words, lambda _: pieces.pop(0))


def test_sides_have_their_own_languages_dictionaries_and_segmenters() -> None:
    tokenizer: TranslationTokenizer = FairseqTokenizer(
        ("fr", dictionary("a", "b"), Letters()), ("en", dictionary("ab", "c"), Segmenter())
    )
    words = ["ab", "c"]
    assert tokenizer.encode_source([words, []]) == [
        EncodedSentence([4, 5, 3, 2], [0, 0, 1, None]),
        EncodedSentence([2], [None]),
    ]
    assert tokenizer.encode_target([words]) == [EncodedSentence([4, 5, 2], [0, 1, None])]
    tokenizer = FairseqTokenizer(("fr", dictionary(), Segmenter()), ("en", dictionary(), Segmenter()))
    assert (tokenizer.source_language, tokenizer.target_language) == ("fr", "en")


def test_words_are_cut_once() -> None:
    letters = Letters()
    tokenizer = FairseqTokenizer(("fr", dictionary("a"), letters), ("en", dictionary(), Letters()))
    first, second = tokenizer.encode_source([["a", "aa"], ["aa", "a", "a"]])
    assert (first.ids, second.ids) == ([4, 4, 4, 2], [4, 4, 4, 4, 2])
    assert letters.asked == ["a", "aa"]
    assert pickle.loads(pickle.dumps(tokenizer)).encode_source([["a", "aa"]]) == [first]


def test_sentences_of_segmenters_that_need_them_whole() -> None:
    side = ("fr", dictionary("_", "a", "b"), Whole())
    [sentence] = FairseqTokenizer(side, side).encode_source([["ab", "b", "ab"]])
    assert sentence == EncodedSentence([5, 6, 4, 6, 4, 5, 6, 2], [0, 0, 1, 1, 2, 2, 2, None])


def test_ids_become_words() -> None:
    tokenizer = FairseqTokenizer(("fr", dictionary(), Segmenter()), ("en", dictionary("a", "b", "_"), Letters()))
    assert tokenizer.decode_target([2, 4, 5, 6, 3, 4, 2, 1, 1, 0]) == ["ab", "<unk>a"]
