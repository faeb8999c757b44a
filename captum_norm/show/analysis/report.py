"""Writes the result of an analysis to files: numbers, figures and a page."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from captum_norm.lab.analysis.results import RESULTS, AnalysisResult, Cell, Table, number_files
from captum_norm.show import page
from captum_norm.show.analysis.plots import draw_plot, plot_bytes, plot_svg
from captum_norm.show.text import printable
from captum_norm.text.files import write_whole

PAGE = "report.html"

# Longer tables are folded on the page; of even longer ones it shows the beginning.
_MOST_OPEN = 30
_MOST_SHOWN = 1000


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
    """Put the result of an analysis on a page.

    Args:
        result: the result.
        figures: its plots as they are drawn; None to draw them here.
    """
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
        tables=[*([summary] if result.summary else []), *map(_table, result.tables)],
        figures=figures,
    )


def _table(table: Table) -> page.Table:
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
