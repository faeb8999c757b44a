"""Reads and writes the Pharaoh format: one sentence pair a line, links as ``i-j`` with indices from 0."""

import re
from collections.abc import Iterable, Iterator
from os import PathLike

from alignment.formats.text import write_text
from alignment.links import Alignment, Link
from captum_norm import InvalidInputError
from captum_norm.text.lines import TextSource, located, quoted, read_lines

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
            found = f"got {link[0]}-{link[1]} without a score"
            raise InvalidInputError(f"{found}, expected i-j:p, as norm-align extract --scores writes")
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
