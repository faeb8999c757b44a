"""Shows a progress bar in lines of text, and messages above it, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from tqdm import tqdm

from alignment.formats import TextSource
from captum_norm import bars
from captum_norm.text.characters import spelled_lines
from captum_norm.text.lines import COMPRESSED

_CHUNK_BYTES = 1 << 20


Advance = Callable[[int, int, bool], None]
"""``advance(lines, bad, fresh)`` moves a bar; lines that are not fresh do not count towards its speed."""


@contextmanager
def line_bar(description: str, source: TextSource, *, shown: bool) -> Iterator[Advance]:
    """Show a progress bar in lines of the input, with the number of bad lines; it hides the bars of the model's runs.

    Args:
        description: what is going on.
        source: the input, whose lines are counted first if that is cheap.
        shown: whether to show the bar.
    """
    bad_lines = 0
    total = count_lines(source) if shown else None
    asked = bars.progress(delay=0) if shown else bars.hidden()
    with asked, bars.bar(description, total, "lines") as bar, bars.hidden():

        def advance(lines: int, bad: int, fresh: bool) -> None:
            nonlocal bad_lines
            bad_lines += bad
            bar.set_postfix(bad=bad_lines, refresh=False)
            bars.advance(bar, lines, fresh=fresh)

        yield advance


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
    """Write a line to standard error, above any bar."""
    tqdm.write(spelled_lines(message), file=sys.stderr)
