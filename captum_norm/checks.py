"""Checks arguments other than inputs; each error says what was passed and what was expected."""

import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import partial
from operator import index as integer
from typing import Any, TypeVar

from captum_norm.errors import InvalidInputError

T = TypeVar("T")
_LONGEST_QUOTE, _LONGEST_NAME = 80, 240


def quoted(value: object) -> str:
    """Quote a value for a message: its ``repr`` on one line, truncated if it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _LONGEST_QUOTE else f"{value[:_LONGEST_QUOTE]!r} …"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]} …"


def quoted_name(name: str) -> str:
    """Format a name for a message: bare, or quoted if it is empty or unprintable; of a long one both its ends."""
    half = _LONGEST_NAME // 2
    name = name if len(name) <= _LONGEST_NAME else f"{name[:half]} … {name[-half:]}"
    return name if name and name.isprintable() else repr(name)


def check_index(name: str, value: object, expected: str = "an integer") -> int:
    """Convert any kind of integer except a boolean, within 64 bits; ``expected`` says which for the message."""
    try:
        number = None if isinstance(value, bool) else integer(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a meta tensor
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise InvalidInputError(f"got {name} {quoted(value)}; expected {expected}")
    return number


def check_count(name: str, value: object, most: int | None = None) -> int:
    """Convert an integer from 1 to ``most``."""
    number = check_index(name, value)
    if number < 1 or (most is not None and number > most):
        limit = "" if most is None else f", at most {most:,}"
        raise InvalidInputError(f"got {name}={number}; expected at least 1{limit}")
    return number


def check_layer(value: object) -> int:
    """Convert the number of a layer."""
    return check_index("layer", value, "its number: 0 for the first, -1 for the last")


def check_indices(name: str, value: object) -> list[int]:
    """Convert a sequence, array or tensor of integers."""
    convert = check_layer if name == "layer" else partial(check_index, name)
    return [convert(entry) for entry in check_entries(f"{name}s", value, "integers, such as [0, 1]")]


def check_entries(name: str, value: object, what: str) -> list[Any]:
    """List the entries of a sequence, or an array or tensor with one axis; ``what`` describes them in the message."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        try:
            entries: Any = value.tolist() if hasattr(value, "tolist") else list(value)
            if isinstance(entries, list):
                return entries
        except (TypeError, RuntimeError):
            pass
    raise InvalidInputError(f"got {name} {quoted(value)}; expected a sequence of {what}")


def check_number(name: str, value: object) -> float:
    """Convert a finite number."""
    if not isinstance(value, (bool, str, bytes)) and not getattr(value, "ndim", 0):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise InvalidInputError(f"got {name} {quoted(value)}; expected a number")


def check_bool(name: str, value: object) -> bool:
    """Convert a boolean, also of numpy."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise InvalidInputError(f"got {name}={quoted(value)}; expected True or False")


def check_choice(name: str, value: object, choices: Collection[T]) -> T:
    """Return the choice that equals a value."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    expected = ", ".join(map(str, choices))
    raise InvalidInputError(f"got {name}={quoted(value)}; expected one of {expected}{did_you_mean(value, choices)}")


def did_you_mean(value: object, names: Iterable[object]) -> str:
    """Return the end of a message about a name: the one that is spelt almost like it, if there is one.

    >>> did_you_mean("nrom", ["norm", "alti"])
    '; did you mean norm?'
    """
    known = {name.lower(): name for name in names if isinstance(name, str)}
    close = get_close_matches(value.lower(), known, n=1) if isinstance(value, str) else []
    return f"; did you mean {known[close[0]]}?" if close else ""
