"""Spells out characters that a terminal would obey or nobody sees, in messages and in CSV and JSON."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NOT_PLAIN = re.compile("[^\n -~]")


def spelled_out(text: str) -> str:
    r"""A text with its unprintable characters (controls, direction marks, every space but the usual one) spelled out.

    Example:
        >>> spelled_out("a\x1b[31m\n\u202e")
        'a\\x1b[31m\\x0a\\u202e'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _spelled(c) for c in text)


def spelled_lines(text: str) -> str:
    r"""The same of a text of several lines, whose line feeds and spaces of all widths stay.

    Example:
        >>> spelled_lines("1\xa0000\n\x9b31m")
        '1\xa0000\n\\x9b31m'
    """
    return text if text.isprintable() else "".join(c if _is_plain(c) else _spelled(c) for c in text)


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    r"""Rows as CSV, unprintable characters spelled out.

    A cell is data, also where a spreadsheet would take it for a formula: it stays as it is, ``=`` in front included.

    Example:
        >>> csv_text([["token", "score"], ["=1\x1b", 0.5]])
        'token,score\n=1\\x1b,0.5\n'
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([spelled_lines(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return buffer.getvalue()


def csv_records(records: Sequence[Mapping[str, Any]]) -> str:
    r"""The same of records that have the names of the first one.

    Example:
        >>> csv_records([{"method": "norm", "gain": 0.5}])
        'method,gain\nnorm,0.5\n'
    """
    names = list(records[0])
    return csv_text([names, *([record.get(name) for name in names] for record in records)])


def json_text(content: Any, indent: int | None = None) -> str:
    r"""A value as JSON with a line feed behind it; what comes back when it is read is what went in.

    Example:
        >>> json_text({"é": "\u202e"}), json.loads(json_text("\u202e")) == "\u202e"
        ('{"é": "\\u202e"}\n', True)

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=indent)
    return _NOT_PLAIN.sub(lambda found: found[0] if _is_plain(found[0]) else json.dumps(found[0])[1:-1], text) + "\n"


def _is_plain(character: str) -> bool:
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
