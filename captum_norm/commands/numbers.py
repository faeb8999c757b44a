"""Parses numbers on the command line."""

import argparse
import re
from collections.abc import Callable

from captum_norm.text.lines import named

_MOST_DIGITS = 9


def whole_number(expected: str, *, accepts: Callable[[int], bool]) -> Callable[[str], int]:
    """Return an ``argparse`` type for an integer of at most nine digits.

    Args:
        expected: the expected number, for the error message.
        accepts: whether a number from 0 is accepted.

    Example:
        >>> whole_number("a number from 1", accepts=bool)("12")
        12
    """

    def parse(text: str) -> int:
        if text.isdecimal() and len(text) <= _MOST_DIGITS and accepts(int(text)):
            return int(text)
        raise argparse.ArgumentTypeError(f"got {named(text)}; expected {expected}")

    return parse


positive = whole_number("a number from 1", accepts=lambda number: number > 0)
"""An ``argparse`` type: 1, 2, 3, …"""

natural = whole_number("a number from 0", accepts=lambda number: number >= 0)
"""An ``argparse`` type: 0, 1, 2, …"""

resamples = whole_number("0 for none, or at least 2", accepts=lambda number: number != 1)
"""An ``argparse`` type: 0, 2, 3, …"""


def amount(text: str) -> float:
    """Parse a number from 0, such as ``2`` or ``0.5``, for ``argparse``.

    Example:
        >>> amount("0.5")
        0.5
    """
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        return float(text)
    raise argparse.ArgumentTypeError(f"got {named(text)}; expected a number from 0, such as 2 or 0.5")


def share(text: str) -> float:
    """Parse a number from 0 to 1 for ``argparse``.

    Example:
        >>> share("0.5")
        0.5
    """
    if re.fullmatch(r"0?\.[0-9]{1,9}|[01](\.0{0,9})?", text):
        return float(text)
    raise argparse.ArgumentTypeError(f"got {named(text)}; expected a number from 0 to 1, such as 0.5")
