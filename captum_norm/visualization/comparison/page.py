"""Renders a comparison of methods as one self-contained HTML page."""

import math
from typing import Any

from torch import Tensor

from captum_norm.comparison.results import Comparison
from captum_norm.visualization.colors import color_of, signed_color_of, signed_shares_of
from captum_norm.visualization.comparison.tables import (
    agreement_rows,
    example_scores,
    example_title,
    method_rows,
    number,
    shown_measures,
)
from captum_norm.visualization.static_page import on_ground, ramp, template
from captum_norm.visualization.text import printable

_MOST_EXAMPLES = 20
# The frame of the curves, in the coordinates of the template.
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 194.0, 6.0, 100.0


def render_comparison(comparison: Comparison) -> str:
    """Render the page; everything in it is escaped."""
    low, high = _bounds(comparison)
    return template("comparison.html").render(
        title=f"Explanations of {comparison.model} compared",
        facts=comparison.facts(),
        measures=shown_measures(comparison),
        rows=list(method_rows(comparison)),
        examples=comparison.examples,
        refused=comparison.refused,
        ramp=ramp(color_of),
        ramp_below=ramp(lambda share: signed_color_of(-share)),
        texts=[_text(comparison, example) for example in range(min(comparison.examples, _MOST_EXAMPLES))],
        watched="the probability" if comparison.explained == "probability" else "the output",
        curves=_curves(comparison, low, high),
        top=f"{high:.2g}".replace("-", "−"),
        bottom=f"{low:.2g}".replace("-", "−"),
        matrix=_matrix(comparison),
    )


def _text(comparison: Comparison, example: int) -> dict[str, Any]:
    tokens, removable, scores = example_scores(comparison, example)
    rows = []
    for name, row in zip(comparison.ranking, scores, strict=True):
        entries = zip(tokens, row, signed_shares_of(row, removable), removable, strict=True)
        rows.append({"title": comparison.results[name].title, "tokens": [_token(*entry) for entry in entries]})
    return {"title": example_title(comparison, example), "rows": rows}


def _token(token: str, score: float, share: float, removable: bool) -> dict[str, str | None]:
    colors = on_ground(signed_color_of(share)) if removable else {"ground": None, "ink": None}
    return {"text": printable(token), "score": f"{score:.4g}", **colors}


def _bounds(comparison: Comparison) -> tuple[float, float]:
    """The range of all curves."""
    faithfulness = [result.faithfulness for result in comparison.results.values()]
    means = [float(value) for one in faithfulness for curve in (one.morf, one.lerf) for value in curve.mean(0)]
    low, high = min(means), max(means)
    return low, high if high > low else low + 1


def _curves(comparison: Comparison, low: float, high: float) -> list[dict[str, str]]:
    def points(curve: Tensor) -> list[str]:
        values = curve.mean(0).tolist()
        return [
            f"{_LEFT + (_RIGHT - _LEFT) * step / (len(values) - 1):.1f} "
            f"{_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low):.1f}"
            for step, value in enumerate(values)
        ]

    shown = []
    for name in comparison.ranking:
        result = comparison.results[name]
        most, least = points(result.faithfulness.morf), points(result.faithfulness.lerf)
        shown.append(
            {
                "title": result.title,
                "gain": number(float(result.faithfulness.relevance_gain.mean())),
                "most": _path(most),
                "least": _path(least),
                "between": _path([*least, *reversed(most)]) + "Z",
            }
        )
    return shown


def _path(points: list[str]) -> str:
    return "M" + "L".join(points)


def _matrix(comparison: Comparison) -> list[dict[str, Any]]:
    titles = [comparison.results[name].title for name in comparison.ranking]
    return [
        {
            "title": title,
            "cells": [
                {"title": f"{title}, {other}", "text": number(value, 2)}
                | on_ground(signed_color_of(0.0 if math.isnan(value) else value))
                for other, value in zip(titles, values, strict=True)
            ],
        }
        for title, values in zip(titles, agreement_rows(comparison), strict=True)
    ]
