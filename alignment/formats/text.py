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
from captum_norm.text.files import whole_file
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
    with whole_file(path) as file:
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


def parse_scored_pharaoh(line: str) -> dict[Link, float]:
    """Parse a line of links with scores, ``i-j:p``, as ``norm-align extract --scores`` writes them.

    Raises:
        InvalidInputError: a token is not of this form.

    >>> parse_scored_pharaoh("0-0:0.9871 2-1:0.5")
    {(0, 0): 0.9871, (2, 1): 0.5}
    """
    scores = {}
    for link, score in _links(line):
        if score is None:
            message = f"got {link[0]}-{link[1]} without a score"
            raise InvalidInputError(f"{message}, expected i-j:p, as norm-align extract --scores writes")
        scores[link] = score
    return scores


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
    r"""Yield the alignments in a file or open stream, one a line.

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
    """Write alignments, one a line in ascending order; if anything fails, the file is left unchanged.

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
        source: the source sentences, one a line; without ``target``, lines ``source ||| target``. Path or URL
            (``.gz``, ``.xz`` and ``.bz2`` are decompressed) or open stream.
        target: the target sentences, one a line.
        on_error: called with the error of each invalid pair (not UTF-8, no ``|||``); ("", "") is yielded in its place,
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
        sides = line.split(_SEPARATOR)
        if len(sides) == 2:
            yield sides[0].strip(" \t"), sides[1].strip(" \t")
        else:
            message = f"got {len(sides) - 1} times {_SEPARATOR}, expected source {_SEPARATOR} target"
            yield error_at(source, number, f"{message}; or give the sides in two files")


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


def read_identified(*sources: TextSource) -> list[tuple[str, ...]]:
    r"""Read files with the same ids: a tuple for each id, with the text from each file.

    Args:
        sources: the files, such as sentences in two languages, and links; each a path (``.gz``, ``.xz`` and ``.bz2``
            are decompressed) or open stream.

    Raises:
        InvalidInputError: a line has no id or no tab, an id is repeated in a file, or the ids or their order differ
            from the first file's; file and line are named.

    >>> import io
    >>> read_identified(io.StringIO("a\tdas Haus\nb\tja\n"), io.StringIO("a\tthe house\nb\tyes\n"))
    [('das Haus', 'the house'), ('ja', 'yes')]
    """
    files = [_read_file(source) for source in sources]
    for source, texts in zip(sources[1:], files[1:], strict=True):
        for number, (name, expected) in enumerate(zip_longest(texts, files[0]), 1):
            if name != expected:
                got, wanted = (
                    "the end" if one is None else f"the sentence id {quoted(one)}" for one in (name, expected)
                )
                raise error_at(source, number, f"got {got}, expected {wanted}, as in {source_name(sources[0])}")
    return list(zip(*(texts.values() for texts in files), strict=True))


def _read_file(source: TextSource) -> dict[str, str]:
    texts: dict[str, str] = {}
    for number, line in read_lines(source):
        with located(source, number):
            name, tab, text = line.partition("\t")
            if not (name and tab):
                raise InvalidInputError(f"got {quoted(line)}, expected a sentence id, a tab and the text")
            if name in texts:
                raise InvalidInputError(f"got the sentence id {quoted(name)} again, expected each once")
            texts[name] = text
    return texts
