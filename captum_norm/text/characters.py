"""Spells out unprintable characters, such as those that control a terminal."""

import unicodedata
from collections.abc import Callable

_JOINERS = "\u200c\u200d"


def spelled_out(text: str) -> str:
    """Spell out unprintable characters: controls, direction marks, and every space but the usual one."""
    return _spelled_but(str.isprintable, text)


def spelled_lines(text: str) -> str:
    """Spell out unprintable characters, but keep line feeds and spaces of all widths."""
    return _spelled_but(_is_plain, text)


def _spelled_but(kept: Callable[[str], bool], text: str) -> str:
    """Spell out what is not kept and no joiner behind a character of a script or an emoji that it shapes."""
    if text.isprintable():
        return text
    before = ["", *text[:-1]]
    return "".join(
        c if kept(c) or (c in _JOINERS and previous.isprintable() and not previous.isascii()) else _spelled(c)
        for previous, c in zip(before, text, strict=True)
    )


def _is_plain(character: str) -> bool:
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
