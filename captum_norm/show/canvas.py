"""Figures without pyplot: their type, fonts and tick labels, and the files that they are saved to."""

import io
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

from captum_norm.results import make_file
from captum_norm.text.characters import spelled_lines
from captum_norm.text.files import write_whole

# Fallbacks for scripts that matplotlib's own font lacks.
_FURTHER_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Noto Sans Arabic", "Noto Sans Devanagari")


class StandaloneFigure(Figure):
    """A figure without pyplot that a notebook shows as the result of a cell.

    Notebooks show other figures only if pyplot created them.

    Args:
        options: arguments of :class:`matplotlib.figure.Figure`.

    Example:
        >>> StandaloneFigure(figsize=(2, 1))._repr_png_()[1:4]
        b'PNG'
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        """Render the figure for IPython."""
        return figure_bytes(self)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure atomically; the suffix is the format (.png, .svg, .pdf).

    Args:
        figure: any matplotlib figure.
        path: the file; its folder must exist.

    Returns:
        The path.

    Raises:
        ValueError: matplotlib does not know the suffix.
        OSError: the folder does not exist or cannot be written to.
    """
    return write_whole(path, figure_bytes(figure, Path(path).suffix))


@make_file.register
def figure_bytes(figure: Figure, suffix: str = "png") -> bytes:
    """Render a figure as "png", "svg" or "pdf"; equal figures give equal bytes.

    Unprintable characters are spelled out, also in the figure itself.

    Args:
        figure: any matplotlib figure.
        suffix: the format.
    """
    suffix = suffix.removeprefix(".")
    for text in figure.findobj(Text):
        if (shown := spelled_lines(text.get_text())) != text.get_text():
            text.set_text(shown)
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
