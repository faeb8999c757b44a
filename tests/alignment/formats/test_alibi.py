"""Lines that begin with a sentence id."""

import io
from pathlib import Path

import pytest

from alignment.formats import read_identified
from captum_norm import InvalidInputError


def named(name: str, content: str) -> io.StringIO:
    stream = io.StringIO(content)
    stream.name = name
    return stream


def test_texts_of_the_same_id_come_together(tmp_path: Path) -> None:
    path = tmp_path / "en"
    path.write_text("7\ta  house\nx y\t\n9\ta\ttab\n", encoding="utf-8")
    expected = [("une maison", "a  house"), ("", ""), ("là", "a\ttab")]
    assert read_identified(named("fr", "7\tune maison\nx y\t\n9\tlà\n"), path) == expected
    assert read_identified(path) == [(text,) for _, text in expected]
    assert read_identified(named("fr", ""), named("en", "")) == []


@pytest.mark.parametrize(
    ("french", "english", "message"),
    [
        ("0\ta\n1 b\n", "", r"fr, line 2: got '1 b', expected a sentence id, a tab and the text"),
        ("0\ta\n\n", "", r"fr, line 2: got '', expected a sentence id"),
        ("\ta\n", "", r"fr, line 1: got '\\ta', expected a sentence id"),
        ("0\ta\n1\tb\n0\tc\n", "", "fr, line 3: got the sentence id '0' again, expected each once"),
        ("0\ta\n1\tb\n", "0\tx\n2\ty\n", "en, line 2: got the sentence id '2', expected the sentence id '1', as in fr"),
        ("0\ta\n1\tb\n", "1\tx\n0\ty\n", "en, line 1: got the sentence id '1', expected the sentence id '0', as in fr"),
        ("0\ta\n1\tb\n", "0\tx\n", "en, line 2: got the end, expected the sentence id '1', as in fr"),
        ("0\ta\n", "0\tx\n1\ty\n", "en, line 2: got the sentence id '1', expected the end, as in fr"),
    ],
)
def test_errors_name_file_and_line(french: str, english: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        read_identified(named("fr", french), named("en", english))
