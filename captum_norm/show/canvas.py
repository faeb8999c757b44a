"""Figures without pyplot: their type, fonts and tick labels, and their files' content."""

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib as mpl
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

from captum_norm.results import make_file
from captum_norm.text.characters import spelled_lines

# Fallbacks for scripts that matplotlib's own font lacks.
_FURTHER_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Noto Sans Arabic", "Noto Sans Devanagari")


class StandaloneFigure(Figure):
    """A figure without pyplot that a notebook shows as the result of a cell, with unprintable characters spelled out.

    Notebooks show other figures only if pyplot created them. matplotlib's ``savefig`` writes it.

    Args:
        options: arguments of :class:`matplotlib.figure.Figure`.

    Example:
        >>> StandaloneFigure(figsize=(2, 1))._repr_png_()[1:4]
        b'PNG'
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        FigureCanvasAgg(self)

    def draw(self, renderer: Any) -> None:
        """Spell out unprintable characters, then draw."""
        for text in self.findobj(Text):
            if (shown := spelled_lines(text.get_text())) != text.get_text():
                text.set_text(shown)
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """Render the figure for IPython."""
        return figure_bytes(self)


@make_file.register
def figure_bytes(figure: Figure, suffix: str = "png") -> bytes:
    """Render a figure as "png", "svg" or "pdf"; equal figures give equal bytes.

    Args:
        figure: any matplotlib figure.
        suffix: the format.
    """
    suffix = suffix.removeprefix(".")
    dates = {"svg": "Date", "pdf": "CreationDate"}
    metadata: dict[str, str | None] | None = {dates[suffix]: None} if suffix in dates else None
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "captum_norm"}):  # ids that are not random
        figure.savefig(buffer, format=suffix, metadata=metadata)
    return buffer.getvalue()


@cache
def font_families() -> list[str]:
    """Return the default font of figures and the installed fallbacks for other scripts."""
    installed = set(fontManager.get_font_names())
    return ["sans-serif", *(name for name in _FURTHER_FONTS if name in installed)]


def name_ticks(axis: Axis, names: Sequence[str], places: Sequence[int] | None = None) -> None:
    """Label the ticks of an axis literally, since a token may hold ``$``; at 0, 1, … without places."""
    axis.set_ticks(range(len(names)) if places is None else places, list(names))
    for text in axis.get_ticklabels():
        text.set(parse_math=False, fontsize=8, fontfamily=font_families())
