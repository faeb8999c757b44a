"""Layouts declared in a file."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from captum_norm.errors import InvalidInputError
from captum_norm.models.layouts import Layout, Site, register_layout

SITES = frozenset({"residual", "total", "minus"})
KINDS = {field.name: bool if field.name == "normed_input" else str for field in fields(Layout)}
NEEDED = ("attention", "projection", "residual", "total")


def register_layouts(path: str | Path) -> tuple[str, ...]:
    """Declare the layouts in a TOML file: one table for each class of layers, its keys those of :class:`Layout`.

    Args:
        path: the file.

    Returns:
        The names of the classes.

    Raises:
        InvalidInputError: the file cannot be read, or declares something else.

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
        ... ''')
        ...     file.flush()
        ...     register_layouts(file.name)
        ('FiledLayer',)
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInputError(f"cannot read layouts from {path}: {error}") from error
    layouts = {name: _layout(f"[{name}] in {path}", table) for name, table in tables.items()}
    for name, layout in layouts.items():
        register_layout(name, layout)
    return tuple(layouts)


def _layout(place: str, table: Any) -> Layout:
    if not isinstance(table, dict):
        raise InvalidInputError(f"got {place.partition(' ')[0][1:-1]} outside a table; expected [CLASS] before it")
    for key, value in table.items():
        if key not in KINDS:
            raise InvalidInputError(f'got the key "{key}" of {place}; expected some of {", ".join(KINDS)}')
        if not isinstance(value, KINDS[key]):
            kind = "true or false" if KINDS[key] is bool else "a text"
            raise InvalidInputError(f"got {key} = {value!r} of {place}; expected {kind}")
    missing = [key for key in NEEDED if key not in table]
    if missing:
        raise InvalidInputError(f"{place} has no {' and no '.join(missing)}")
    parts: dict[str, Any] = {key: Site.parse(value) if key in SITES else value for key, value in table.items()}
    return Layout(**parts)
