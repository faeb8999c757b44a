"""Encodes words as ids and decodes ids into words for a fairseq model, by its dictionaries and its segmentation."""

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from alignment.subwords import encode_words, sentencepiece_text, word_ids_from_pieces
from alignment.tokenization import EncodedSentence, digest_of
from captum_norm import InvalidInputError
from captum_norm.checks import quoted
from captum_norm.text.lines import error_at, read_lines, read_text, read_whole

BOS, PAD, EOS, UNK = range(4)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""The symbols that every dictionary starts with; files do not list them."""

_OVERWRITE = "#fairseq:overwrite"


@dataclass(frozen=True, slots=True)
class Dictionary:
    """The pieces of one language.

    Attributes:
        symbols: the pieces in the order of their ids; the first four are ``<s> <pad> </s> <unk>``.
        indices: piece → id, the last one of a piece that is listed twice.
    """

    symbols: tuple[str, ...]
    indices: Mapping[str, int]

    def index(self, piece: str) -> int:
        """The id of a piece of text: ``<unk>``'s if it is not listed, or looks like one of the first three."""
        # Text must not become padding or end the sentence.
        return max(self.indices.get(piece, UNK), UNK)


def find_dictionary(data: Path, language: str) -> Path:
    """``dict.LANGUAGE.txt`` in a folder, or its ``dictionary.txt`` for all languages."""
    names = f"dict.{language}.txt", "dictionary.txt"
    for path in (data / name for name in names):
        if path.is_file():
            return path
    raise InvalidInputError(
        f"found no {names[0]} in {data}; give data=FOLDER, the folder that fairseq-preprocess wrote"
    )


def read_dictionary(path: Path, size: int) -> Dictionary:
    """Read a dictionary."""
    symbols = [*SPECIAL, *_pieces(path)]
    missing = size - len(symbols)
    if size % 8 == 0 and 0 < missing < 8:  # fairseq pads to a multiple of 8
        listed = set(symbols)
        names = (f"madeupword{index:04d}" for index in count())
        symbols += islice((name for name in names if name not in listed), missing)
    if len(symbols) != size:
        raise InvalidInputError(
            f"{path} and the special symbols make {len(symbols)} pieces, but the checkpoint's embedding has {size} "
            "rows; give the dictionaries that the model was trained with"
        )
    return Dictionary(tuple(symbols), {symbol: index for index, symbol in enumerate(symbols)})


def _pieces(path: Path) -> Iterable[str]:
    seen = set(SPECIAL)
    for number, line in read_lines(path):
        text = line.rstrip()
        piece, space, frequency = text.removesuffix(f" {_OVERWRITE}").rpartition(" ")
        if not space or not frequency.isdecimal():
            raise error_at(path, number, f"got {quoted(text)}, expected a piece, a space and its count")
        if piece in seen and not text.endswith(f" {_OVERWRITE}"):
            message = f"got the piece {quoted(piece)} a second time"
            raise error_at(path, number, f"{message}; mark the line with {_OVERWRITE} to replace the first")
        seen.add(piece)
        yield piece


StrPath = str | os.PathLike[str]
Codes = StrPath | tuple[StrPath, StrPath] | Literal[False] | None
"""What splits words: a file for both languages, one for each, nothing (False), or a file in the data folder (None)."""

_FIRST_VERSION = "#version: 0.1"  # the version of codes without a header
_VERSION = re.compile(r"#version:\s*(0\.[12])(?:\.0+)*\s*")

_MARK = re.compile("@@$|\u2581")
_CODES = {"code", "codes", "bpecodes"}


