"""Prints what commands say: text as it is, nothing that the terminal would obey."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from captum_norm.characters import spelled_lines


def plain_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table without lines: columns of words, to the left, then columns of numbers, to the right."""
    table = Table(title=title, title_justify="left", box=None)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


class Terminal(Console):
    r"""A console that shows text as it is: markup and emoji codes stay what they are, control characters are spelled.

    Args:
        stderr: whether it is standard error rather than standard output.

    Example:
        >>> Terminal(width=80).print("[red] :smile: \x1b[31m")
        [red] :smile: \x1b[31m
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def say(self, text: str) -> None:
        """Print lines as they are, however long; the terminal may break them."""
        self.print(text, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """What every string becomes, in tables, too, whatever printed it asks for."""
        return super().render_str(spelled_lines(text), **options | {"markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is printed; text in other forms than strings passes here for the first time."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(spelled_lines(segment.text), segment.style)
