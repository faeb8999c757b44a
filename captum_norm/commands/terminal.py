"""Prints the output of commands literally, without anything that controls the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from captum_norm.text.characters import spelled_lines


def plain_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """Create a table without lines: left-aligned columns of words, then right-aligned columns of numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


class Terminal(Console):
    r"""A console that prints text literally, markup and emoji codes included, with control characters spelled out.

    Args:
        stderr: print to standard error instead of standard output.
        width: the width in characters; that of the terminal if None.

    Example:
        >>> Terminal(width=80).print("[red] :smile: \x1b[31m")
        [red] :smile: \x1b[31m
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def say(self, text: str) -> None:
        """Print lines without wrapping them."""
        self.print(text, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string literally, also in tables."""
        return super().render_str(spelled_lines(text), **options | {"markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything printed; text that is not a string is spelled out here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(spelled_lines(segment.text), segment.style)