class Segmenter:
    """Splits words into pieces, and joins pieces into words; this one for words that are already pieces."""

    by_word = True
    """Whether a word has the same pieces in every sentence."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.digest()})"

    def cut(self, words: Sequence[str]) -> tuple[list[str], Sequence[int | None]]:
        """The pieces of a sentence, and the index of each piece's word."""
        return encode_words(words, self.pieces)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a word."""
        return [text]

    def join(self, pieces: Sequence[str]) -> list[str]:
        """The words that pieces form."""
        return list(pieces)

    def digest(self) -> str:
        """A hash of everything that determines the pieces."""
        return digest_of("none")


class SentencePieceSegmenter(Segmenter):
    """A SentencePiece model."""

    def __init__(self, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError as error:
            raise InvalidInputError(f"{path} needs the package sentencepiece: pip install sentencepiece") from error
        try:
            content = read_whole(path) or b"-"  # without any content, it would wait for some
            self._path, self._processor = path, SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{path} is not a SentencePiece model") from error
        # Without a dummy prefix, the pieces of all words but the first include the space before the word.
        self.by_word = self.pieces("a b") == self.pieces("a") + self.pieces("b")

    def cut(self, words: Sequence[str]) -> tuple[list[str], Sequence[int | None]]:
        """The pieces of a sentence, and the index of each piece's word; no piece crosses words."""
        if self.by_word:
            return super().cut(words)
        pieces = self.pieces(" ".join(words))
        return pieces, word_ids_from_pieces(words, pieces, sentencepiece_text, normalize=self._normalize)

    def join(self, pieces: Sequence[str]) -> list[str]:
        """The words that pieces form; byte-fallback pieces are decoded."""
        return b"".join(map(sentencepiece_text, pieces)).decode(errors="replace").split()

    def digest(self) -> str:
        """A hash of the model and the version of SentencePiece."""
        return digest_of(
            "sentencepiece", metadata.version("sentencepiece"), repr(self._processor.serialized_model_proto())
        )

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text."""
        pieces: list[str] = self._call(self._processor.encode, text, out_type=str)
        return pieces

    def _normalize(self, word: str) -> str:
        normal: str = self._call(self._processor.normalize, word)
        return normal.replace("\u2581", " ")

    def _call(self, method: Callable[..., Any], text: str, **options: Any) -> Any:
        try:
            return method(text, **options)
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"{self._path} is damaged: its pieces of {quoted(text)} are not UTF-8") from error


class BPESegmenter(Segmenter):
    """BPE codes of subword-nmt or fastBPE."""

    def __init__(self, path: Path) -> None:
        try:
            from subword_nmt.apply_bpe import BPE
        except ModuleNotFoundError as error:
            raise InvalidInputError(f"{path} needs the package subword-nmt: pip install subword-nmt") from error
        self._codes = _merges(path)
        self._bpe = BPE(io.StringIO(self._codes))

    def join(self, pieces: Sequence[str]) -> list[str]:
        """The words that pieces form."""
        return f"{' '.join(pieces)} ".replace("@@ ", "").split()

    def digest(self) -> str:
        """A hash of the codes and the version of subword-nmt."""
        return digest_of("subword-nmt", metadata.version("subword-nmt"), self._codes)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a word."""
        pieces: list[str] = self._bpe.segment_tokens([text])
        self._bpe.cache.clear()  # it is unbounded
        return pieces


def find_segmenter(
    data: Path, language: str, dictionary: Dictionary, codes: StrPath | Literal[False] | None
) -> Segmenter:
    """The segmenter of one language."""
    path = _find(data, language) if codes is None else Path(codes) if codes else None
    if path:
        return read_segmenter(path)
    marked = next((piece for piece in dictionary.symbols if len(piece) > 2 and _MARK.search(piece)), None)
    if codes is None and marked is not None:
        raise InvalidInputError(
            f"the dictionary of {language} has pieces such as {marked!r}, but {data} has no file to split words with; "
            "give codes=FILE, or codes=False if your words are already pieces"
        )
    return Segmenter()


def read_segmenter(path: Path) -> Segmenter:
    """The segmenter in a file: a SentencePiece model if its name ends so, else BPE codes."""
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; give codes=FILE, a SentencePiece model or BPE codes")
    return SentencePieceSegmenter(path) if path.suffix in (".model", ".spm") else BPESegmenter(path)


def _find(data: Path, language: str) -> Path | None:
    files = sorted(path for path in data.iterdir() if path.is_file())
    candidates = [path for path in files if path.suffix == ".model" or _parts(path.name) & _CODES]
    if len(candidates) > 1:
        candidates = [path for path in candidates if _parts(language) <= _parts(path.name)] or candidates
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates)
        raise InvalidInputError(f"{data} has several files to split words of {language}: {names}; give codes=FILE")
    return candidates[0] if candidates else None


def _parts(name: str) -> set[str]:
    return set(re.split(r"[\W_]+", name))


