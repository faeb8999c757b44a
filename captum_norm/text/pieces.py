"""How tokenizers write their tokens: characters that stand for bytes, marks of where words begin or end."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["BYTE_CHARACTERS", "Pieces", "Span", "character_of_bytes", "is_markup"]

Span = tuple[int, int]
"""The first character of a piece of text, and the one behind its last."""

Scheme = Literal["sentencepiece", "byte-level", "wordpiece", "plain"]

_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]]+\]")
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def _byte_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_CHARACTERS: Mapping[str, int] = MappingProxyType(_byte_characters())
"""GPT-2's characters for the 256 bytes: printable ones are themselves, the others are numbered from U+0100."""


@dataclass(frozen=True)
class Pieces:
    """Tokens, and the UTF-8 text of each, with a space before what begins a word if the scheme tells."""

    tokens: Sequence[str]
    special: Sequence[bool]
    scheme: Scheme
    surfaces: Sequence[bytes]

    @classmethod
    def of(cls, tokens: Sequence[str], special: Sequence[bool], *, byte_level: bool | None = None) -> "Pieces":
        """Tell how tokens are written, by their marks; ``byte_level`` if the tokenizer says so itself."""
        ordinary = [token for token, flag in zip(tokens, special, strict=True) if not flag]
        scheme: Scheme
        if byte_level or (byte_level is None and _are_bytes(ordinary)):
            scheme = "byte-level"
        elif any("▁" in token for token in ordinary):
            scheme = "sentencepiece"
        elif any(token.startswith("##") and len(token) > 2 for token in ordinary):
            scheme = "wordpiece"
        else:
            scheme = "plain"
        surfaces = [
            token.encode() if flag else _SURFACES[scheme](token) for token, flag in zip(tokens, special, strict=True)
        ]
        if scheme == "plain" and any(token.endswith(("@@", "</w>")) for token in ordinary):
            scheme, surfaces = "wordpiece", list(_by_ends(tokens))
        return cls(tokens, special, scheme, surfaces)

    def located(self, offsets: Sequence[Span] | None = None) -> tuple[str, list[Span]]:
        """Put the pieces together to a text, and return the characters of each."""
        data, places = b"", []
        for index, surface in enumerate(self.surfaces):
            follows = offsets is not None and index > 0 and offsets[index][0] == offsets[index - 1][1] > 0
            if self.special[index] or (self.scheme == "plain" and not follows):
                data += b" "
            own = surface.lstrip() if self.scheme == "wordpiece" and follows else surface
            places.append((len(data), len(data) + len(own)))
            data += own
        text = data.decode(errors="surrogateescape")
        owners = character_of_bytes(text)
        return text, [(owners[start], owners[end - 1] + 1 if end > start else owners[start]) for start, end in places]

    def shown(self, index: int) -> str:
        """The token as people write it; bytes that are no whole characters are spelled out."""
        if self.special[index]:
            return self.tokens[index]
        text = self.surfaces[index].decode(errors="backslashreplace")
        return text.strip() or "↵" * text.count("\n") or "␣"


def is_markup(token: str) -> bool:
    """Whether a token looks like a special one, such as ``<s>``, ``[SEP]`` or ``<|im_end|>``."""
    return _MARKUP.fullmatch(token) is not None and _FALLBACK.fullmatch(token) is None


def character_of_bytes(text: str) -> list[int]:
    """Return the character of each byte of a text's UTF-8, and one more for its end."""
    sizes = (len(character.encode(errors="surrogateescape")) for character in text)
    return [place for place, size in enumerate(sizes) for _ in range(size)] + [len(text)]


def _are_bytes(tokens: Sequence[str]) -> bool:
    """Whether tokens are written in GPT-2's characters for bytes."""
    text = "".join(tokens)
    if text.isascii() or any(character not in BYTE_CHARACTERS for character in text):
        return False
    if any(token.startswith(("Ġ", "Ċ")) for token in tokens):
        return True
    try:
        _byte_level(text).decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_level(token: str) -> bytes:
    known = all(character in BYTE_CHARACTERS for character in token)
    return bytes(BYTE_CHARACTERS[character] for character in token) if known else token.encode()


def _sentencepiece(token: str) -> bytes:
    fallback = _FALLBACK.fullmatch(token)
    return bytes.fromhex(fallback[1]) if fallback else token.replace("▁", " ").encode()


def _wordpiece(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") and len(token) > 2 else b" " + token.encode()


def _by_ends(tokens: Sequence[str]) -> Iterator[bytes]:
    """Yield pieces of BPE that marks the end of a word, ``</w>``, or of a piece inside one, ``@@``."""
    marks_words = any(token.endswith("</w>") for token in tokens)
    begins = True
    for token in tokens:
        ends = token.endswith("</w>") if marks_words else not token.endswith("@@")
        yield b" " * begins + token.removesuffix("</w>" if marks_words else "@@").encode()
        begins = ends


_SURFACES: Mapping[str, Callable[[str], bytes]] = {
    "byte-level": _byte_level,
    "sentencepiece": _sentencepiece,
    "wordpiece": _wordpiece,
    "plain": str.encode,
}
