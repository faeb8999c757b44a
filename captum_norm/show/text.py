"""Checks and formats what figures, pages and the terminal show: tokens, numbers, and the rows of a comparison."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import regex
from torch import Tensor

from captum_norm.attr.components import CHANGE
from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError
from captum_norm.lab.comparison import MEASURES, Comparison, Measure
from captum_norm.results.components import ComponentScore, ComponentScores
from captum_norm.text.characters import spelled_out
from captum_norm.text.words import words_of_tokens

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
    return "–" if value != value else f"{value:z.{decimals}f}".replace("-", "−")


def answer_of(subject: str, names: Sequence[str], scores: Numbers) -> str:
    """Say in a sentence on what something rests: the largest shares, and the least one or those against it."""
    values = as_array(scores)
    total = float(abs(values).sum()) or 1.0
    order = sorted(range(len(values)), key=lambda place: -values[place])

    def told(places: Sequence[int]) -> str:
        return _listed([f"{_quoted(names[place])} ({share(values[place] / total)})" for place in places])

    most = [place for place in order if values[place] > 0]
    against = [place for place in reversed(order) if values[place] < 0][:2]
    parts = [f"{subject} rests most on {told(most[:3])}"] if most else []
    if against:
        parts.append(f"{told(against)} {'speak' if len(against) > 1 else 'speaks'} against it")
    elif len(most) > 3:
        parts.append(f"least on {told(most[-1:])}")
    return f"{', '.join(parts)}." if parts else ""


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _quoted(name: str) -> str:
    return f"“{shortened(name.strip() or name, 40)}”"


def components_answer(single: ComponentScores) -> str:
    """Say which components of each kind carry most of an example's output, speak against it or would change it most.

    These have at least half of the largest absolute score. Residual streams, those that enter the first layer, are only
    told of where there is no other kind.
    """
    told, subject, changed = list[str](), components_subject(single), single.unit == CHANGE
    for kind in [kind for kind in single.parts if kind != "residual"] or single.parts:
        rows = [row for row in single.top(sys.maxsize, kind) if row.score and (kind != "residual" or not row.layer)]
        strong = [row for row in rows if abs(row.score) >= abs(rows[0].score) / 2]
        patching, parts = "patching {0} changes {1} most ({2})", list[str]()
        carry = [row for row in strong if row.score > 0][:3], "{0} carries {2} of {1}", "{0} carry {2} of {1}"
        against = "{0} speaks against {1} ({2})"
        oppose = [row for row in strong if row.score < 0][:2], against, against.replace("speaks", "speak")
        for some, one, several in [(strong[:3], patching, patching)] if changed else [carry, oppose]:
            if some:
                names = _listed([component_place(single, row) for row in some])
                names = f"{noun_of(kind)}{'s' * (len(some) > 1)} {names}"
                part = share(sum(abs(row.score) for row in some) / sum(abs(row.score) for row in rows))
                parts.append((several if some[1:] else one).format(names, subject, part))
                subject = "it"
        told += [f"{text[0].upper()}{text[1:]}." for text in [", ".join(parts)] if text]
    what = "changes" if changed else "contributions"
    return " ".join([*told, f"Shares are of the sum of absolute {what} of the same kind."] if told else [])


def components_subject(single: ComponentScores) -> str:
    """Quote the output that an example's components contribute to; both of a difference."""
    output = single.outputs[0]
    names = output.name.split(" − ") if isinstance(output.index, tuple) else [output.name]
    return " − ".join(f"“{shortened(name, 40)}”" for name in names)


def noun_of(kind: str) -> str:
    """Name one component of a kind."""
    nouns = {"residual": "residual stream", "feed_forward": "feed-forward network"}
    return nouns.get(kind, kind.removesuffix("s"))


def component_place(single: ComponentScores, row: ComponentScore) -> str:
    """Say where a component is: its layer and number, its token, and its stack if there are several."""
    if row.kind == "edges":  # from “a1.h2->m3” to “head 1.2 → network 3”
        name: str = regex.sub(r"\bm(\d)", r"network \1", regex.sub(r"a(\d+)\.h", r"head \1.", row.name))
        name = name.replace("<q>", "’s queries").replace("<k>", "’s keys").replace("<v>", "’s values")
        return name.replace("->", " → ").replace("logits", "output")
    at = "" if row.position is None else f" at {_quoted(component_tokens(single, row.stack)[row.position])}"
    return f"{row.name}{at}" + f" ({row.stack})" * (len(single.parts[row.kind]) > 1)


def component_tokens(single: ComponentScores, stack: str) -> Sequence[str]:
    """Return the tokens of a stack as people write them, or the numbers of their positions."""
    texts, count = single.tokens.get(stack), single.real[stack].shape[1]
    return [f"position {place}" for place in range(count)] if texts is None else words_of_tokens(texts[0]).pieces


def share(value: float) -> str:
    """Format a share in percent, as short as it can be."""
    size = abs(value)
    shown = f"{100 * value:.{1 if 0 < size < 0.0995 else 0}f} %".replace("-", "−")
    return "< 0.1 %" if 0 < size < 0.0005 else shown


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


def with_interval(row: Mapping[str, Any], measure: str) -> str:
    """Format a measure of a row of :meth:`AnswerComparison.records` with half its interval."""
    half = decimal((row[f"{measure}_high"] - row[f"{measure}_low"]) / 2, 2)
    return f"{decimal(row[measure], 2)} ± {half}".replace("– ± –", "–")


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
