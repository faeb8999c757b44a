"""Checks and formats what figures, pages and the terminal show: tokens, numbers, and the rows of a comparison."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import regex
from torch import Tensor

from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError
from captum_norm.lab.comparison import MEASURES, Comparison, Measure
from captum_norm.text.characters import spelled_out

BOLD = (
    "Bold: no method is better by more than chance (sign-flip test over examples, p < 0.05); "
    "a column without significant differences has no bold."
)
"""What bold numbers say."""

Numbers = Any
"""A tensor of any dtype on any device, an array of numpy, or a list of numbers or of such lists."""


def printable(token: str) -> str:
    """Spell out the unprintable characters of a token, and show an empty one as ∅."""
    return spelled_out(token) or "∅"


def shortened(token: str, width: int) -> str:
    """Make a token printable and truncate it to ``width`` characters, with an ellipsis."""
    characters = regex.findall(r"\X", printable(token))
    return "".join(characters if len(characters) <= width else [*characters[: width - 1], "…"])


def formatted(scores: Sequence[float]) -> list[str]:
    """Format scores with the same number of decimals, which gives the largest one four significant digits."""
    top = max(map(abs, scores), default=0.0)
    decimals = min(max(3 - math.floor(math.log10(top)), 0), 12) if top > 0 else 4
    return [f"{score:.{decimals}f}" for score in scores]


def decimal(value: float, decimals: int = 3) -> str:
    """Format a number with a minus sign, and NaN as a dash."""
    return "–" if value != value else f"{value:.{decimals}f}".replace("-", "−")


def answer_of(subject: str, names: Sequence[str], scores: Numbers) -> str:
    """Say in a sentence on what something rests: the largest shares, and the least one or those against it."""
    values = as_array(scores)
    total = float(abs(values).sum()) or 1.0
    order = sorted(range(len(values)), key=lambda place: -values[place])

    def told(places: Sequence[int]) -> str:
        texts = [
            f"“{shortened(names[place].strip() or names[place], 40)}” ({share(values[place] / total)})"
            for place in places
        ]
        return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))

    most = [place for place in order if values[place] > 0]
    against = [place for place in reversed(order) if values[place] < 0][:2]
    parts = [f"{subject} rests most on {told(most[:3])}"] if most else []
    if against:
        parts.append(f"{told(against)} {'speak' if len(against) > 1 else 'speaks'} against it")
    elif len(most) > 3:
        parts.append(f"least on {told(most[-1:])}")
    return f"{', '.join(parts)}." if parts else ""


def share(value: float) -> str:
    """Format a share in percent, as short as it can be."""
    size = abs(value)
    return (
        f"{100 * value:.{1 if 0 < size < 0.0995 else 0}f} %".replace("-", "−") if not 0 < size < 0.0005 else "< 0.1 %"
    )


def check_length(tokens: Sequence[str], other: int, what: str) -> None:
    """Check that there are as many tokens as ``what`` has entries."""
    if len(tokens) != other:
        raise InvalidInputError(f"{len(tokens)} tokens do not fit {what} of {other}: give one token for each")


def as_array(numbers: Numbers, what: str = "numbers") -> npt.NDArray[np.float64]:
    """Convert numbers to an array."""
    try:
        return np.asarray(numbers.detach().double().cpu() if isinstance(numbers, Tensor) else numbers, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"got {what} {quoted(numbers)}; expected a tensor, an array or a list of numbers"
        ) from error


def shown_measures(comparison: Comparison) -> list[Measure]:
    """Return the measures that are defined for some method; logits have no log-odds."""
    means = comparison.means().values()
    return [measure for measure in MEASURES if not all(math.isnan(values[measure.name]) for values in means)]


def example_title(comparison: Comparison, example: int) -> str:
    """Return the number of an example, from 1, and its explained output."""
    return f"example {example + 1}: {comparison.outputs[example]}"


def example_scores(comparison: Comparison, example: int) -> tuple[list[str], list[bool], list[list[float]]]:
    """Return an example's real tokens, which of them are removable, and their scores, a row for each method."""
    single = comparison[example]
    scores = [single.results[name].scores[0].tolist() for name in comparison.ranking]
    return list(single.tokens[0]), single.removable[0].tolist(), scores
