"""What cannot be printed is spelled out, and files of text hold none of it."""

import csv
import io
import json
import sys
import unicodedata

import pytest

from captum_norm.characters import csv_records, csv_text, json_text, spelled_lines, spelled_out

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


def test_json_comes_back_as_it_was_and_holds_nothing_that_is_obeyed() -> None:
    content = {"".join(ALL[start : start + 5000]): [start, None, 0.5] for start in range(0, len(ALL), 5000)}
    content["".join(ALL[0xD7F0:0xE010:2])] = []  # no two halves of a pair beside each other
    text = json_text(content, indent=1)
    assert text.encode()
    assert not {unicodedata.category(character) for character in text if character != "\n"} & OBEYED
    found = json.loads(text)
    halves = {key for key in content if any("\ud800" <= character <= "\udfff" for character in key)}
    assert [value for key, value in found.items()] == list(content.values())
    assert found.keys() >= content.keys() - halves
    assert json_text({"é": "好 “\xa0” \\"}) == '{"é": "好 “\xa0” \\\\"}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text(float("nan"))


def test_csv_is_data() -> None:
    cells = ["=1+1", "+1", "-1", "@a", 'a"b', "a,b", "é", "\x1b\n\u202e", -0.5, None]
    [read] = csv.reader(io.StringIO(csv_text([cells])))
    assert read == ["=1+1", "+1", "-1", "@a", 'a"b', "a,b", "é", "\\x1b\n\\u202e", "-0.5", ""]
    assert csv_records([{"a": 1, "b\x1b": 2}, {"b\x1b": 3, "a": None}]) == "a,b\\x1b\n1,2\n,3\n"
