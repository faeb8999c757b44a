"""Reads and writes text files: parallel text, sentences with ids, and links in Pharaoh format."""

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from alignment.links import Alignment, Link
from captum_norm import InvalidInputError
from captum_norm.checks import quoted
from captum_norm.text.files import file_to_write
from captum_norm.text.lines import TextSource, error_at, located, read_lines, scan_lines, source_name, suffix_of


def split_words(sentence: str) -> list[str]:
    r"""Split a tokenised sentence into words at spaces and tabs.

    Other white space, such as the French no-break space, stays inside its word, as in the tools behind the gold
    alignments; ``str.split`` would shift the indices of all words after it.

    >>> split_words("15 h  , 1\u00a0000 francs")
    ['15', 'h', ',', '1\xa0000', 'francs']
    """
    return [word for word in sentence.replace("\t", " ").split(" ") if word]


def write_text(path: str | PathLike[str], parts: Iterable[bytes]) -> None:
    """Write the parts of a text to a file, all or nothing; ``.gz``, ``.xz`` and ``.bz2`` are compressed."""
    with file_to_write(path).replacing() as file:
        write_parts(file, suffix_of(Path(path).resolve()), parts)


def write_parts(file: BinaryIO, suffix: str, parts: Iterable[bytes]) -> None:
    """Write the parts of a text to an open file, compressed as its suffix says."""
    with ExitStack() as stack:
        stream: BinaryIO | gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File = file
        if suffix == ".gz":
            # No name or time in the header: equal lines give equal bytes.
            stream = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        elif suffix == ".xz":
            stream = stack.enter_context(lzma.open(file, "wb"))
        elif suffix == ".bz2":
            stream = stack.enter_context(bz2.open(file, "wb"))
        for part in parts:
            stream.write(part)


# At most nine digits: no sentence is longer, and int() refuses very long numbers with an error of its own.
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([01](?:\.[0-9]{1,9})?))?")


def parse_pharaoh(line: str) -> Alignment:
    """Parse a line in Pharaoh format; an empty line has no links, and scores (``i-j:p``) are left out.

    Raises:
        InvalidInputError: a token is not of the form ``i-j``.

    >>> parse_pharaoh("2-1 0-0")
    Alignment([(0, 0), (2, 1)])
    """
    return Alignment([link for link, _ in _links(line)])


def _links(line: str) -> Iterator[tuple[Link, float | None]]:
    for token in line.split():
        match = _LINK.fullmatch(token)
        if match is None or (match[3] is not None and float(match[3]) > 1):
            raise InvalidInputError(f"got {quoted(token)}, expected i-j; read sure and possible links with read_gold")
        yield (int(match[1]), int(match[2])), None if match[3] is None else float(match[3])


def format_pharaoh(alignment: Alignment) -> str:
    """Format an alignment as a line in Pharaoh format, in ascending order.

    >>> format_pharaoh(Alignment([(2, 1), (0, 0)]))
    '0-0 2-1'
    """
    return " ".join([f"{source}-{target}" for source, target in alignment])


def read_pharaoh(source: TextSource) -> Iterator[Alignment]:
    r"""Yield the alignments in a file or open stream, one per line.

    Args:
        source: path (``.gz``, ``.xz`` and ``.bz2`` are decompressed) or open stream of text or bytes.

    Raises:
        InvalidInputError: a line is malformed; file and line are named.

    >>> import io
    >>> list(read_pharaoh(io.StringIO("0-0 1-2\n\n")))
    [Alignment([(0, 0), (1, 2)]), Alignment([])]
    """
    for number, line in read_lines(source):
        with located(source, number):
            alignment = parse_pharaoh(line)
        yield alignment


def write_pharaoh(path: str | PathLike[str], alignments: Iterable[Alignment]) -> None:
    """Write alignments, one per line in ascending order; if anything fails, the file is left unchanged.

    Args:
        path: the file to create or replace; ``.gz`` and ``.xz`` are compressed.
        alignments: the alignments, consumed one at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_pharaoh(f"{folder}/hyp.gz", [Alignment([(1, 0), (0, 0)]), Alignment()])
    ...     list(read_pharaoh(f"{folder}/hyp.gz"))
    [Alignment([(0, 0), (1, 0)]), Alignment([])]
    """
    write_text(path, (f"{format_pharaoh(alignment)}\n".encode() for alignment in alignments))


_SEPARATOR = "|||"


def read_parallel(
    source: TextSource,
    target: TextSource | None = None,
    *,
    on_error: Callable[[InvalidInputError], None] | None = None,
    first: int = 1,
) -> Iterator[tuple[str, str]]:
    r"""Yield the sentence pairs of a parallel text, without leading and trailing spaces and tabs.

    Args:
        source: the source sentences, one per line; without ``target``, both sides with ``|||`` or a tab between them.
            Path or URL (``.gz``, ``.xz`` and ``.bz2`` are decompressed) or open stream.
        target: the target sentences, one per line.
        on_error: called with the error of each invalid pair (not UTF-8, one side); ("", "") is yielded in its place,
            so the n-th pair is always that of the n-th line. None raises the error instead.
        first: the number of the first line.

    Raises:
        InvalidInputError: a line is malformed, or one file ends before the other; file and line are named.

    >>> import io
    >>> list(read_parallel(io.StringIO("das Haus ||| the house\n")))
    [('das Haus', 'the house')]
    """
    pairs = _split_lines(source, first) if target is None else _zipped_lines(source, target, first)
    for pair in pairs:
        if isinstance(pair, InvalidInputError):
            if on_error is None:
                raise pair
            on_error(pair)
            yield "", ""
        else:
            yield pair


def _split_lines(source: TextSource, first: int) -> Iterator[tuple[str, str] | InvalidInputError]:
    for number, line in scan_lines(source, first=first):
        if isinstance(line, InvalidInputError):
            yield line
            continue
        sides = line.split(_SEPARATOR if _SEPARATOR in line else "\t")
        if len(sides) == 2 or not line.strip(" \t"):
            yield sides[0].strip(" \t"), sides[-1].strip(" \t")
        else:
            message = f"got {line.count(_SEPARATOR)} times {_SEPARATOR} and {line.count(chr(9))} tabs"
            expected = f"expected source {_SEPARATOR} target, or source and target with a tab between them"
            yield error_at(source, number, f"{message}; {expected}, or give the sides in two files")


def _zipped_lines(source: TextSource, target: TextSource, first: int) -> Iterator[tuple[str, str] | InvalidInputError]:
    for left, right in zip_longest(scan_lines(source, first=first), scan_lines(target, first=first)):
        if left is None or right is None:
            shorter, longer = (source, target) if left is None else (target, source)
            number, _ = left or right
            message = f"got no such line, but {source_name(longer)} has one; expected equally many in both"
            raise error_at(shorter, number, message)
        (_, source_line), (_, target_line) = left, right
        if isinstance(source_line, InvalidInputError):
            yield source_line
        elif isinstance(target_line, InvalidInputError):
            yield target_line
        else:
            yield source_line.strip(" \t"), target_line.strip(" \t")
