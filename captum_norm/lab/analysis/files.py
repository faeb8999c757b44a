"""Formats the numbers of an analysis as CSV and JSON, and reads them back."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.results import AnalysisResult, Cell, Column, Plot, PlotKind, Table
from captum_norm.results.tables import csv_text, json_text
from captum_norm.text.characters import spelled_out
from captum_norm.text.lines import quoted, read_text

RESULTS = "results.json"
"""The file with the complete result."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LONGEST_REASON = 300
_CELL = int | float | str | None

Made = TypeVar("Made", Column, Plot)


def number_files(result: AnalysisResult) -> dict[str, bytes]:
    """Format each table as ``TABLE.csv`` and the complete result as ``results.json``; returns contents by file name.

    Raises:
        InvalidInputError: a name is not unique or cannot be a file name, or a number is not finite.
    """
    _check(result)
    return {f"{table.name}.csv": _csv(table) for table in result.tables} | {RESULTS: _json(result)}


def read_result(directory: str | os.PathLike[str]) -> AnalysisResult:
    """Read a result from the folder into which :func:`captum_norm.show.write_report` wrote it.

    Raises:
        InvalidInputError: the folder has no ``results.json``, or the file is not the result of an analysis.
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
        raise InvalidInputError(f"{found}: {spelled_out(str(error))[:_LONGEST_REASON]}") from error
    return result


def _result(told: Any) -> AnalysisResult:
    """Parse a result.

    Raises:
        AttributeError: the document is something else.
        KeyError: likewise.
        TypeError: likewise.
        InvalidInputError: a row has not as many cells as there are columns.
    """
    tables = [
        Table(
            name,
            _checked(str, table["title"], "title"),
            tuple(_parsed(Column, column) for column in table["columns"]),
            [tuple(_checked(_CELL, cell, f"a cell of {name}") for cell in row) for row in table["rows"]],
        )
        for name, table in told["tables"].items()
    ]
    return AnalysisResult(
        analysis=_checked(str, told["analysis"], "analysis"),
        description=_checked(str, told["description"], "description"),
        summary={name: _checked(float | int | None, value, name) for name, value in told["summary"].items()},
        tables=tables,
        plots=[_parsed(Plot, plot) for plot in told["plots"]],
        metadata=_checked(dict, told["metadata"], "metadata"),
    )


def _parsed(kind: type[Made], told: Mapping[str, Any]) -> Made:
    """Parse a column or plot, whose fields are text, None or, if the default is boolean, boolean."""
    kinds = {field.name: bool if isinstance(field.default, bool) else str | None for field in fields(kind)}
    for name, value in told.items():
        _checked(kinds.get(name), value, name)
    if "kind" in kinds and told.get("kind") not in get_args(PlotKind):
        raise ValueError(f"got the kind of plot {quoted(told.get('kind'))}")
    return kind(**told)


def _checked(kind: Any, value: Any, name: str) -> Any:
    """Return a value of the expected kind; raises TypeError otherwise."""
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
            raise InvalidInputError(f"got two {what}s named {name}; expected unique names")


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
