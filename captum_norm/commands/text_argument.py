"""Reads the text that a command is given: the argument itself, a file, or standard input."""

import argparse
import re
import sys
from pathlib import Path

from captum_norm.errors import InvalidInputError
from captum_norm.texts import read_text

# One word with a suffix, or a path.
_FILE_NAME = re.compile(r"\S*[^\s.]\.[A-Za-z]\w{0,9}|(~|\.{1,2})?/\S+")
_NOT_UNICODE = re.compile("[\ud800-\udfff\0]")


def add_text_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--text``."""
    parser.add_argument(
        "--text", dest="is_text", action="store_true", help="the argument is the text itself, even if it names a file"
    )


def given_text(argument: str, *, is_text: bool) -> str:
    """The text that an argument stands for.

    Args:
        argument: ``-``, which is standard input; the name of a file; or the text.
        is_text: whether it is the text, whatever it looks like.

    Raises:
        InvalidInputError: the argument looks like the name of a file and there is none, it cannot be read, or it is not
            UTF-8.

    Example:
        >>> given_text("A dog runs.", is_text=False)
        'A dog runs.'
    """
    if argument == "-" and not is_text:
        return _with_line_feeds(read_text(sys.stdin.buffer, "standard input"))
    if is_text or not _is_file(argument):
        # What cannot be decoded of an argument comes as lone surrogates.
        if _NOT_UNICODE.search(argument):
            raise InvalidInputError("the text is not UTF-8; convert it")
        return argument
    return _with_line_feeds(read_text(argument))


def _is_file(argument: str) -> bool:
    """Whether there is such a file; an error if there is none, and it looks like one."""
    try:
        if Path(argument).is_file():
            return True
    except (OSError, ValueError):  # no file has such a name, or its folder cannot be read
        pass
    if _FILE_NAME.fullmatch(argument) is None:
        return False
    raise InvalidInputError(f"cannot read {argument}: there is no such file; if it is the text itself, say --text")


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
