"""Checks and formats the tokens and numbers to show."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError
from captum_norm.text.characters import spelled_out

Numbers = Any
"""A tensor of any dtype on any device, an array of numpy, or a list of numbers or of such lists."""


def printable(token: str) -> str:
    r"""Spell out the unprintable characters of a token, and show an empty one as ∅.

    Example:
        >>> printable("a\x1b[31m"), printable("")
        ('a\\x1b[31m', '∅')
    """
    return spelled_out(token) or "∅"


def shortened(token: str, width: int) -> str:
    """Make a token printable and truncate it to ``width`` characters, with an ellipsis."""
    text = printable(token)
    return text if len(text) <= width else text[: width - 1] + "…"


def thinned(count: int, room: int) -> list[int]:
    """Choose evenly spaced indices of ``count`` labels, starting with the first, so that at most ``room`` are shown."""
    return list(range(0, count, max(1, -(-count // room))))


def formatted(scores: Sequence[float]) -> list[str]:
    """Format scores with the same number of decimals, which gives the largest one four significant digits.

    Example:
        >>> formatted([0.1234567, 0.01]), formatted([12.3456, 1.0])
        (['0.1235', '0.0100'], ['12.35', '1.00'])
    """
    top = max(map(abs, scores), default=0.0)
    decimals = min(max(3 - math.floor(math.log10(top)), 0), 12) if top > 0 else 4
    return [f"{score:.{decimals}f}" for score in scores]


def same_length(tokens: Sequence[str], other: int, what: str) -> None:
    """Check that there are as many tokens as ``what`` has entries."""
    if len(tokens) != other:
        raise InvalidInputError(f"{len(tokens)} tokens do not fit {what} of {other}: give one token for each")


def as_array(numbers: Numbers, what: str = "numbers") -> npt.NDArray[np.float64]:
    """Convert numbers to an array; InvalidInputError if they are no numbers, or lists of different lengths."""
    given = numbers.detach().double().cpu().numpy() if isinstance(numbers, Tensor) else numbers
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"got {what} {quoted(numbers)}; expected a tensor, an array or a list of numbers"
        ) from error
