"""Renders a comparison of methods as one HTML page that loads nothing."""

from dataclasses import dataclass

from torch import Tensor

from captum_norm.comparison.results import Comparison
from captum_norm.visualization.colors import color_of, hex_of, ink_on, signed_color_of, signed_shares_of
from captum_norm.visualization.comparison.tables import (
    agreement_rows,
    example_title,
    method_rows,
    number,
    shown_measures,
)
from captum_norm.visualization.page import ramp, template
from captum_norm.visualization.text import printable

_MOST_EXAMPLES = 20
# The curves' frame in the coordinates of the template's drawing.
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 194.0, 6.0, 100.0


@dataclass(frozen=True)
class _Token:
    text: str
    score: str
    ground: str | None
    ink: str | None


@dataclass(frozen=True)
class _TokenRow:
    title: str
    tokens: list[_Token]


@dataclass(frozen=True)
class _Text:
    title: str
    rows: list[_TokenRow]


@dataclass(frozen=True)
class _Curve:
    title: str
    gain: str
    most: str
    least: str
    between: str


@dataclass(frozen=True)
class _MatrixCell:
    text: str
    title: str
    ground: str
    ink: str


@dataclass(frozen=True)
class _MatrixRow:
    title: str
    cells: list[_MatrixCell]


def render_comparison(comparison: Comparison) -> str:
    """The page; everything in it is escaped."""
    low, high = _bounds(comparison)
    return template("comparison.html").render(
        title=f"Explanations of {comparison.model} compared",
        facts=comparison.facts(),
        measures=shown_measures(comparison),
        rows=method_rows(comparison),
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


def _text(comparison: Comparison, example: int) -> _Text:
    real = comparison.real[example]
    tokens = [token for token, one in zip(comparison.tokens[example], real.tolist(), strict=True) if one]
    counted = comparison.removable[example][real].tolist()
    rows = []
    for name in comparison.ranking:
        result = comparison.results[name]
        scores = result.scores[example][real].tolist()
        shares = signed_shares_of(scores, counted)
        shown = [_token(*entry) for entry in zip(tokens, scores, shares, counted, strict=True)]
        rows.append(_TokenRow(result.title, shown))
    return _Text(example_title(comparison, example), rows)


def _token(token: str, score: float, share: float, counted: bool) -> _Token:
    if not counted:
        return _Token(printable(token), f"{score:.4g}", None, None)
    ground = signed_color_of(share)
    return _Token(printable(token), f"{score:.4g}", hex_of(ground), hex_of(ink_on(ground)))


def _bounds(comparison: Comparison) -> tuple[float, float]:
    """The range of all curves."""
    faithfulness = [result.faithfulness for result in comparison.results.values()]
    means = [float(value) for one in faithfulness for curve in (one.morf, one.lerf) for value in curve.mean(0)]
    low, high = min(means), max(means)
    return low, high if high > low else low + 1


def _curves(comparison: Comparison, low: float, high: float) -> list[_Curve]:
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
        gain = number(float(result.faithfulness.relevance_gain.mean()))
        around = _path([*least, *reversed(most)]) + "Z"
        shown.append(_Curve(result.title, gain, _path(most), _path(least), around))
    return shown


def _path(points: list[str]) -> str:
    return "M" + "L".join(points)


def _matrix(comparison: Comparison) -> list[_MatrixRow]:
    titles = [comparison.results[name].title for name in comparison.ranking]
    rows = []
    for title, values in zip(titles, agreement_rows(comparison), strict=True):
        cells = [_cell(f"{title}, {other}", value) for other, value in zip(titles, values, strict=True)]
        rows.append(_MatrixRow(title, cells))
    return rows


def _cell(title: str, value: float) -> _MatrixCell:
    ground = signed_color_of(0.0 if value != value else value)
    return _MatrixCell(number(value, 2), title, hex_of(ground), hex_of(ink_on(ground)))
