"""Writes the result of an analysis to files: numbers, figures and a page."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from captum_norm.analysis.files import RESULTS, number_files
from captum_norm.analysis.results import AnalysisResult, Cell, Table
from captum_norm.files import write_whole
from captum_norm.visualization.analysis.plots import draw_plot, plot_bytes, plot_markup
from captum_norm.visualization.static_page import template
from captum_norm.visualization.text import formatted, printable

PAGE = "report.html"

# Longer tables are folded on the page; of even longer ones it shows the beginning.
_MOST_OPEN = 30
_MOST_SHOWN = 1000
_POINT = 1.7  # pixels on the page for a point of a figure, which makes 8-point type as large as text


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
        >>> from captum_norm.analysis import read_result
        >>> from captum_norm.analysis.results import Column
        >>> table = Table("layers", "Norms", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(0, 2.5), (1, 2.0)])
        >>> result = AnalysisResult("dispersion", "How norms differ.", {"mean": 2.25}, [table])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write_report(result, folder)], read_result(folder).table("layers") == table
        (['layers.csv', 'report.html', 'results.json'], True)
    """
    from markupsafe import Markup

    contents = number_files(result)
    figures = []
    for plot in result.plots:
        figure = draw_plot(result, plot)
        for suffix in ("png", "pdf"):
            contents[f"{plot.name}.{suffix}"] = plot_bytes(figure, suffix, plot.title)
        figures.append(
            {
                "name": plot.name,
                "title": plot.title,
                "width": round(figure.get_figwidth() * 72 * _POINT),
                "markup": Markup(plot_markup(figure, plot.name)),
            }
        )
    contents[PAGE] = _page(result, figures).encode()
    contents[RESULTS] = contents.pop(RESULTS)  # last
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    return [write_whole(folder / name, content) for name, content in contents.items()]


def _page(result: AnalysisResult, figures: Sequence[Mapping[str, Any]]) -> str:
    return template("report.html").render(
        title=f"{result.analysis}: {result.metadata['model']}" if "model" in result.metadata else result.analysis,
        description=result.description,
        summary={name: _headline(value) for name, value in result.summary.items()},
        facts=dict(_facts(result.metadata)),
        figures=figures,
        tables=[_section(table) for table in result.tables],
    )


def _section(table: Table) -> dict[str, Any]:
    shown = table.rows[:_MOST_SHOWN]
    columns = [_cells([row[index] for row in shown]) for index in range(len(table.columns))]
    numeric = [any(cell["number"] for cell in column) for column in columns]
    return {
        "name": table.name,
        "title": table.title,
        "header": [
            {"text": column.label, "number": number} for column, number in zip(table.columns, numeric, strict=True)
        ],
        "rows": [list(row) for row in zip(*columns, strict=True)],
        "total": len(table.rows),
        "open": len(table.rows) <= _MOST_OPEN,
    }


def _cells(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Format the cells of a column, fractions with the same number of decimals."""
    fractions = [cell for cell in cells if isinstance(cell, float)]
    texts = iter(formatted(fractions))

    def shown(cell: Cell) -> dict[str, Any]:
        if isinstance(cell, int | float):
            return {"text": _minus(next(texts) if isinstance(cell, float) else str(cell)), "number": True}
        return {"text": "–" if cell is None else printable(cell), "number": cell is None and bool(fractions)}

    return [shown(cell) for cell in cells]


def _headline(value: float | None) -> str:
    if value is None:
        return "–"
    size = abs(value)
    return _minus(
        f"{value:{',.0f' if size >= 1000 or value == round(value) else '.3f' if 0.001 < size < 1 else '.3g'}}"
    )


def _minus(number: str) -> str:
    return number.replace("-", "−")


def _facts(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten the metadata."""
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name} ")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            yield f"{prefix}{name}", ", ".join("–" if item is None else str(item) for item in values)
