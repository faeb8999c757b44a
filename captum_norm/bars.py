"""Shows progress bars of long computations, on request, and messages above them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Never

from captum_norm.text.characters import spelled_lines
from captum_norm.text.lines import COMPRESSED, TextSource

if TYPE_CHECKING:
    from tqdm import tqdm

# The delay of bars, and whether they are for terminals only; None for no bars.
DISPLAY: ContextVar[tuple[float, bool] | None] = ContextVar("captum_norm_progress", default=None)


@contextmanager
def progress(delay: float = 3.0, *, terminal_only: bool = False) -> Iterator[None]:
    """Show a bar on standard error for every long computation in the context; there are none by default.

    Args:
        delay: computations shorter than this, in seconds, show no bar.
        terminal_only: show bars only if standard error is a terminal.
    """
    token = DISPLAY.set((delay, terminal_only))
    try:
        yield
    finally:
        DISPLAY.reset(token)


@contextmanager
def hidden() -> Iterator[None]:
    """Show no bars in the context, for the parts of a computation that has its own bar."""
    token = DISPLAY.set(None)
    try:
        yield
    finally:
        DISPLAY.reset(token)


def bar(description: str, total: float | None, unit: str) -> "tqdm[Never]":
    """Create a bar, to be updated and closed; invisible outside :func:`captum_norm.progress`."""
    from tqdm import tqdm

    delay, terminal_only = DISPLAY.get() or (0, False)
    counts = "{n_fmt}/{total_fmt}{unit}, " if unit else ""
    return tqdm(
        desc=description,
        total=total,
        unit=f" {unit}",
        bar_format=None if total is None else f"{{l_bar}}{{bar}}| {counts}{{remaining}} left{{postfix}}",
        unit_scale=True,
        disable=None if terminal_only else DISPLAY.get() is None,
        delay=delay,
        leave=False,
        smoothing=0,  # the mean speed: the recent one would count what was finished before
        dynamic_ncols=True,
    )


def advance(shown: "tqdm[Never]", number: int, *, fresh: bool) -> None:
    """Advance a bar; units that are not ``fresh`` were finished earlier and do not count for the speed."""
    if not (fresh or shown.disable):
        shown.initial += number
    shown.update(number)


def count_lines(source: TextSource) -> int | None:
    """The number of lines of a plain file; None for streams and compressed files, which would have to be read twice."""
    path = Path(source) if isinstance(source, str | PathLike) else None
    if path is None or not path.is_file() or path.suffix in COMPRESSED:
        return None
    with path.open("rb") as stream:
        return sum(1 for _ in stream)


def to_stderr(message: str) -> None:
    """Write a line to standard error, above any bar."""
    from tqdm import tqdm

    tqdm.write(spelled_lines(message), file=sys.stderr)
