"""Text files as lines: UTF-8, ended by line feeds alone, compressed or not."""

import gzip
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedIOBase
from os import PathLike
from pathlib import Path
from typing import IO

from captum_norm import InvalidInputError

TextSource = str | PathLike[str] | IO[str] | IO[bytes]
"""A path (``.gz`` and ``.xz`` are decompressed) or an open stream such as ``sys.stdin.buffer``, which stays open."""


def split_words(sentence: str) -> list[str]:
    r"""The words of a tokenised sentence: what stands between spaces and tabs.

    Other white space, such as the no-break space of French, stays inside its word, as in the tools that made the gold
    alignments; ``str.split`` would shift every index after one.

    >>> split_words("15 h  , 1\u00a0000 francs")
    ['15', 'h', ',', '1\xa0000', 'francs']
    """
    return [word for word in sentence.replace("\t", " ").split(" ") if word]


def source_name(source: TextSource) -> str:
    """What messages call a source: its path, or the stream's name."""
    return os.fspath(source) if isinstance(source, str | PathLike) else str(getattr(source, "name", "<stream>"))


@contextmanager
def located(source: TextSource, number: int) -> Iterator[None]:
    """Puts the source's name and the line's number, counted from 1, before the message of an InvalidInputError."""
    try:
        yield
    except InvalidInputError as error:
        raise error_at(source, number, str(error)) from error.__cause__


def error_at(source: TextSource, number: int, message: str) -> InvalidInputError:
    """An error about one line, counted from 1."""
    return InvalidInputError(f"{source_name(source)}, line {number}: {message}")


def read_lines(source: TextSource) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text, without their ends; as ``scan_lines``, but a line that is not UTF-8 is raised."""
    for number, line in scan_lines(source):
        if isinstance(line, InvalidInputError):
            raise line
        yield number, line


def scan_lines(source: TextSource) -> Iterator[tuple[int, str | InvalidInputError]]:
    """The numbered lines of a text, without their ends; for one that is not UTF-8, the error that says so.

    Lines end at line feeds (a carriage return before one goes too), never at the other characters at which
    ``str.splitlines`` breaks: parallel files must not come apart at a U+2028 inside a sentence.

    Raises:
        InvalidInputError: a compressed file is damaged, or a stream of text (rather than of bytes) is not UTF-8;
            nothing can be read past that.
    """
    number = 0
    with ExitStack() as stack:
        stream: Iterable[str | bytes]
        stream = stack.enter_context(_open(source)) if isinstance(source, str | PathLike) else source
        try:
            for number, line in enumerate(stream, 1):
                yield number, _decoded(line, source, number)
        except UnicodeDecodeError as error:
            message = f"got a stream of text that is not UTF-8 ({error.reason}); pass the stream of bytes"
            raise error_at(source, number + 1, message) from error
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            message = f"the compressed file is damaged or cut short ({error}); make it anew"
            raise error_at(source, number + 1, message) from error


def _open(path: str | PathLike[str]) -> BufferedIOBase:
    match Path(path).suffix:
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
    return Path(path).open("rb")


def _decoded(line: str | bytes, source: TextSource, number: int) -> str | InvalidInputError:
    if isinstance(line, bytes):
        try:
            line = line.decode()
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1} of the line"
            return error_at(source, number, f"got {found}, expected UTF-8; convert the file")
    return line.removesuffix("\n").removesuffix("\r")


def write_lines(path: str | PathLike[str], lines: Iterable[str]) -> None:
    """Write a text at once or not at all; ``.gz`` and ``.xz`` are compressed.

    The lines go to a temporary file in the same directory, which takes the place of ``path`` when it is complete.
    """
    # A link stays a link: it is the file behind it that is replaced.
    final = Path(path).resolve()
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as raw, ExitStack() as stack:
            stream: BufferedIOBase = raw
            if final.suffix == ".gz":
                # Neither name nor time in the header: the same lines give the same bytes.
                stream = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            elif final.suffix == ".xz":
                stream = stack.enter_context(lzma.open(raw, "wb"))
            stream.writelines(line.encode() + b"\n" for line in lines)
            stack.close()
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
