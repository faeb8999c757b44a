"""Results of an analysis: tables of plain values, plots of them, and metadata, also as files."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from captum_norm.errors import InvalidInputError
from captum_norm.results.tables import csv_text, data_frame, json_text
from captum_norm.text.characters import spelled_out
from captum_norm.text.lines import read_text

if TYPE_CHECKING:
    import pandas as pd

Cell = int | float | str | None
"""A cell of a table: a finite number, a word, or None for an undefined value."""

PlotKind = Literal["line", "heat"]
"""The kind of a plot; see :class:`Plot`."""

RESULTS = "results.json"
"""The file with the complete result."""

_LONGEST_REASON = 300


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: a short identifier, unique in its table: the header in CSV.
        label: its title in plots and printed tables, with the unit if there is one.
    """

    name: str
    label: str


@dataclass(frozen=True)
class Table:
    """Values in rows.

    Attributes:
        name: an identifier that can be a file name, unique among the tables of a result.
        title: a line that says what it shows.
        columns: the columns.
        rows: the rows, each with a cell for every column.

    Example:
        >>> table = Table("layers", "Norms by layer", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(0, 2.5)])
        >>> table.column("norm")
        [2.5]
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]]

    def label(self, name: str) -> str:
        """Return the label of a column."""
        return self.columns[self._index(name)].label

    def column(self, name: str) -> list[Cell]:
        """Return the cells of a column."""
        index = self._index(name)
        return [row[index] for row in self.rows]

    def frame(self) -> "pd.DataFrame":
        """Return the table as a data frame of pandas.

        Raises:
            InvalidInputError: if pandas is not installed.
        """
        return data_frame(self.rows, [column.name for column in self.columns])

    def _index(self, name: str) -> int:
        names = [column.name for column in self.columns]
        if name not in names:
            raise InvalidInputError(f"got the column {name}; the table {self.name} has {', '.join(names)}")
        return names.index(name)


@dataclass(frozen=True)
class Plot:
    """A plot of a table; axes and legends have the labels of its columns.

    Attributes:
        name: an identifier that can be a file name, unique among the plots of a result.
        kind: ``line``: y over x, a line for each value of ``series``; ``heat``: a cell for each x and y with ``value``
            as its colour.
        title: a line that says what it shows.
        table: the name of the table.
        x: the column along the horizontal axis.
        y: the column along the vertical axis.
        series: the column whose values become series, in the order of their first rows; None for a single series.
        error: the column with half the length of the error bars, such as a standard deviation.
        value: the column that ``heat`` shows as colour.
    """

    name: str
    kind: PlotKind
    title: str
    table: str
    x: str
    y: str
    series: str | None = None
    error: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class AnalysisResult:
    """The result of an analysis of a corpus.

    Attributes:
        analysis: the name of the analysis, as on the command line.
        description: what it measures, and the paper it is from, in a sentence or two.
        summary: the headline numbers by name, such as ``{"mean AttnResLn-N": 0.19}``.
        metadata: the origin of the numbers, in plain values for JSON: ``model``, ``corpus`` (its name, ``sha256``,
            ``texts``, ``sequences``, ``tokens``, ``masked``), ``seed``, ``settings``, ``versions``, ``command``.
        tables: all numbers.
        plots: the figures.
    """

    analysis: str
    description: str
    summary: Mapping[str, float | None]
    tables: Sequence[Table]
    plots: Sequence[Plot] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def table(self, name: str) -> Table:
        """Return the table of a name.

        Raises:
            InvalidInputError: if there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        have = ", ".join(table.name for table in self.tables)
        raise InvalidInputError(f"got the table {name}; the result of {self.analysis} has {have}")


def cell(value: Any) -> Cell:
    """Convert a value, also of numpy, to a cell: None unless it is finite."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table_of(name: str, title: str, labels: Mapping[str, str], rows: Iterable[Iterable[Any]]) -> Table:
    """Create a table from the labels of its columns by name."""
    columns = tuple(Column(*label) for label in labels.items())
    return Table(name, title, columns, [tuple(map(cell, row)) for row in rows])


def grid_table(
    name: str, title: str, axes: Mapping[str, Sequence[Any]], labels: Mapping[str, str], arrays: Sequence[Any]
) -> Table:
    """Create a table with a row for each place in arrays, and columns for the axes before theirs."""
    places = product(*axes.values())
    values = zip(*(np.asarray(array).flat for array in arrays), strict=True)
    rows = ((*place, *numbers) for place, numbers in zip(places, values, strict=True))
    return table_of(name, title, {axis: axis for axis in axes} | dict(labels), rows)


def number_files(result: AnalysisResult) -> dict[str, bytes]:
    """Format each table as ``TABLE.csv`` and the complete result as ``results.json``; returns contents by file name."""
    document = asdict(result)
    document["tables"] = {table.pop("name"): table for table in document["tables"]}
    files = {
        f"{table.name}.csv": csv_text([[column.name for column in table.columns], *table.rows]).encode()
        for table in result.tables
    }
    return files | {RESULTS: json_text(document, indent=1).encode()}


def read_result(directory: str | os.PathLike[str]) -> AnalysisResult:
    """Read a result from the folder into which :func:`captum_norm.show.write_report` wrote it.

    Raises:
        InvalidInputError: the folder has no ``results.json``, or the file is not the result of an analysis.
    """
    path = Path(directory) / RESULTS
    if not os.path.exists(path):  # noqa: PTH110  # Path's raises an error for long names
        raise InvalidInputError(f"there is no {RESULTS} in {directory}: no analysis was written there")
    text = read_text(path)
    try:
        document = json.loads(text)
        tables = [
            Table(
                name,
                table["title"],
                tuple(Column(**column) for column in table["columns"]),
                [*map(tuple, table["rows"])],
            )
            for name, table in document["tables"].items()
        ]
        # Files of earlier versions have log_x.
        plots = [Plot(**{name: value for name, value in plot.items() if name != "log_x"}) for plot in document["plots"]]
        return AnalysisResult(**{**document, "tables": tables, "plots": plots})
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{path} is not the result of an analysis: {type(error).__name__}"
        raise InvalidInputError(f"{reason}: {spelled_out(str(error))[:_LONGEST_REASON]}") from error
