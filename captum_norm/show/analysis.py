"""Shows an analysis: its figures for print, a page, and all files of a report.

Figures are one column wide, with labelled axes, 8-point type and no title (use a caption). The colours of Okabe & Ito
[2008, "Color universal design"] are distinct for colour-blind readers; markers and line styles are distinct without
colour. The figures are independent of pyplot, and their files have no date: equal numbers give equal bytes.
"""

import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.results import RESULTS, AnalysisResult, Cell, Plot, Table, number_files
from captum_norm.show import page
from captum_norm.show.colors import Rgb, color_table, ink_on
from captum_norm.show.figures import StandaloneFigure, figure_bytes, font_families
from captum_norm.show.text import printable
from captum_norm.text.characters import spelled_out
from captum_norm.text.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = "report.html"

INK = "#1b2430"
"""The colour of text, axes and edges, which a page in dark mode replaces by a light one."""

COLORS = ("#0072b2", "#e69f00", "#009e73", INK, "#d55e00", "#56b4e9", "#cc79a7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES = ("-", "--", "-.", ":", (0, (5, 1)))

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
# Lines with more points have about this many markers.
_MOST_MARKERS = 16
# More words than this under an axis are rotated.
_MOST_UPRIGHT = 8
# Longer tables are folded on the page; of even longer ones it shows the beginning.
_MOST_OPEN = 30
_MOST_SHOWN = 1000
# More vectors than this make a file slow to open, so they are rasterized.
_MOST_VECTORS = 2000


def draw_plot(result: AnalysisResult, plot: Plot) -> "Figure":
    """Draw a plot of a result.

    Args:
        result: the result with the plot's table.
        plot: the plot.

    Returns:
        The figure, which a notebook shows; :func:`plot_bytes` renders it.

    Raises:
        InvalidInputError: the table or a column is missing, a value is not a number, or two have the same position.

    Example:
        >>> from captum_norm.lab.analysis.results import Column
        >>> table = Table("layers", "Norms", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(0, 2.5), (1, 2.0)])
        >>> plot = Plot("norms", "line", "Norms by layer", "layers", "layer", "norm")
        >>> figure = draw_plot(AnalysisResult("dispersion", "", {}, [table], [plot]), plot)
        >>> figure.axes[0].get_ylabel()
        '‖f(x)‖'
    """
    table = result.table(plot.table)
    if not table.rows:
        raise InvalidInputError(f"got nothing to draw for the plot {plot.name}: the table {table.name} has no rows")
    with _style():
        figure = StandaloneFigure(figsize=(_COLUMN, _HEIGHT), dpi=300, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(_wrapped(table.label(plot.x), _COLUMN), parse_math=False)
        if plot.kind == "heat":
            _heat(figure, axes, table, plot)
        else:
            axes.set_ylabel(_wrapped(table.label(plot.y), _HEIGHT), parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
            _lines(axes, table, plot)
            if plot.series is not None:
                _legend(figure, axes, table.label(plot.series))
    return figure


def plot_bytes(figure: "Figure", suffix: str, title: str) -> bytes:
    """Render a figure as "png" or "pdf", with a title in the metadata."""
    with _style():
        return figure_bytes(figure, suffix, title=title)


def plot_svg(figure: "Figure") -> str:
    """Render a figure as SVG for a page: without ground, in the reader's ink, font and size of type."""
    import matplotlib as mpl

    with _style(), mpl.rc_context({"savefig.transparent": True}):
        document = figure_bytes(figure, "svg").decode()
    width, height = (round(inches * 72 * _POINT) for inches in figure.get_size_inches())
    svg = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 width="{width}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 height="{height}"', svg, count=1)
    return svg.replace(INK, "currentColor").replace(">", f"><style>{_READER}</style>", 1).strip()


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    settings: Any = {
        "font.family": font_families(),
        "font.size": 8,
        "axes.labelsize": 9,
        "axes.linewidth": 0.7,
        "lines.linewidth": 1.3,
        "lines.markersize": 4.5,
        "pdf.fonttype": 42,  # TrueType, which publishers accept and readers can search
        "svg.fonttype": "none",
    }
    inked: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with mpl.rc_context(settings | dict.fromkeys(inked, INK)):
        yield


def _lines(axes: "Axes", table: Table, plot: Plot) -> None:
    """Draw lines, with a style for each series."""
    places = _places(axes, table, plot)
    heights = _numbers(table, plot.y)
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
            markevery=-(-len(rows) // _MOST_MARKERS),
            elinewidth=0.8,
            capsize=2,
            rasterized=len(table.rows) > _MOST_VECTORS,
        )


def _heat(figure: "Figure", axes: "Axes", table: Table, plot: Plot) -> None:
    """Draw cells on the sequential colour scale, from 0 unless values are negative, each with its value."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    if plot.value is None:
        raise InvalidInputError(f"got no value for the heat plot {plot.name}; name the column for the colour")
    across, down = (_distinct(table.column(name)) for name in (plot.x, plot.y))
    places = zip(table.column(plot.y), table.column(plot.x), strict=True)
    at = [(down.index(y), across.index(x)) for y, x in places]
    if len(set(at)) < len(at):
        raise InvalidInputError(f"got several values for one position in the plot {plot.name}; expected one for each")
    field = np.full((len(down), len(across)), math.nan)
    for place, value in zip(at, _numbers(table, plot.value), strict=True):
        field[place] = value
    known = field[~np.isnan(field)]
    low, high = (min(0.0, float(known.min())), float(known.max())) if known.size else (0.0, 0.0)
    if high <= low:
        high = low + 1.0
    scale = ListedColormap(color_table() / 255, name="captum_norm")
    image = axes.pcolormesh(
        np.arange(len(across) + 1) - 0.5,
        np.arange(len(down) + 1) - 0.5,
        field,
        cmap=scale,
        vmin=low,
        vmax=high,
        edgecolors="face",  # avoids seams in viewers
        linewidth=0.3,
        rasterized=field.size > _MOST_VECTORS,
    )
    axes.invert_yaxis()
    height = max(_CELL * 0.8 * len(down) + 0.8, 1.6)
    figure.set_size_inches(_CELL * len(across) + 1.5, height)
    axes.set_ylabel(_wrapped(table.label(plot.y), height), parse_math=False)
    _name(axes, "x", across)
    _name(axes, "y", down)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(_wrapped(table.label(plot.value), height), parse_math=False)
    texts = _short(known)
    for (row, column), text in zip(np.argwhere(~np.isnan(field)), texts, strict=True):
        red, green, blue = scale((field[row, column] - low) / (high - low), bytes=True)[:3]
        ground: Rgb = (int(red), int(green), int(blue))
        ink = "#000000" if ink_on(ground) == (0, 0, 0) else "#ffffff"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=6.5)


def _legend(figure: "Figure", axes: "Axes", title: str) -> None:
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


def _places(axes: "Axes", table: Table, plot: Plot) -> list[float]:
    """The position of each row along the horizontal axis: its number, or the index of its word."""
    from matplotlib.ticker import MaxNLocator

    cells = table.column(plot.x)
    if not any(isinstance(cell, str) for cell in cells):
        numbers = _numbers(table, plot.x)
        if all(isinstance(cell, int) for cell in cells):
            axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))
        return numbers
    words = _distinct(cells)
    _name(axes, "x", words)
    return [float(words.index(cell)) for cell in cells]


def _wrapped(label: str, inches: float) -> str:
    """Wrap the label of an axis."""
    return textwrap.fill(label, int(_LABEL_CHARACTERS * inches), break_long_words=False)


def _name(axes: "Axes", axis: str, words: Sequence[Cell]) -> None:
    names = ["–" if word is None else spelled_out(str(word)) for word in words]
    (axes.set_xticks if axis == "x" else axes.set_yticks)(range(len(names)), names)
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    for text in chosen.get_ticklabels():
        text.set_parse_math(False)
    if axis == "x" and len(names) > 1 and sum(map(len, names)) > 5 * _MOST_UPRIGHT:
        axes.tick_params(axis="x", rotation=35)
        for text in chosen.get_ticklabels():
            text.set_horizontalalignment("right")
            text.set_rotation_mode("anchor")


def _series(table: Table, plot: Plot) -> Iterator[tuple[str | None, list[int]]]:
    """The name and the rows of each series."""
    if plot.series is None:
        yield None, list(range(len(table.rows)))
        return
    cells = table.column(plot.series)
    for word in _distinct(cells):
        yield "–" if word is None else str(word), [row for row, cell in enumerate(cells) if cell == word]


def _numbers(table: Table, name: str) -> list[float]:
    """A column to draw; NaN, which leaves a gap, for missing values."""
    numbers = []
    for cell in table.column(name):
        if isinstance(cell, str):
            raise InvalidInputError(f"got {cell!r} in the column {name} of {table.name}; expected a number to draw")
        numbers.append(math.nan if cell is None else float(cell))
    return numbers


def _distinct(cells: Sequence[Cell]) -> list[Cell]:
    return list(dict.fromkeys(cells))


def _short(values: Any) -> list[str]:
    """Format values for cells: three digits of the largest, no 0 before the point."""
    top = max((abs(float(value)) for value in values), default=0.0)
    decimals = 2 if top < 10 else 1 if top < 100 else 0
    return [re.sub(r"^(-?)0\.", r"\1.", f"{value:.{decimals}f}").replace("-", "−") for value in values]


def write_report(result: AnalysisResult, directory: str | os.PathLike[str]) -> list[Path]:
    """Write a result into a folder, which is created if needed.

    Writes ``TABLE.csv`` for each table, ``PLOT.png`` and ``PLOT.pdf`` for each plot, ``report.html``, a self-contained
    page, and last ``results.json``, the complete result: if it exists, all others do. Each file is written atomically
    and replaces an older one. Equal results give equal bytes.

    Args:
        result: the result of an analysis.
        directory: the folder.

    Returns:
        The files, in the order in which they were written.

    Raises:
        InvalidInputError: a name is not unique or cannot be a file name, a number is not finite, or a plot does not fit
            its table; nothing is written.
        OSError: the folder cannot be created or written to.

    Example:
        >>> import tempfile
        >>> from captum_norm.lab.analysis import read_result
        >>> from captum_norm.lab.analysis.results import Column
        >>> table = Table("layers", "Norms", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(0, 2.5), (1, 2.0)])
        >>> result = AnalysisResult("dispersion", "How norms differ.", {"mean": 2.25}, [table])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write_report(result, folder)], read_result(folder).table("layers") == table
        (['layers.csv', 'report.html', 'results.json'], True)
    """
    contents = number_files(result)
    figures = []
    for plot in result.plots:
        figure = draw_plot(result, plot)
        for suffix in ("png", "pdf"):
            contents[f"{plot.name}.{suffix}"] = plot_bytes(figure, suffix, plot.title)
        figures.append(page.Figure(plot.title, plot_svg(figure)))
    contents[PAGE] = page.render(analysis_page(result, figures)).encode()
    contents[RESULTS] = contents.pop(RESULTS)  # last
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    return [write_whole(folder / name, content) for name, content in contents.items()]


def analysis_page(result: AnalysisResult, figures: Sequence[page.Figure] | None = None) -> page.Page:
    """Put the result of an analysis on a page, with its plots as drawn; None to draw them here."""
    if figures is None:
        figures = [page.Figure(plot.title, plot_svg(draw_plot(result, plot))) for plot in result.plots]
    summary = page.Table(
        "In short",
        [page.Column("measure"), page.Column("value", "number")],
        [[name, _headline(value)] for name, value in result.summary.items()],
    )
    return page.Page(
        f"{result.analysis}: {result.metadata['model']}" if "model" in result.metadata else result.analysis,
        lead=result.description,
        facts=dict(_facts(result.metadata)),
        tables=[*([summary] if result.summary else []), *map(_page_table, result.tables)],
        figures=figures,
    )


def _page_table(table: Table) -> page.Table:
    cut = f"The first {_MOST_SHOWN} of {len(table.rows)} rows; {table.name}.csv has all."
    return page.Table(
        table.title,
        [
            page.Column(column.label, "text" if _has_words(table.column(column.name)) else "number")
            for column in table.columns
        ],
        [[printable(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows[:_MOST_SHOWN]],
        folded=len(table.rows) > _MOST_OPEN,
        note=cut if len(table.rows) > _MOST_SHOWN else "",
    )


def _headline(value: float | None) -> str | None:
    if value is None:
        return None
    size = abs(value)
    digits = ",.0f" if size >= 1000 or value == round(value) else ".3f" if 0.001 < size < 1 else ".3g"
    return f"{value:{digits}}".replace("-", "−")


def _has_words(cells: Sequence[Cell]) -> bool:
    return any(isinstance(cell, str) for cell in cells)


def _facts(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten the metadata."""
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name} ")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            yield f"{prefix}{name}", ", ".join("–" if item is None else str(item) for item in values)
