"""Reads the lines of UTF-8 text files, compressed or not, and explains what is wrong with a file."""

import bz2
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from captum_norm.checks import quoted_name
from captum_norm.errors import InvalidInputError
from captum_norm.text.files import place_of

TextSource = str | PathLike[str] | IO[str] | IO[bytes]
"""A path or URL (``.gz``, ``.xz`` and ``.bz2`` are decompressed), or an open stream such as ``sys.stdin.buffer``, which
is not closed."""

COMPRESSED: Mapping[str, Callable[..., Any]] = MappingProxyType({".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open})
"""Functions that open compressed files, by suffix."""

_BOM = "\ufeff"
_NOTHING = (_BOM, _BOM.encode())  # an empty file, as some editors write it
_LONGEST_LINE = 1 << 26
_LARGEST_TEXT = 1 << 28
# One word with a suffix, or a path.
_FILE_NAME = re.compile(r"\S*[^\s.]\.[A-Za-z]\w{0,9}|(~|\.{1,2})?/\S+")
_REASONS: Mapping[type, str] = {FileNotFoundError: "there is no such file", IsADirectoryError: "it is a folder"}


def source_name(source: TextSource) -> str:
    """Return the name of a source for messages: its path, or the stream's name."""
    return os.fspath(source) if isinstance(source, str | PathLike) else str(getattr(source, "name", "<stream>"))


@contextmanager
def located(source: TextSource, number: int) -> Iterator[None]:
    """Prefix InvalidInputErrors in the context with the source's name and the line number, from 1."""
    try:
        yield
    except InvalidInputError as error:
        raise error_at(source, number, str(error)) from error.__cause__


def error_at(source: TextSource, number: int, message: str) -> InvalidInputError:
    """Create an error about a line, counted from 1."""
    return InvalidInputError(f"{source_name(source)}, line {number}: {message}")


def is_regular_file(path: str | PathLike[str]) -> bool:
    """Whether a path or URL is a regular file rather than a pipe or a device; InvalidInputError if it is not there."""
    with _reading(quoted_name(os.fspath(path))):
        kind, _ = place_of(path).status()
        if kind == "directory":
            raise IsADirectoryError
    return kind == "file"


def read_whole(path: str | PathLike[str]) -> bytes:
    """Read a regular file of at most 256 MiB."""
    called = quoted_name(os.fspath(path))
    if not is_regular_file(path):
        raise InvalidInputError(f"cannot read {called}: it is a pipe or a device")
    content = read_range(os.fspath(path), 0, _LARGEST_TEXT + 1)
    if len(content) > _LARGEST_TEXT:
        raise InvalidInputError(f"cannot read {called}: it has more than {_LARGEST_TEXT >> 20} MiB")
    return content


def read_text(source: str | PathLike[str] | IO[bytes], name: str | None = None) -> str:
    """Read a whole text of at most 256 MiB, such as a settings file, without a byte order mark."""
    called = source_name(source) if name is None else name
    with _reading(called):
        opened = place_of(source).open() if isinstance(source, str | PathLike) else nullcontext(source)
        with opened as stream:
            content = stream.read(_LARGEST_TEXT + 1)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{called}: {_not_utf8(error, 'file')}") from error
    if "\0" in text:
        raise InvalidInputError(f"{called}: {_nul(text, 'file')}")
    if len(content) > _LARGEST_TEXT:
        raise InvalidInputError(f"{called}: got a text of more than {_LARGEST_TEXT >> 20} MiB; expected a smaller one")
    return text.removeprefix(_BOM)


def text_of_file(argument: str, otherwise: str) -> str | None:
    """Read the text of the file that an argument names; None for a text, of which ``otherwise`` says how to pass it."""
    try:
        is_file = Path(argument).is_file()
    except (OSError, ValueError):  # an invalid name, or an unreadable folder
        is_file = False
    if is_file:
        return read_text(argument).replace("\r\n", "\n").replace("\r", "\n")
    if _FILE_NAME.fullmatch(argument) is None:
        return None
    raise InvalidInputError(f"cannot read {argument}: there is no such file; if it is the text itself, {otherwise}")


def read_lines(source: TextSource, name: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a text like :func:`scan_lines`, but raise for a line that is not UTF-8."""
    for number, line in scan_lines(source, name):
        if isinstance(line, InvalidInputError):
            raise line
        yield number, line


def scan_lines(
    source: TextSource, name: str | None = None, first: int = 1
) -> Iterator[tuple[int, str | InvalidInputError]]:
    """Yield the numbered lines, ended by line feeds alone, without their ends; one that is not UTF-8 as an error."""
    called = source_name(source) if name is None else name
    for number, line in enumerate(raw_lines(source, called, first), first):
        yield number, decoded(line, called, number)


def raw_lines(source: TextSource, name: str | None = None, first: int = 1) -> Iterator[str | bytes]:
    """Yield the lines of a text with their ends, at most 64 MiB each; strings if the source is a stream of text."""
    called = source_name(source) if name is None else name
    number = first
    with _reading(called), ExitStack() as stack:
        try:
            stream: Any = source
            if isinstance(source, str | PathLike):
                opener = COMPRESSED.get(suffix_of(source), nullcontext)
                stream = stack.enter_context(opener(stack.enter_context(place_of(source).open())))
            for number in count(first):
                line = stream.readline(_LONGEST_LINE)
                if not line or (number == 1 and line in _NOTHING):
                    return
                if len(line) == _LONGEST_LINE and line[-1] not in ("\n", ord("\n")):
                    expected = f"expected lines of at most {_LONGEST_LINE >> 20} MiB"
                    raise InvalidInputError(f"{called}, line {number}: got a longer line; {expected}")
                yield line
        except (OSError, EOFError, lzma.LZMAError, zlib.error, MemoryError) as error:
            # Errors that gzip and bz2 raise themselves have no errno.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            message = f"the compressed file is damaged or truncated ({error}); create it again"
            raise InvalidInputError(f"{called}, line {number}: {message}") from error


def decoded(line: str | bytes, called: str, number: int) -> str | InvalidInputError:
    """Decode a line of :func:`raw_lines`, without its line end and, in line 1, without a byte order mark."""
    if isinstance(line, bytes):
        try:
            line = line.decode()
        except UnicodeDecodeError as error:
            return InvalidInputError(f"{called}, line {number}: {_not_utf8(error, 'line')}")
    if "\0" in line:
        return InvalidInputError(f"{called}, line {number}: {_nul(line, 'line')}")
    if number == 1:
        line = line.removeprefix(_BOM)
    return line.removesuffix("\n").removesuffix("\r")


def plain_size(source: TextSource) -> int | None:
    """The size of a text in bytes, if its lines can be read by their position: an uncompressed regular file."""
    if not isinstance(source, str | PathLike) or suffix_of(source) in COMPRESSED or not is_regular_file(source):
        return None
    with _reading(quoted_name(os.fspath(source))):
        return place_of(source).status()[1]


def read_range(path: str, offset: int, size: int) -> bytes:
    """Read some bytes of a file at a path or URL; fewer if it ends before."""
    with _reading(quoted_name(path)):
        return place_of(path).read(offset, offset + size)


def suffix_of(source: str | PathLike[str]) -> str:
    """The suffix of a path or URL, such as ``.gz``."""
    return os.path.splitext(os.fspath(source))[1]  # noqa: PTH122  # URLs are no paths


def _not_utf8(error: UnicodeDecodeError, of: str) -> str:
    byte = f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
    return f"got {byte} of the {of}, expected UTF-8; convert the file"


def _nul(text: str, of: str) -> str:
    character = f"the character NUL at character {text.index(chr(0)) + 1} of the {of}"
    return f"got {character}, as in UTF-16 and in binary files, expected UTF-8; convert the file"


@contextmanager
def _reading(called: str) -> Iterator[None]:
    """Say in one sentence why something cannot be read."""
    try:
        yield
    except InvalidInputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if type(error) in _REASONS and reason in (error, os.strerror(getattr(error, "errno", None) or 0)):
            reason = _REASONS[type(error)]
        raise InvalidInputError(f"cannot read {called}: {reason}") from error
