"""Unprintable characters are spelled out."""

import sys
import unicodedata

import pytest

from captum_norm.text.characters import spelled_lines, spelled_out

ALL = [chr(code) for code in range(sys.maxunicode + 1)]
OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_no_control_character_is_left() -> None:
    for character in ALL:
        obeyed = unicodedata.category(character) in OBEYED
        if obeyed or not character.isascii():  # the others are as they are
            shown, lines = spelled_out(character), spelled_lines(character)
            assert shown.isprintable()
            assert (lines == character) >= (shown == character)
            assert not obeyed or lines.isprintable() or character == "\n"
        else:
            assert spelled_out(character) == spelled_lines(character) == character


@pytest.mark.parametrize(
    ("text", "one", "several"),
    [
        ("plain é 好", "plain é 好", "plain é 好"),
        ("\x1b]8;;u\x07", "\\x1b]8;;u\\x07", "\\x1b]8;;u\\x07"),
        ("\x9b31m", "\\x9b31m", "\\x9b31m"),
        ("a\nb\tc\rd", "a\\x0ab\\x09c\\x0dd", "a\nb\\x09c\\x0dd"),
        ("\u202e\u200b\ufeff\u2028", "\\u202e\\u200b\\ufeff\\u2028", "\\u202e\\u200b\\ufeff\\u2028"),
        ("\U000e0041\udce9", "\\U000e0041\\udce9", "\\U000e0041\\udce9"),
        ("1\xa0000\u3000x", "1\\xa0000\\u3000x", "1\xa0000\u3000x"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_spelling(text: str, one: str, several: str) -> None:
    assert (spelled_out(text), spelled_lines(text)) == (one, several)
