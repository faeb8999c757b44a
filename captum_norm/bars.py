"""Shows progress bars of long computations, if asked to."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True)
class _Asked:
    delay: float
    terminal_only: bool


_asked: ContextVar[_Asked | None] = ContextVar("captum_norm_progress", default=None)


@contextmanager
def progress(delay: float = 3.0, *, terminal_only: bool = False) -> Iterator[None]:
    """Show a bar on standard error for every computation inside that takes long; without this there is none.

    Args:
        delay: a computation that is over by then, in seconds, shows no bar.
        terminal_only: show none where standard error is no terminal.

    Example:
        >>> with progress():
        ...     pass  # NormAttribution(model).maps(long_inputs)
    """
    token = _asked.set(_Asked(delay, terminal_only))
    try:
        yield
    finally:
        _asked.reset(token)


@contextmanager
def hidden() -> Iterator[None]:
    """Show no bar inside: for the parts of a computation that shows one of its own."""
    token = _asked.set(None)
    try:
        yield
    finally:
        _asked.reset(token)


def is_asked() -> bool:
    """Whether a bar may be shown here."""
    return _asked.get() is not None


def bar(description: str, total: int | None, unit: str) -> "tqdm[Never]":
    """A bar, to be updated and closed; silent outside of :func:`captum_norm.progress`.

    Args:
        description: what is going on.
        total: how many units there are, if that is known.
        unit: what is counted.
    """
    from tqdm import tqdm

    asked = _asked.get()
    silent = True if asked is None else None if asked.terminal_only else False
    return tqdm(
        desc=description,
        total=total,
        unit=f" {unit}",
        unit_scale=True,
        disable=silent,
        delay=0 if asked is None else asked.delay,
        leave=False,
        smoothing=0,  # the mean speed: the recent one would count what was finished before
        dynamic_ncols=True,
    )


def advance(moved: "tqdm[Never]", number: int, *, fresh: bool) -> None:
    """Move a bar; units that are not ``fresh`` were finished before and do not count towards its speed."""
    if not (fresh or moved.disable):
        moved.initial += number
    moved.update(number)
