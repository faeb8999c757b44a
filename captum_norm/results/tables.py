"""Formats results as CSV, JSON and data frames of pandas."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from captum_norm.errors import InvalidInputError
from captum_norm.text.characters import spelled_lines

if TYPE_CHECKING:
    import pandas as pd

_NOT_ASCII = re.compile("[^\n -~]")


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Format rows as CSV, with unprintable characters spelled out, NaN as an empty cell, and a leading ``=`` kept."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows(
        [spelled_lines(cell) if isinstance(cell, str) else without_nan(cell) for cell in row] for row in rows
    )
    return buffer.getvalue()


def csv_records(records: Sequence[Mapping[str, Any]]) -> str:
    """Format records as CSV, see :func:`csv_text`; the first one's keys are the header."""
    names = list(records[0]) if records else []
    return csv_text([names, *([record.get(name) for name in names] for record in records)])


def json_text(content: Any, indent: int | None = None) -> str:
    """Format a value as JSON, with NaN as null, unprintable characters escaped, and a final line feed."""
    text = json.dumps(without_nan(content), ensure_ascii=False, allow_nan=False, indent=indent)
    return _NOT_ASCII.sub(lambda found: _escaped(found[0]), text) + "\n"


def without_nan(value: Any) -> Any:
    """Replace NaN by None in a value made of dictionaries, lists and tuples; JSON and CSV have no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def data_frame(rows: Sequence[Any], columns: list[str] | None = None) -> "pd.DataFrame":
    """Make a data frame of records, or of rows of cells with the names of the columns; refuse if pandas is missing."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise InvalidInputError("data frames need pandas: pip install 'captum-norm[tables]'") from error
    return pd.DataFrame(list(rows), columns=columns)


def _escaped(character: str) -> str:
    return character if spelled_lines(character) == character else json.dumps(character)[1:-1]
