"""Spells out unprintable characters, such as those that control a terminal."""

import unicodedata


def spelled_out(text: str) -> str:
    """Spell out unprintable characters: controls, direction marks, and every space but the usual one."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _spelled(c) for c in text)


def spelled_lines(text: str) -> str:
    """Spell out unprintable characters, but keep line feeds and spaces of all widths."""
    return text if text.isprintable() else "".join(c if _is_plain(c) else _spelled(c) for c in text)


def _is_plain(character: str) -> bool:
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