def _merges(path: Path) -> str:
    """The codes in the format of subword-nmt, checked here because its own reader exits the process on errors."""
    try:
        text = read_text(path)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}; the name of a SentencePiece model must end in .model or .spm") from error
    lines = text.rstrip("\n").split("\n")
    header = lines.pop(0) if lines[0].startswith("#version:") else None
    version = _VERSION.fullmatch(header or _FIRST_VERSION)
    if version is None:
        raise InvalidInputError(f"{path}, line 1: got {quoted(header)}, expected #version: 0.1 or #version: 0.2")
    header = header and f"#version: {version[1]}"
    if not lines:
        raise InvalidInputError(f"{path}: got no merge after the header, expected at least one")
    merges = []
    for number, line in enumerate(lines, 1 if header is None else 2):
        fields = line.strip("\r\n ").split(" ")
        counted = not header and len(fields) == 3 and fields[2].isdecimal()
        if not all(fields[:2]) or not (len(fields) == 2 or counted):
            raise error_at(path, number, f"got {quoted(line)}, expected the two pieces of a merge")
        merges.append((fields[:2], counted))
    # fastBPE marks the end of a word like version 0.2 of subword-nmt.
    if not header and any(counted for _, counted in merges):
        header = "#version: 0.2"
    return "\n".join([header or _FIRST_VERSION, *(" ".join(fields) for fields, _ in merges)]) + "\n"


_CACHED_WORDS = 100_000


class FairseqTokenizer:
    """The tokenizer of a fairseq translation model; a :class:`~alignment.tokenization.TranslationTokenizer`.

    Words are split one by one if their pieces do not depend on the sentence; pieces that are not in the dictionary
    become ``<unk>``. Both sides end with ``</s>``.

    Args:
        source: language, dictionary and segmenter of the source.
        target: language, dictionary and segmenter of the target.

    Attributes:
        source_language: the source language, as named in fairseq, such as ``fr``.
        target_language: the target language.

    >>> from alignment.fairseq.tokenizer import SPECIAL
    >>> symbols = (*SPECIAL, "das", "Haus")
    >>> dictionary = Dictionary(symbols, {symbol: index for index, symbol in enumerate(symbols)})
    >>> tokenizer = FairseqTokenizer(("de", dictionary, Segmenter()), ("en", dictionary, Segmenter()))
    >>> tokenizer.encode_source([["das", "alte", "Haus"]])
    [EncodedSentence(ids=[4, 3, 5, 2], word_ids=[0, 1, 2, None])]
    >>> tokenizer.decode_target([4, 3, 5, 2])
    ['das', '<unk>', 'Haus']
    """

    def __init__(self, source: tuple[str, Dictionary, Segmenter], target: tuple[str, Dictionary, Segmenter]) -> None:
        self.source_language, self.target_language = source[0], target[0]
        self._source, self._target = _Side(*source[1:]), _Side(*target[1:])

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode source sentences: the pieces that the encoder reads, and ``</s>``."""
        return [self._source.encode(words) for words in sentences]

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode target sentences: the pieces that the decoder emits, and ``</s>``."""
        return [self._target.encode(words) for words in sentences]

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """Decode emitted ids into words; ``<unk>`` is kept, other special symbols are dropped."""
        return self._target.decode(ids)

    def digest(self) -> str:
        """A hash of everything that determines the pieces: languages, dictionaries and segmenters."""
        sides = (self._source, self._target)
        parts = [part for side in sides for part in (side.segmenter.digest(), *side.dictionary.symbols)]
        return digest_of(self.source_language, self.target_language, *parts)


class _Side:
    """The tokenizer of one language."""

    def __init__(self, dictionary: Dictionary, segmenter: Segmenter) -> None:
        self.dictionary, self.segmenter = dictionary, segmenter
        self.encode_word = lru_cache(_CACHED_WORDS)(lambda word: self._ids(segmenter.cut([word])[0]))

    def __reduce__(self) -> tuple[type["_Side"], tuple[Dictionary, Segmenter]]:
        return _Side, (self.dictionary, self.segmenter)  # without the cache, which cannot be pickled

    def encode(self, words: Sequence[str]) -> EncodedSentence:
        if self.segmenter.by_word:
            ids, owners = encode_words(words, self.encode_word)
            return EncodedSentence([*ids, EOS], [*owners, None])
        pieces, word_ids = self.segmenter.cut(words)
        return EncodedSentence([*self._ids(pieces), EOS], [*word_ids, None])

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self.segmenter.join([self.dictionary.symbols[index] for index in ids if index >= UNK])

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [self.dictionary.index(piece) for piece in pieces]
