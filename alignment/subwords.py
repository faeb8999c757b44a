"""Finds the word that each piece belongs to.

Word ids are a list with one entry per piece: the index of its word, or None for a special token.
``word_ids_from_pieces`` and ``word_ids_from_offsets`` match the pieces' text against the words' text; they strip a
tokenizer's marks and never rely on them. If a tokenizer can be run word by word, ``encode_words`` is enough.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from captum_norm import InvalidInputError

_UNKNOWN = "<unk>"


def sentencepiece_text(piece: str) -> bytes:
    """The UTF-8 text of a SentencePiece piece, without mark or byte fallback: ``▁der``, ``<0xC3>``."""
    fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(fallback[1]) if fallback else piece.replace("\u2581", " ").encode()


Piece = TypeVar("Piece")


def encode_words(words: Iterable[str], encode_one: Callable[[str], Sequence[Piece]]) -> tuple[list[Piece], list[int]]:
    """Encode a sentence word by word; return its pieces and their word ids.

    ``encode_one`` turns a word into its pieces or their ids, without special tokens. The word ids are certain, but a
    tokenizer that looks beyond word boundaries may cut words differently in context.

    >>> encode_words(["ab", "c"], list)
    (['a', 'b', 'c'], [0, 0, 1])
    """
    encoded = [encode_one(word) for word in words]
    ids = [index for index, pieces in enumerate(encoded) for _ in pieces]
    return [piece for pieces in encoded for piece in pieces], ids


def word_ids_from_pieces(
    words: Sequence[str],
    pieces: Sequence[str],
    text_of: Callable[[str], bytes],
    *,
    normalize: Callable[[str], str] = str,
) -> list[int | None]:
    """The word id of each piece, found by matching the pieces' text against the words' text.

    A piece without text, such as a lone ``▁``, belongs to the next word, at the end to the last one. An unknown piece,
    ``<unk>``, covers as much of a word as the other pieces leave.

    Args:
        words: the words of the sentence; joined by spaces, they are the text that was tokenised.
        pieces: its pieces, in order, without special tokens.
        text_of: a piece -> the UTF-8 bytes of its text, without marks; bytes, because a piece may hold part of a
            character. White space in them is ignored.
        normalize: a word -> its text after the tokenizer's own normalisation (NFKC, lower case, ...).

    Raises:
        InvalidInputError: the texts differ, or a piece spans two words; the word of the mismatch is named.

    >>> pieces = ["Häus@@", "er", "am", "See"]
    >>> word_ids_from_pieces(["Häuser", "am", "See"], pieces, lambda piece: piece.removesuffix("@@").encode())
    [0, 0, 1, 2]
    """
    text = _Text([normalize(word) for word in words])
    # For each piece, the positions where it can end, with the earliest start; several for unknown pieces only.
    steps: list[dict[int, int]] = []
    reached: Collection[int] = [0]
    for piece in pieces:
        surface = None if piece == _UNKNOWN else _without_spaces(text_of(piece))
        step: dict[int, int] = {}
        for start in sorted(reached):
            for end in text.ends(start, surface):
                step.setdefault(end, start)
        if not step:
            raise text.mismatch(min(reached), f"the piece {piece!r}")
        steps.append(step)
        reached = step
    place = text.length
    if place not in reached:
        raise text.mismatch(min(reached), "no more piece")
    ids = []
    for step in reversed(steps):
        place = step[place]
        ids.append(text.word_at(place))
    return ids[::-1]


class _Text:
    """The words' UTF-8 text without white space, and the word of each byte."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        bare = [_without_spaces(word.encode()) for word in words]
        self.bytes = b"".join(bare)
        self.length = len(self.bytes)
        self._owners = [index for index, word in enumerate(bare) for _ in word]
        self._ends = list(accumulate(map(len, bare)))

    def word_at(self, place: int) -> int | None:
        """The word of this byte, past the end the last word; None if there is no text."""
        return self._owners[min(place, self.length - 1)] if self._owners else None

    def rest(self, place: int) -> bytes:
        """The rest of this byte's word, from the byte on."""
        return self.bytes[place : self._ends[self._owners[place]]] if place < self.length else b""

    def ends(self, start: int, surface: bytes | None) -> Iterable[int]:
        """The positions where a piece that starts here can end; None is the unknown piece."""
        rest = self.rest(start)
        if surface is None:
            return range(start + 1, start + len(rest) + 1)
        return [start + len(surface)] if rest.startswith(surface) else []

    def mismatch(self, place: int, observed: str) -> InvalidInputError:
        if place == self.length:
            return InvalidInputError(f"got {observed} after the last word, expected the end")
        word = self._owners[place]
        expected = f"expected {self.rest(place).decode(errors='replace')!r} of word {word} ({self.words[word]!r})"
        return InvalidInputError(f"got {observed}, {expected}; give the words that were tokenised")


def _without_spaces(text: bytes) -> bytes:
    return b"".join(text.split())


def word_ids_from_offsets(
    words: Sequence[str], offsets: Sequence[tuple[int, int]], special_mask: Sequence[int | bool]
) -> list[int | None]:
    """The word id of each piece, from the character offsets that a fast tokenizer returns.

    Args:
        words: the words; joined by single spaces, they are the text that was tokenised.
        offsets: start and end of each piece in that text (``return_offsets_mapping=True``); the space before a word
            may be part of its first piece.
        special_mask: 1 for special tokens (``return_special_tokens_mask=True``).

    Raises:
        InvalidInputError: the numbers of offsets and mask entries differ, an offset lies outside the text, a piece
            spans two words, or the last words have no piece, as after truncation.

    >>> word_ids_from_offsets(["ab", "c"], [(0, 1), (1, 2), (2, 4), (0, 0)], [0, 0, 0, 1])
    [0, 0, 1, None]
    """
    if len(offsets) != len(special_mask):
        raise InvalidInputError(
            f"got {len(offsets)} offsets and {len(special_mask)} mask entries, expected equally many"
        )
    text = " ".join(words)
    # A space belongs to the word after it.
    owners = [index for index, word in enumerate(words) for _ in range((index > 0) + len(word))]
    ids: list[int | None] = []
    covered = 0
    for (start, end), is_special in zip(offsets, special_mask, strict=True):
        if is_special:
            ids.append(None)
            continue
        if not 0 <= start <= end <= len(text):
            message = f"got offsets {start} to {end} in a text of {len(text)} characters"
            raise InvalidInputError(f"{message}; give the words that were tokenised, joined by single spaces")
        touched = sorted({owners[place] for place in range(start, end) if text[place] != " "})
        if len(touched) > 1:
            message = f"got the piece {text[start:end]!r}, which spans words {touched[0]} to {touched[-1]}"
            raise InvalidInputError(f"{message}, expected one word; encode the words one by one with encode_words")
        ids.append(touched[0] if touched else owners[start] if start < len(text) else len(words) - 1)
        covered = max(covered, end)
    if text[covered:].strip():
        word = owners[len(text) - len(text[covered:].lstrip())]
        message = f"got no piece from word {word} ({words[word]!r}) on"
        raise InvalidInputError(f"{message}, expected pieces for all {len(words)} words; turn truncation off")
    return ids
