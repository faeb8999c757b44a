"""Reads layouts that are declared in a file."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from captum_norm.errors import InvalidInputError
from captum_norm.models.feed_forward import FeedForwardLayout, register_feed_forward
from captum_norm.models.layouts import Layout, Site, register_layout
from captum_norm.text.lines import error_at, named, quoted, read_text

FEED_FORWARD = "feed_forward"
"""The key of the table, inside that of a class, that describes its feed-forward block."""

_LONGEST_LINE = 2_000

Described = TypeVar("Described", Layout, FeedForwardLayout)


def register_layouts(path: str | Path) -> tuple[str, ...]:
    """Declare the layouts in a TOML file.

    The file has one table for each class of layers, whose keys are the fields of :class:`Layout`. The keys of a table
    ``feed_forward`` inside it are those of :class:`FeedForwardLayout`; that table is enough where attention is found
    automatically.

    Args:
        path: the file.

    Returns:
        The names of the classes.

    Raises:
        InvalidInputError: if the file cannot be read or declares anything else.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write('''
        ... [FiledLayer]
        ... attention = "attention"
        ... projection = "attention.out"
        ... residual = "input"
        ... total = "norm.input"
        ... final_norm = "norm"
        ...
        ... [FiledLayer.feed_forward]
        ... inner = ["up"]
        ... outer = "down"
        ... total = "last_norm.input"
        ... final_norm = "last_norm"
        ... ''')
        ...     file.flush()
        ...     register_layouts(file.name)
        ('FiledLayer',)
    """
    text = read_text(path)
    # tomllib's memory for a key a.b.c… grows with the square of its parts.
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            raise error_at(path, number, f"got {len(line)} characters, expected at most {_LONGEST_LINE}")
    try:
        tables = tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # ValueError: also numbers of too many digits
        raise InvalidInputError(f"cannot read layouts from {path}: {error}") from error
    attention: dict[str, Layout] = {}
    feed_forward: dict[str, FeedForwardLayout] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidInputError(f"{path}: got {named(name)} outside a table; expected [CLASS] before it")
        behind = table.pop(FEED_FORWARD, None)
        if behind is not None:
            feed_forward[name] = _described(FeedForwardLayout, f"[{named(name)}.{FEED_FORWARD}] in {path}", behind)
        if table or behind is None:
            attention[name] = _described(Layout, f"[{named(name)}] in {path}", table)
    for name, layout in attention.items():
        register_layout(name, layout)
    for name, behind in feed_forward.items():
        register_feed_forward(name, behind)
    return tuple(tables)


def _described(kind: type[Described], place: str, table: Any) -> Described:
    if not isinstance(table, Mapping):
        raise InvalidInputError(f"got {quoted(table)} for {place}; expected a table")
    kinds = get_type_hints(kind)
    for key in table:
        if key not in kinds:
            raise InvalidInputError(f'got the key "{named(key)}" of {place}; expected some of {", ".join(kinds)}')
    parts = {
        key: _part(f"{named(key)} = {quoted(value)} of {place}", kinds[key], value) for key, value in table.items()
    }
    missing = [part.name for part in fields(kind) if part.default is MISSING and part.name not in table]
    if missing:
        raise InvalidInputError(f"{place} has no {' and no '.join(missing)}")
    return kind(**parts)


def _part(described: str, kind: Any, value: Any) -> Any:
    """Convert a value to the type of a layout's field."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise InvalidInputError(f"got {described}; expected true or false")
    if kind == tuple[str, ...]:
        if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise InvalidInputError(f"got {described}; expected a list of texts")
    if not isinstance(value, str):
        raise InvalidInputError(f"got {described}; expected a text")
    if kind not in (Site[str], Site[str] | None):
        return value
    try:
        return Site.parse(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, which is not {described}") from error
