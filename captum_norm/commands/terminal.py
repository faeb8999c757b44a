"""Prints the output of commands literally, without anything that controls the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from captum_norm.text.characters import spelled_lines

__all__ = ["Terminal"]


class Terminal(Console):
    """A console that prints text literally, markup and emoji codes included, with control characters spelled out."""

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
