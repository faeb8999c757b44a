"""Plots of analyses, for print and for pages: lines and heat maps of a table.

They are one column wide, with labelled axes, 8-point type and no title (use a caption). Colours are distinct for
colour-blind readers; markers and line styles are distinct without colour. The figures are independent of pyplot, and
their files have no date: equal numbers give equal bytes.
"""

import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.results import AnalysisResult, Cell, Plot, Table
from captum_norm.show.colors import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, color_map, hex_of, ink_on
from captum_norm.show.figures import StandaloneFigure, figure_bytes, font_families, name_ticks
from captum_norm.text.characters import spelled_out

INK = "#1b2430"
"""The colour of text, axes and edges, which a page in dark mode replaces by a light one."""

COLORS = (BLUE, ORANGE, GREEN, INK, VERMILION, SKY, PURPLE)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES = ("-", "--", "-.", ":", (0, (5, 1)))

_STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,  # TrueType, which publishers accept and readers can search
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
_COLUMN = 3.4  # inches: one column of a two-column page
_HEIGHT = 2.5
_CELL = 0.42
_CHARACTERS = 14  # in an inch of a legend
_LABEL_CHARACTERS = 10  # of an axis label in an inch of the figure
_HANDLE_CHARACTERS = 7
_POINT = 1.7  # pixels on a page for a point, which makes 8-point type as large as text
_READER = (
    f"svg{{color:{INK}}}@media(prefers-color-scheme:dark){{svg{{color:#e4e7eb}}}}"
    "text{font-family:system-ui,sans-serif!important}"
)
# Longer names under an axis, all together, are rotated.
_MOST_UPRIGHT = 40


