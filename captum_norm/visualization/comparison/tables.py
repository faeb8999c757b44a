"""Makes the tables that figure, page and terminal show, rows by falling relevance gain, the best in bold."""

from dataclasses import dataclass
from typing import get_args

from captum_norm.comparison.measures import MEASURES, Measure
from captum_norm.comparison.results import Comparison
from captum_norm.evaluation.perturbation import Output


@dataclass(frozen=True)
class Cell:
    """A number as it is shown; ``best`` of its column."""

    text: str
    best: bool


@dataclass(frozen=True)
class MethodRow:
    """A method's row."""

    name: str
    title: str
    cells: list[Cell]
    seconds: str
    ratio: str
    signature: str


def shown_measures(comparison: Comparison) -> list[Measure]:
    """Those that are defined for some method: logits have no log-odds."""
    means = comparison.means().values()
    return [measure for measure in MEASURES if any(values[measure.name] == values[measure.name] for values in means)]


def method_rows(comparison: Comparison) -> list[MethodRow]:
    """The methods that were not refused."""
    means, measures = comparison.means(), shown_measures(comparison)
    best = {
        measure.name: measure.best({name: values[measure.name] for name, values in means.items()})
        for measure in measures
    }
    return [
        MethodRow(
            name=name,
            title=(result := comparison.results[name]).title,
            cells=[Cell(number(means[name][one.name]), name in best[one.name]) for one in measures],
            seconds=f"{result.seconds:.2f}",
            ratio=f"{result.forward_ratio:.1f}",
            signature=result.signature,
        )
        for name in comparison.ranking
    ]


def agreement_rows(comparison: Comparison) -> list[list[float]]:
    """Agreement with rows and columns by falling relevance gain."""
    order = [list(comparison.results).index(name) for name in comparison.ranking]
    rows: list[list[float]] = comparison.agreement[order][:, order].tolist()
    return rows


def number(value: float, decimals: int = 3) -> str:
    """With a minus sign as wide as a digit, and a dash for NaN."""
    return "–" if value != value else f"{value:.{decimals}f}".replace("-", "−")


def example_title(comparison: Comparison, example: int) -> str:
    """An example's number, from 1, and what is explained of it."""
    target = comparison.targets[example]
    named = comparison.explained in get_args(Output)
    return f"example {example + 1}: " + (f"{comparison.explained} of “{target}”" if named else target)
