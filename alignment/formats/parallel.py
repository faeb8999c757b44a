"""Reads parallel text: lines ``source ||| target``, or two files line by line."""

from collections.abc import Callable, Iterator
from itertools import zip_longest

from captum_norm import InvalidInputError
from captum_norm.text.lines import TextSource, error_at, scan_lines, source_name

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
            found = f"got {len(sides) - 1} times {_SEPARATOR}, expected source {_SEPARATOR} target"
            yield error_at(source, number, f"{found}; or give the sides in two files")


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
