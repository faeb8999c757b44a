"""Creates the tables for figure, page and terminal, with rows by descending relevance gain."""

from collections.abc import Iterator
from typing import Any, get_args

from captum_norm.lab.comparison.results import MEASURES, Comparison, Measure
from captum_norm.lab.evaluation.perturbation import Output

BOLD = (
    "Bold: no method is better by more than chance (sign-flip test over examples, p < 0.05); nothing is bold where no "
    "method is worse."
)
"""What bold numbers say."""


def shown_measures(comparison: Comparison) -> list[Measure]:
    """Return the measures that are defined for some method; logits have no log-odds."""
    means = comparison.means().values()
    return [measure for measure in MEASURES if any(values[measure.name] == values[measure.name] for values in means)]


def method_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the row of each method that was not refused: texts, and whether a number is among the best."""
    means = comparison.means()
    columns = {one.name: {name: means[name][one.name] for name in means} for one in shown_measures(comparison)}
    best = comparison.best()
    for name in comparison.ranking:
        result = comparison.results[name]
        yield {
            "name": name,
            "title": result.title,
            "cells": [{"text": number(column[name]), "best": name in best[one]} for one, column in columns.items()],
            "seconds": f"{result.seconds:.2f}",
            "ratio": f"{result.forward_ratio:.1f}",
            "signature": result.signature,
        }


def agreement_rows(comparison: Comparison) -> list[list[float]]:
    """Return the agreement with rows and columns by descending relevance gain."""
    order = [list(comparison.results).index(name) for name in comparison.ranking]
    rows: list[list[float]] = comparison.agreement[order][:, order].tolist()
    return rows


def number(value: float, decimals: int = 3) -> str:
    """Format a number with a minus sign, and NaN as a dash."""
    return "–" if value != value else f"{value:.{decimals}f}".replace("-", "−")


def example_title(comparison: Comparison, example: int) -> str:
    """Return the number of an example, from 1, and its explained output."""
    target = comparison.targets[example]
    named = comparison.explained in get_args(Output)
    return f"example {example + 1}: " + (f"{comparison.explained} of “{target}”" if named else target)


def example_scores(comparison: Comparison, example: int) -> tuple[list[str], list[bool], list[list[float]]]:
    """Return an example's real tokens, which of them are removable, and their scores, a row for each method."""
    real = comparison.real[example]
    tokens = [token for token, one in zip(comparison.tokens[example], real.tolist(), strict=True) if one]
    scores = [comparison.results[name].scores[example][real].tolist() for name in comparison.ranking]
    return tokens, comparison.removable[example][real].tolist(), scores
