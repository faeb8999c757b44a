"""Tokens and numbers as they are shown."""

import pytest

from captum_norm.show.text import check_length, formatted, printable, shortened


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("##ing", "##ing"),
        ("語", "語"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb", "a\\x0ab"),
        ("\u202eabc", "\\u202eabc"),
        ("\U000e0041", "\\U000e0041"),
        ("", "∅"),
    ],
)
def test_printable(token: str, shown: str) -> None:
    assert printable(token) == shown


def test_shortened() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([0.5, 0.25], ["0.5000", "0.2500"]),
        ([123.456, 1.0], ["123.5", "1.0"]),
        ([54321.0, 2.0], ["54321", "2"]),
        ([0.00123456], ["0.001235"]),
        ([0.0, 0.0], ["0.0000", "0.0000"]),
        ([], []),
    ],
)
def test_formatted(scores: list[float], shown: list[str]) -> None:
    assert formatted(scores) == shown


def test_lengths_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match="2 tokens do not fit scores of 3"):
        check_length(["a", "b"], 3, "scores")
