"""The result of an analysis as files: JSON, CSV, figures to print, and one page to read."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from captum_norm.analysis.plots import as_file, as_markup, draw
from captum_norm.analysis.results import AnalysisResult, Cell, Column, Plot, PlotKind, Table
from captum_norm.characters import csv_text, json_text
from captum_norm.errors import InvalidInputError
from captum_norm.files import write_whole
from captum_norm.texts import quoted, read_text
from captum_norm.visualization.page import template
from captum_norm.visualization.text import formatted, printable, shortened

RESULTS = "results.json"
PAGE = "report.html"

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Longer tables wait folded on the page; of those longer still it has the beginning, and the CSV has all.
_MOST_OPEN = 30
_MOST_SHOWN = 1000
_LONGEST_REASON = 300
_CELL = int | float | str | None
_POINT = 1.7  # pixels of the page for a point of a figure: its 8-point type reads like text

Made = TypeVar("Made", Column, Plot)


@dataclass(frozen=True)
class _Cell:
    text: str
    number: bool


@dataclass(frozen=True)
class _Section:
    name: str
    title: str
    header: list[_Cell]
    rows: list[list[_Cell]]
    total: int
    open: bool


@dataclass(frozen=True)
class _Figure:
    name: str
    title: str
    width: int
    markup: Any


def write(result: AnalysisResult, directory: str | os.PathLike[str]) -> list[Path]:
    """Write a result into a folder, which is made if it is not there.

    ``results.json`` has everything and is written last: where it is, the other files are. Beside it are ``TABLE.csv``
    for each table, ``PLOT.png`` and ``PLOT.pdf`` for each plot, and ``report.html``, a page that loads nothing from
    elsewhere. Each file is whole or not there; files of the same names are replaced. The same result gives the same
    bytes.

    Args:
        result: what an analysis found.
        directory: the folder.

    Returns:
        The files, in the order in which they were written.

    Raises:
        InvalidInputError: a name is not unique or no file's name, a number is not finite, or a plot does not fit its
            table; nothing is written.
        OSError: the folder cannot be made or written to.

    Example:
        >>> import tempfile
        >>> table = Table("layers", "Norms", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(1, 2.5), (2, 2.0)])
        >>> result = AnalysisResult("dispersion", "How norms differ.", {"mean": 2.25}, [table])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write(result, folder)], read(folder).table("layers") == table
        (['layers.csv', 'report.html', 'results.json'], True)
    """
    from markupsafe import Markup

    _check(result)
    contents = {f"{table.name}.csv": _csv(table) for table in result.tables}
    figures = []
    for plot in result.plots:
        figure = draw(result, plot)
        for suffix in ("png", "pdf"):
            contents[f"{plot.name}.{suffix}"] = as_file(figure, suffix, plot.title)
        width = round(figure.get_figwidth() * 72 * _POINT)
        figures.append(_Figure(plot.name, plot.title, width, Markup(as_markup(figure, plot.name))))
    contents[PAGE] = _page(result, figures).encode()
    contents[RESULTS] = _json(result)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    return [write_whole(folder / name, content) for name, content in contents.items()]


def read(directory: str | os.PathLike[str]) -> AnalysisResult:
    """A result from the folder that :func:`write` wrote it into.

    Raises:
        InvalidInputError: the folder has no ``results.json``, or another kind of file of that name.
    """
    path = Path(directory) / RESULTS
    if not path.exists():
        raise InvalidInputError(f"there is no {RESULTS} in {directory}: no analysis was written there")
    text = read_text(path)
    try:
        result = _result(json.loads(text))
        _check(result)
        _json(result)  # what can be read can be written
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        found = f"{path} is not the result of an analysis: {type(error).__name__}"
        raise InvalidInputError(f"{found}: {shortened(str(error), _LONGEST_REASON)}") from error
    return result


def _result(told: Any) -> AnalysisResult:
    """The result that a JSON document tells of.

    Raises:
        AttributeError: it tells of something else.
        KeyError: likewise.
        TypeError: likewise.
        InvalidInputError: a row has another number of cells than there are columns.
    """
    tables = [
        Table(
            name,
            _of(str, table["title"], "title"),
            tuple(_made(Column, column) for column in table["columns"]),
            [tuple(_of(_CELL, cell, f"a cell of {name}") for cell in row) for row in table["rows"]],
        )
        for name, table in told["tables"].items()
    ]
    return AnalysisResult(
        analysis=_of(str, told["analysis"], "analysis"),
        description=_of(str, told["description"], "description"),
        summary={name: _of(float | int | None, value, name) for name, value in told["summary"].items()},
        tables=tables,
        plots=[_made(Plot, plot) for plot in told["plots"]],
        metadata=_of(dict, told["metadata"], "metadata"),
    )


def _made(kind: type[Made], told: Mapping[str, Any]) -> Made:
    """A column or plot, whose fields are texts, None or, where the default is such, true or false."""
    kinds = {field.name: bool if isinstance(field.default, bool) else str | None for field in fields(kind)}
    for name, value in told.items():
        _of(kinds.get(name), value, name)
    if "kind" in kinds and told.get("kind") not in get_args(PlotKind):
        raise ValueError(f"got a plot of the kind {quoted(told.get('kind'))}")
    return kind(**told)


def _of(kind: Any, value: Any, name: str) -> Any:
    """A value, if it is of the kind."""
    if kind is None or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"got {quoted(value)} for {name}")
    return value


def _check(result: AnalysisResult) -> None:
    _check_names("table", [table.name for table in result.tables])
    _check_names("plot", [plot.name for plot in result.plots])
    for name, value in result.summary.items():
        _check_finite(value, repr(name))
    for table in result.tables:
        for column in table.columns:
            for cell in table.column(column.name):
                _check_finite(cell, f"the column {column.name} of {table.name}")


def _check_names(what: str, names: Sequence[str]) -> None:
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise InvalidInputError(f"got the {what} {name!r}; expected letters, digits, '_', '.' and '-'")
        if names.count(name) > 1:
            raise InvalidInputError(f"got two {what}s named {name}; expected a name of its own for each")


def _check_finite(value: Cell, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"got {value} in {where}; expected None for what is undefined")


def _json(result: AnalysisResult) -> bytes:
    document = {
        "analysis": result.analysis,
        "description": result.description,
        "metadata": result.metadata,
        "summary": result.summary,
        "tables": {
            table.name: {
                "title": table.title,
                "columns": [asdict(column) for column in table.columns],
                "rows": table.rows,
            }
            for table in result.tables
        },
        "plots": [asdict(plot) for plot in result.plots],
    }
    return json_text(document, indent=1).encode()


def _csv(table: Table) -> bytes:
    return csv_text([[column.name for column in table.columns], *table.rows]).encode()


def _page(result: AnalysisResult, figures: Sequence[_Figure]) -> str:
    return template("report.html").render(
        title=f"{result.analysis}: {result.metadata['model']}" if "model" in result.metadata else result.analysis,
        description=result.description,
        summary={name: _headline(value) for name, value in result.summary.items()},
        facts=dict(_facts(result.metadata)),
        figures=figures,
        tables=[_section(table) for table in result.tables],
    )


def _section(table: Table) -> _Section:
    shown = table.rows[:_MOST_SHOWN]
    columns = [_cells([row[index] for row in shown]) for index in range(len(table.columns))]
    numeric = [any(cell.number for cell in column) for column in columns]
    return _Section(
        table.name,
        table.title,
        [_Cell(column.label, number) for column, number in zip(table.columns, numeric, strict=True)],
        [list(row) for row in zip(*columns, strict=True)],
        len(table.rows),
        len(table.rows) <= _MOST_OPEN,
    )


def _cells(cells: Sequence[Cell]) -> list[_Cell]:
    """A column's cells as text, its fractions with decimals that line up."""
    fractions = [cell for cell in cells if isinstance(cell, float)]
    texts = iter(formatted(fractions))
    return [
        _Cell(_minus(next(texts)), True)
        if isinstance(cell, float)
        else _Cell(_minus(str(cell)), True)
        if isinstance(cell, int)
        else _Cell("–" if cell is None else printable(cell), cell is None and bool(fractions))
        for cell in cells
    ]


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
    """What a result comes from, name by name, without nesting."""
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name} ")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            yield f"{prefix}{name}", ", ".join("–" if item is None else str(item) for item in values)
