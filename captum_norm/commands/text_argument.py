"""Reads the text argument of a command: the text itself, a file, or standard input."""

import argparse
import re
import sys
from pathlib import Path

from captum_norm.errors import InvalidInputError
from captum_norm.text.lines import read_text

# One word with a suffix, or a path.
_FILE_NAME = re.compile(r"\S*[^\s.]\.[A-Za-z]\w{0,9}|(~|\.{1,2})?/\S+")
_NOT_UNICODE = re.compile("[\ud800-\udfff\0]")


def add_text_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--text``."""
    parser.add_argument(
        "--text", dest="is_text", action="store_true", help="the argument is the text itself, even if it names a file"
    )


def given_text(argument: str, *, is_text: bool) -> str:
    """Read the text of an argument.

    Args:
        argument: ``-`` for standard input, the name of a file, or the text.
        is_text: whether the argument is the text, even if it looks like a file.

    Raises:
        InvalidInputError: the argument looks like a file that does not exist, or the file is unreadable or not UTF-8.

    Example:
        >>> given_text("A dog runs.", is_text=False)
        'A dog runs.'
    """
    if argument == "-" and not is_text:
        return _with_line_feeds(read_text(sys.stdin.buffer, "standard input"))
    if is_text or not _is_file(argument):
        # Bytes of an argument that are not UTF-8 become lone surrogates.
        if _NOT_UNICODE.search(argument):
            raise InvalidInputError("the text is not UTF-8; convert it")
        return argument
    return _with_line_feeds(read_text(argument))


def _is_file(argument: str) -> bool:
    """Whether the argument is a file; raises if it only looks like one."""
    try:
        if Path(argument).is_file():
            return True
    except (OSError, ValueError):  # an invalid name, or an unreadable folder
        pass
    if _FILE_NAME.fullmatch(argument) is None:
        return False
    raise InvalidInputError(f"cannot read {argument}: there is no such file; if it is the text itself, say --text")


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
