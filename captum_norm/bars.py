"""Shows progress bars of long computations, on request."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True)
class _Options:
    delay: float
    terminal_only: bool


_options: ContextVar[_Options | None] = ContextVar("captum_norm_progress", default=None)


@contextmanager
def progress(delay: float = 3.0, *, terminal_only: bool = False) -> Iterator[None]:
    """Show a bar on standard error for every long computation in the context; there are none by default.

    Args:
        delay: computations shorter than this, in seconds, show no bar.
        terminal_only: show bars only if standard error is a terminal.

    Example:
        >>> with progress():
        ...     pass  # NormAttribution(model).maps(long_inputs)
    """
    token = _options.set(_Options(delay, terminal_only))
    try:
        yield
    finally:
        _options.reset(token)


@contextmanager
def hidden() -> Iterator[None]:
    """Show no bars in the context, for the parts of a computation that has its own bar."""
    token = _options.set(None)
    try:
        yield
    finally:
        _options.reset(token)


def is_asked() -> bool:
    """Whether bars are shown here."""
    return _options.get() is not None


def bar(description: str, total: float | None, unit: str) -> "tqdm[Never]":
    """Create a bar, to be updated and closed; invisible outside :func:`captum_norm.progress`.

    Args:
        description: the text before the bar.
        total: the number of units, if known; the time that is left is then shown.
        unit: the name of the unit; empty to show no numbers, as of estimated seconds.
    """
    from tqdm import tqdm

    asked = _options.get()
    counts = "{n_fmt}/{total_fmt}{unit}, " if unit else ""
    silent = True if asked is None else None if asked.terminal_only else False
    return tqdm(
        desc=description,
        total=total,
        unit=f" {unit}",
        bar_format=None if total is None else f"{{l_bar}}{{bar}}| {counts}{{remaining}} left{{postfix}}",
        unit_scale=True,
        disable=silent,
        delay=0 if asked is None else asked.delay,
        leave=False,
        smoothing=0,  # the mean speed: the recent one would count what was finished before
        dynamic_ncols=True,
    )


def advance(shown: "tqdm[Never]", number: int, *, fresh: bool) -> None:
    """Advance a bar; units that are not ``fresh`` were finished earlier and do not count for the speed."""
    if not (fresh or shown.disable):
        shown.initial += number
    shown.update(number)
