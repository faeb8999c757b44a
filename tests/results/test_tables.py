"""CSV and JSON are data: they come back as they were, hold no control characters, and have no NaN."""

import csv
import io
import json
import unicodedata

import pytest

from captum_norm.results.tables import csv_records, csv_text, json_text
from tests.text.test_lines import ALL, OBEYED


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
