"""Describes how tokenizers mark their pieces, and recovers a piece's text without the marks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from captum_norm import InvalidInputError
from captum_norm.text.pieces import BYTE_CHARACTERS


@dataclass(frozen=True, slots=True)
class PieceScheme:
    """How a tokenizer writes its pieces.

    Attributes:
        surface: a piece -> the UTF-8 bytes of its text, without marks; bytes, because a piece may hold part of a
            character. White space in them is ignored.
        unknown: the piece for text outside the vocabulary, any part of one word; None if there is none.

    >>> PIECE_SCHEMES["sentencepiece"].surface("▁Haus")
    b' Haus'
    """

    surface: Callable[[str], bytes]
    unknown: str | None = None


def _sentencepiece_surface(piece: str) -> bytes:
    fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(fallback[1]) if fallback else piece.replace("\u2581", " ").encode()


def _byte_level_surface(piece: str) -> bytes:
    try:
        return bytes([BYTE_CHARACTERS[character] for character in piece])
    except KeyError as error:
        message = f"got {error.args[0]!r} in the piece {piece!r}, which byte-level BPE never writes; check the scheme"
        raise InvalidInputError(message) from None


PIECE_SCHEMES: Mapping[str, PieceScheme] = MappingProxyType(
    {
        "sentencepiece": PieceScheme(_sentencepiece_surface, unknown="<unk>"),
        "subword-nmt": PieceScheme(lambda piece: piece.removesuffix("@@").encode(), unknown="<unk>"),
        "end-of-word": PieceScheme(lambda piece: piece.removesuffix("</w>").encode(), unknown="<unk>"),
        "wordpiece": PieceScheme(lambda piece: piece.removeprefix("##").encode(), unknown="[UNK]"),
        "byte-level": PieceScheme(_byte_level_surface),
    }
)
"""The usual schemes by name.

SentencePiece with or without dummy prefix and byte fallback (``▁der``, ``<0xC3>``), subword-nmt (``der@@``), BPE with
end-of-word marks (``der</w>``), WordPiece (``##er``) and byte-level BPE (``Ġder``).
"""
