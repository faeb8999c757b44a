"""Formats tokens and scores for display."""

import math
from collections.abc import Sequence

from captum_norm.errors import InvalidInputError
from captum_norm.text.characters import spelled_out


def printable(token: str) -> str:
    r"""Spell out the unprintable characters of a token, and show an empty one as ∅.

    Example:
        >>> printable("a\x1b[31m"), printable("")
        ('a\\x1b[31m', '∅')
    """
    return spelled_out(token) or "∅"


def shortened(token: str, width: int) -> str:
    """Make a token printable and truncate it to ``width`` characters, with an ellipsis."""
    shown = printable(token)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


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
