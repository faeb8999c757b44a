"""Text as numbered lines, files that are no text, and what cannot be printed: spelled out, and in CSV and JSON."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from captum_norm import InvalidInputError
from captum_norm.results.tables import csv_records, csv_text, json_text
from captum_norm.text import lines as texts
from captum_norm.text.characters import spelled_lines, spelled_out
from captum_norm.text.lines import read_lines, read_text, scan_lines

COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_end_at_line_feeds_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix]("one\u2028still\x0cone\rstill\r\n\nthrée".encode()))
    expected = [(1, "one\u2028still\x0cone\rstill"), (2, ""), (3, "thrée")]
    assert list(read_lines(path)) == expected
    assert list(read_lines(str(path))) == expected


def test_streams_of_text_and_bytes_stay_open() -> None:
    for stream in (io.StringIO("a\nb"), io.BytesIO(b"a\nb\n")):
        assert list(read_lines(stream)) == [(1, "a"), (2, "b")]
        assert not stream.closed


def test_what_is_not_utf8_is_named_and_the_next_line_read(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"one\nd\xe9j\xe0\nthree\n")
    (_, one), (_, error), (_, three) = scan_lines(path)
    assert (one, three) == ("one", "three")
    assert str(error) == f"{path}, line 2: got byte 0xe9 at byte 2 of the line, expected UTF-8; convert the file"
    with pytest.raises(InvalidInputError, match="line 2: got byte 0xe9"):
        list(read_lines(path))
    stream = io.TextIOWrapper(io.BytesIO(b"d\xe9j\xe0\n"), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"cannot read <stream>: .utf-8. codec can't decode byte 0xe9"):
        list(read_lines(stream))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_compressed_file_that_is_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix](b"some words\n" * 100)[:-12])
    with pytest.raises(InvalidInputError, match=f"text{suffix}, line .* damaged or truncated"):
        list(read_lines(path))
    path.write_bytes(b"not compressed")
    with pytest.raises(InvalidInputError, match="damaged"):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix]("\ufeff0-0\n\ufeff1-1\n".encode()))
    assert list(read_lines(path)) == [(1, "0-0"), (2, "\ufeff1-1")]
    assert list(read_lines(io.StringIO("\ufeff0-0"))) == [(1, "0-0")]
    path.write_bytes(COMPRESS[suffix]("\ufeff".encode()))
    assert list(read_lines(path)) == []
    path.write_bytes(COMPRESS[suffix]("\ufeff\n".encode()))
    assert list(read_lines(path)) == [(1, "")]


def test_utf16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("0-0\n".encode("utf-16"))
    with pytest.raises(InvalidInputError, match=r"text, line 1: got byte 0xff at byte 1 of the line, expected UTF-8"):
        list(read_lines(path))
    path.write_bytes("0-0\n1-1\n".encode("utf-16-le"))
    lines = [line for _, line in scan_lines(path)]
    assert all("got the character NUL at character" in str(line) for line in lines)
    with pytest.raises(InvalidInputError, match="text: got the character NUL at character 2 of the file, as in UTF-16"):
        read_text(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for read in (read_text, lambda path: list(read_lines(path))):
        for name, reason in (("none", "there is no such file"), ("", "it is a folder"), ("a\0b", "null byte")):
            with pytest.raises(InvalidInputError, match=f"^cannot read .*: .*{reason}$"):
                read(tmp_path / name)
    with pytest.raises(InvalidInputError, match=r"^cannot read standard input: .*there is no such file$"):
        list(read_lines(tmp_path / "none", "standard input"))
    stream = (tmp_path / "text").open("wb+")
    stream.close()
    with pytest.raises(InvalidInputError, match=r"cannot read .*text: readline of closed file"):
        list(read_lines(stream))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(texts, "_LARGEST_TEXT", 1 << 20)
    with pytest.raises(InvalidInputError, match="line 1: got a longer line; expected lines of at most 1 MiB"):
        list(read_lines("/dev/zero"))
    with pytest.raises(InvalidInputError, match="/dev/zero"):
        read_text("/dev/zero")


def test_a_line_of_exactly_the_longest_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_LONGEST_LINE", 4)
    path = tmp_path / "text"
    path.write_bytes(b"abc\nabc")
    assert [line for _, line in read_lines(path)] == ["abc", "abc"]
    path.write_bytes(b"abcd\n")
    with pytest.raises(InvalidInputError, match="got a longer line"):
        list(read_lines(path))


ALL = [chr(code) for code in range(sys.maxunicode + 1)]
OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.long
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
        *(3 * (text,) for text in ("\u0645\u06cc\u200c\u0634", "👩\u200d👧")),
        ("a\u200db\u200c", "a\\u200db\\u200c", "a\\u200db\\u200c"),
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
        json_text(float("inf"))


def test_csv_is_data_and_nan_is_empty_or_null() -> None:
    nan = float("nan")
    assert json_text({"gain": (0.5, nan), "cells": [[nan], None]}) == '{"gain": [0.5, null], "cells": [[null], null]}\n'
    assert csv_text([[nan, 1]]) == ",1\n"
    cells = ["=1+1", "+1", "-1", "@a", 'a"b', "a,b", "é", "\x1b\n\u202e", -0.5, None]
    [read] = csv.reader(io.StringIO(csv_text([cells])))
    assert read == ["=1+1", "+1", "-1", "@a", 'a"b', "a,b", "é", "\\x1b\n\\u202e", "-0.5", ""]
    assert csv_records([{"a": 1, "b\x1b": 2}, {"b\x1b": 3, "a": None}]) == "a,b\\x1b\n1,2\n,3\n"
