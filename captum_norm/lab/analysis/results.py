"""Results of an analysis: tables of plain values, plots of them, and metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from captum_norm.errors import InvalidInputError
from captum_norm.results.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd

Cell = int | float | str | None
"""A cell of a table: a finite number, a word, or None for an undefined value."""

PlotKind = Literal["line", "grouped-bars", "heat", "scatter"]
"""The kind of a plot; see :class:`Plot`."""


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

    Raises:
        InvalidInputError: a row has not as many cells as there are columns.

    Example:
        >>> table = Table("layers", "Norms by layer", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(0, 2.5)])
        >>> table.column("norm")
        [2.5]
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InvalidInputError(
                    f"got a row of {len(row)} cells in the table {self.name}; expected {len(self.columns)}"
                )

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
        kind: ``line`` and ``scatter``: y over x, a line or a kind of marker for each value of ``series``;
            ``grouped-bars``: for each value of x, side by side, one bar of height y for each value of ``series``;
            ``heat``: a cell for each x and y with ``value`` as its colour.
        title: a line that says what it shows.
        table: the name of the table.
        x: the column along the horizontal axis.
        y: the column along the vertical axis.
        series: the column whose values become series, in the order of their first rows; None for a single series.
        error: the column with half the length of the error bars, such as a standard deviation.
        value: the column that ``heat`` shows as colour.
        log_x: whether the horizontal axis is logarithmic.
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
    log_x: bool = False


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
