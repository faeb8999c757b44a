"""Shows on standard error how far a run is: a bar, and messages above it."""

import sys
from os import PathLike
from pathlib import Path

from tqdm import tqdm

from alignment.formats import TextSource
from captum_norm import bars
from captum_norm.characters import spelled_lines
from captum_norm.texts import COMPRESSED

_CHUNK_BYTES = 1 << 20


class Progress:
    """A progress bar in lines of the input.

    Args:
        source: the input, whose lines are counted first where that is cheap.
        shown: whether there is a bar at all.
    """

    def __init__(self, source: TextSource, *, shown: bool) -> None:
        total = count_lines(source) if shown else None
        self._bar = tqdm(total=total, disable=not shown, unit=" lines", smoothing=0, dynamic_ncols=True)
        self._bad = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, lines: int, *, bad: int, fresh: bool) -> None:
        """Moves the bar; lines that are not ``fresh`` were finished before and do not count towards its speed."""
        self._bad += bad
        self._bar.set_postfix(bad=self._bad, refresh=False)
        bars.advance(self._bar, lines, fresh=fresh)


def count_lines(source: TextSource) -> int | None:
    """The number of lines of a plain file; None for streams and compressed files, which would have to be read twice."""
    if not isinstance(source, str | PathLike):
        return None
    path = Path(source)
    if not path.is_file() or path.suffix in COMPRESSED:
        return None
    lines, last = 0, b"\n"
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return lines + (last != b"\n")


def to_stderr(message: str) -> None:
    """Writes a line to standard error, above a bar if there is one."""
    tqdm.write(spelled_lines(message), file=sys.stderr)