def draw_plot(result: AnalysisResult, plot: Plot) -> Figure:
    """Draw a plot of a result.

    Args:
        result: the result with the plot's table.
        plot: the plot.

    Returns:
        The figure, which a notebook shows; :func:`plot_bytes` renders it.

    Raises:
        InvalidInputError: the table or a column is missing, a value is not a number, or two have the same position.
    """
    table = result.table(plot.table)
    if not table.rows:
        raise InvalidInputError(f"got nothing to draw for the plot {plot.name}: the table {table.name} has no rows")
    with _style():
        figure = StandaloneFigure(figsize=(_COLUMN, _HEIGHT), dpi=300, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(_wrapped(table.label(plot.x), _COLUMN), parse_math=False)
        if plot.kind == "heat":
            _draw_heat(figure, axes, table, plot)
        else:
            axes.set_ylabel(_wrapped(table.label(plot.y), _HEIGHT), parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
            _draw_lines(axes, table, plot)
            if plot.series is not None:
                _draw_legend(figure, axes, table.label(plot.series))
    return figure


def draw_curves(most: Sequence[float], least: Sequence[float], limits: tuple[float, float]) -> Figure:
    """Draw an output as the most relevant tokens are removed first (solid), and the least relevant (dashed)."""
    shares = np.linspace(0, 1, len(most))
    with _style():
        figure = StandaloneFigure(figsize=(1.7, 1.0), layout="constrained")
        axes = figure.add_subplot()
        axes.fill_between(shares, most, least, color=INK, alpha=0.1, linewidth=0)
        axes.plot(shares, most, color=BLUE)
        axes.plot(shares, least, color=ORANGE, linestyle="--")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks([0, 1])
        axes.set_yticks(limits, [f"{limit:.2g}".replace("-", "−") for limit in limits])
    return figure


def plot_bytes(figure: Figure, suffix: str) -> bytes:
    """Render a figure as "png" or "pdf"."""
    with _style():
        return figure_bytes(figure, suffix)


def plot_svg(figure: Figure) -> str:
    """Render a figure as SVG for a page: without ground, in the reader's ink, font and size of type."""
    with _style(), mpl.rc_context({"savefig.transparent": True}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's font shows the text
        document = figure_bytes(figure, "svg").decode()
    width, height = (round(inches * 72 * _POINT) for inches in figure.get_size_inches())
    svg = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 width="{width}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 height="{height}"', svg, count=1)
    return svg.replace(INK, "currentColor").replace(">", f"><style>{_READER}</style>", 1).strip()


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(_STYLE | {"font.family": font_families()})


def _draw_lines(axes: Axes, table: Table, plot: Plot) -> None:
    """Draw lines, with a style for each series."""
    places, heights = _places(axes, table, plot), _numbers(table, plot.y)
    errors = _numbers(table, plot.error) if plot.error else None
    for style, (name, rows) in enumerate(_series(table, plot)):
        axes.errorbar(
            [places[row] for row in rows],
            [heights[row] for row in rows],
            yerr=None if errors is None else [errors[row] for row in rows],
            label=name,
            color=COLORS[style % len(COLORS)],
            marker=MARKERS[style % len(MARKERS)],
            linestyle=LINES[style % len(LINES)],
            markeredgecolor=INK,
            markeredgewidth=0.5,
            elinewidth=0.8,
            capsize=2,
        )


def _draw_heat(figure: Figure, axes: Axes, table: Table, plot: Plot) -> None:
    """Draw cells on the sequential colour scale, from 0 unless values are negative, each with its value."""
    if plot.value is None:
        raise InvalidInputError(f"got no value for the heat plot {plot.name}; name the column for the colour")
    columns, rows = (list(dict.fromkeys(table.column(name))) for name in (plot.x, plot.y))
    cells = [(rows.index(y), columns.index(x)) for y, x in zip(table.column(plot.y), table.column(plot.x), strict=True)]
    if len(set(cells)) < len(cells):
        raise InvalidInputError(f"got several values for one position in the plot {plot.name}; expected one for each")
    values = np.full((len(rows), len(columns)), math.nan)
    for cell, value in zip(cells, _numbers(table, plot.value), strict=True):
        values[cell] = value
    known = values[~np.isnan(values)]
    low, high = (min(0.0, float(known.min())), float(known.max())) if known.size else (0.0, 0.0)
    if high <= low:
        high = low + 1.0
    image = axes.pcolormesh(
        np.arange(len(columns) + 1) - 0.5,
        np.arange(len(rows) + 1) - 0.5,
        values,
        cmap=color_map(signed=False),
        vmin=low,
        vmax=high,
        edgecolors="face",  # avoids seams in viewers
        linewidth=0.3,
    )
    axes.invert_yaxis()
    height = max(_CELL * 0.8 * len(rows) + 0.8, 1.6)
    figure.set_size_inches(_CELL * len(columns) + 1.5, height)
    axes.set_ylabel(_wrapped(table.label(plot.y), height), parse_math=False)
    _name_columns(axes, columns)
    name_ticks(axes.yaxis, _names(rows))
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(_wrapped(table.label(plot.value), height), parse_math=False)
    for (row, column), text in zip(np.argwhere(~np.isnan(values)), _short(known), strict=True):
        red, green, blue, _ = image.to_rgba(values[row, column], bytes=True)
        ink = hex_of(ink_on((int(red), int(green), int(blue))))
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=6.5)


def _draw_legend(figure: Figure, axes: Axes, title: str) -> None:
    handles, names = axes.get_legend_handles_labels()
    widths = [len(name) + _HANDLE_CHARACTERS for name in names]
    room = _CHARACTERS * figure.get_figwidth()
    columns = len(names) if sum(widths) <= room else max(1, int(room / max(widths)))
    legend = figure.legend(
        handles,
        names,
        title=title,
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
    )
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)
    figure.set_figheight(_HEIGHT + 0.16 * (1 + -(-len(names) // columns)))


def _places(axes: Axes, table: Table, plot: Plot) -> list[float]:
    """Return the position of each row along the horizontal axis: its number, or the index of its word."""
    cells = table.column(plot.x)
    if any(isinstance(cell, str) for cell in cells):
        words = list(dict.fromkeys(cells))
        _name_columns(axes, words)
        return [float(words.index(cell)) for cell in cells]
    if all(isinstance(cell, int) for cell in cells):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))
    return _numbers(table, plot.x)


def _name_columns(axes: Axes, cells: Sequence[Cell]) -> None:
    """Name the positions of the horizontal axis, long names at an angle."""
    names = _names(cells)
    name_ticks(axes.xaxis, names)
    if len(names) > 1 and sum(map(len, names)) > _MOST_UPRIGHT:
        axes.tick_params(axis="x", rotation=35)
        for text in axes.get_xticklabels():
            text.set(horizontalalignment="right", rotation_mode="anchor")


def _names(cells: Sequence[Cell]) -> list[str]:
    return ["–" if cell is None else spelled_out(str(cell)) for cell in cells]


def _series(table: Table, plot: Plot) -> Iterator[tuple[str | None, list[int]]]:
    """Yield the name and the rows of each series."""
    if plot.series is None:
        yield None, list(range(len(table.rows)))
        return
    cells = table.column(plot.series)
    for word in dict.fromkeys(cells):
        yield "–" if word is None else str(word), [row for row, cell in enumerate(cells) if cell == word]


def _numbers(table: Table, name: str) -> list[float]:
    """Return a column to draw, with NaN, which leaves a gap, for missing values."""
    numbers = []
    for cell in table.column(name):
        if isinstance(cell, str):
            raise InvalidInputError(f"got {cell!r} in the column {name} of {table.name}; expected a number to draw")
        numbers.append(math.nan if cell is None else float(cell))
    return numbers


def _wrapped(label: str, inches: float) -> str:
    """Wrap the label of an axis."""
    return textwrap.fill(label, int(_LABEL_CHARACTERS * inches), break_long_words=False)


def _short(values: Any) -> list[str]:
    """Format values for cells: three digits of the largest, no 0 before the point."""
    top = max((abs(float(value)) for value in values), default=0.0)
    decimals = 2 if top < 10 else 1 if top < 100 else 0
    return [re.sub(r"^(-?)0\.", r"\1.", f"{value:.{decimals}f}").replace("-", "−") for value in values]
