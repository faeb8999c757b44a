"""Holds what an analysis found: tables of plain values, what to plot of them, and where they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from captum_norm.errors import InvalidInputError
from captum_norm.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd

Cell = int | float | str | None
"""What stands in a table: finite numbers, words, or None where a value is not defined (a deviation of nothing)."""

PlotKind = Literal["line", "grouped-bars", "heat", "scatter"]
"""How a table is drawn; see :class:`Plot`."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: a short identifier, unique in its table: the header in CSV.
        label: what an axis or a printed table calls it, with the unit if there is one.
    """

    name: str
    label: str


@dataclass(frozen=True)
class Table:
    """Values in rows.

    Attributes:
        name: an identifier that can be a file's name, unique among the tables of a result.
        title: what it shows, one line.
        columns: the columns.
        rows: the rows, each with a cell for every column.

    Raises:
        InvalidInputError: a row has another number of cells than there are columns.

    Example:
        >>> table = Table("layers", "Norms by layer", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(1, 2.5)])
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
        """The label of the column called ``name``."""
        return self.columns[self._index(name)].label

    def column(self, name: str) -> list[Cell]:
        """The cells of the column called ``name``."""
        index = self._index(name)
        return [row[index] for row in self.rows]

    def frame(self) -> "pd.DataFrame":
        """The table as a data frame of pandas.

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
    """What to draw of a table. Axes and legends are labelled with the labels of its columns.

    Attributes:
        name: an identifier that can be a file's name, unique among the plots of a result.
        kind: ``line`` and ``scatter``: y over x, a line or a kind of marker for each value of ``series``;
            ``grouped-bars``: for each value of x, side by side, one bar of height y for each value of ``series``;
            ``heat``: a field for each x and y, its colour ``value``.
        title: what is shown, one line.
        table: the name of the table.
        x: the column along the horizontal axis.
        y: the column along the vertical axis.
        series: the column whose values are told apart, in the order of their first rows; None for a single series.
        error: the column with the half length of error bars, such as a standard deviation.
        value: of ``heat``, the column that is the colour.
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
    """What an analysis found in a corpus.

    Attributes:
        analysis: the analysis's name, as on the command line.
        description: what it measures, and of which paper it is, in a sentence or two.
        summary: the headline numbers by name, such as ``{"mean AttnResLn-N": 0.19}``.
        metadata: what they come from, all of it plain values for JSON: ``model``, ``corpus`` (its name, ``sha256``,
            ``lines``, ``sequences``, ``tokens``), ``seed``, ``settings``, ``versions``, ``command``.
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
        """The table called ``name``.

        Raises:
            InvalidInputError: if there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        have = ", ".join(table.name for table in self.tables)
        raise InvalidInputError(f"got the table {name}; the result of {self.analysis} has {have}")
