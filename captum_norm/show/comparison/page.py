"""Turns a comparison of methods into a page."""

from collections.abc import Mapping

from torch import Tensor

from captum_norm.lab.comparison.results import Comparison
from captum_norm.results import make_page
from captum_norm.show.comparison.tables import (
    BOLD,
    agreement_rows,
    example_scores,
    example_title,
    method_rows,
    number,
    shown_measures,
)
from captum_norm.show.page import Column, Example, Figure, Page, Scores, Table, render
from captum_norm.show.page.results import tokens_of
from captum_norm.show.text import shortened
from captum_norm.text.words import words_of_tokens

_MOST_EXAMPLES = 20
_TITLE = 60
# The frame of the curves in a drawing of 200 × 120.
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 194.0, 6.0, 100.0
_LIGHT, _DARK = (
    {"ink": "#1b2430", "quiet": "#566273", "line": "#d5dce5", "most": "#0072b2"},
    {"ink": "#e6ebf2", "quiet": "#9aa7b8", "line": "#303a48", "most": "#56b4e9"},
)
_LEAST = "#e69f00"


def render_comparison(comparison: Comparison) -> str:
    """Render the page; everything in it is escaped."""
    return render(comparison_page(comparison))


@make_page.register
def comparison_page(comparison: Comparison) -> Page:
    """Put a comparison on a page: measures and cost, the texts with a row for each method, agreement and curves."""
    examples = range(min(comparison.examples, _MOST_EXAMPLES))
    left_out = f"Shown are the first {len(examples)} of {comparison.examples} texts. The measures are of all."
    tables = [_measures(comparison), _agreement(comparison)]
    if comparison.refused:
        tables.append(_words("Methods that were refused", "reason", comparison.refused))
    signatures = {name: comparison.results[name].signature for name in comparison.ranking}
    return Page(
        f"Explanations of {comparison.model} compared",
        facts=comparison.facts(),
        examples=[_example(comparison, example) for example in examples],
        tables=[*tables, _words("Signatures", "signature", signatures, folded=True)],
        figures=_curves(comparison),
        notes=[left_out] if len(examples) < comparison.examples else [],
    )


def _example(comparison: Comparison, example: int) -> Example:
    tokens, removable, rows = example_scores(comparison, example)
    return Example(
        shortened(" ".join(tokens), _TITLE),
        tokens_of(words_of_tokens(tokens)),
        facts={"explained": example_title(comparison, example)},
        scores=[
            Scores(name, "score", row, signed=any(score < 0 for score in row))
            for name, row in zip(comparison.ranking, rows, strict=True)
        ],
        counted=removable,
    )


def _measures(comparison: Comparison) -> Table:
    measures = shown_measures(comparison)
    means = comparison.means()
    rows = list(method_rows(comparison))
    return Table(
        "Faithfulness and cost",
        [
            Column("method"),
            *(
                Column(
                    f"{one.title} {one.arrow}",
                    "number",
                    digits=3,
                    meaning=f"{one.meaning}; {'higher' if one.higher else 'lower'} is better",
                )
                for one in measures
            ),
            Column("seconds", "number", digits=2),
            Column(
                "× forward",
                "number",
                digits=1,
                meaning="time ÷ that of the plain forward pass, one run after a warm-up",
            ),
        ],
        [
            [
                row["name"],
                *(means[row["name"]][one.name] for one in measures),
                comparison.results[row["name"]].seconds,
                comparison.results[row["name"]].forward_ratio,
            ]
            for row in rows
        ],
        strong=[
            (place, 1 + column)
            for place, row in enumerate(rows)
            for column, cell in enumerate(row["cells"])
            if cell["best"]
        ],
        note=f"Means over {comparison.examples} {'example' if comparison.examples == 1 else 'examples'}, by descending "
        f"gain. {BOLD}",
    )


def _agreement(comparison: Comparison) -> Table:
    return Table(
        "Agreement",
        [
            Column("method"),
            *(Column(str(place), "heat", digits=2, meaning=name) for place, name in enumerate(comparison.ranking, 1)),
        ],
        [
            [f"{place} {name}", *values]
            for place, (name, values) in enumerate(zip(comparison.ranking, agreement_rows(comparison), strict=True), 1)
        ],
        note="Spearman's ρ of two methods' scores of the tokens that may be removed, mean over examples.",
    )


def _words(title: str, what: str, words: Mapping[str, str], *, folded: bool = False) -> Table:
    return Table(title, [Column("method"), Column(what)], list(words.items()), folded=folded)


def _curves(comparison: Comparison) -> list[Figure]:
    """Draw each method's curves; all have the same axes."""
    results = {name: comparison.results[name].faithfulness for name in comparison.ranking}
    curves = [[one.morf.mean(0), one.lerf.mean(0)] for one in results.values()]
    low = min(float(curve.min()) for pair in curves for curve in pair)
    high = max(float(curve.max()) for pair in curves for curve in pair)
    watched = "the probability" if comparison.explained == "probability" else "the output"
    return [
        Figure(
            f"{name}: gain {number(float(one.relevance_gain.mean()))}",
            _drawn(most, least, low, high if high > low else low + 1),
            group="What the output does when tokens go",
            note="Solid: most relevant tokens first; dashed: least relevant first. Across: share of tokens removed; "
            f"up: {watched}, mean over examples. The area between is the gain.",
        )
        for (name, one), (most, least) in zip(results.items(), curves, strict=True)
    ]


def _drawn(most: Tensor, least: Tensor, low: float, high: float) -> str:
    def points(curve: Tensor) -> list[str]:
        values = curve.tolist()
        return [
            f"{_LEFT + (_RIGHT - _LEFT) * step / (len(values) - 1):.1f} "
            f"{_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low):.1f}"
            for step, value in enumerate(values)
        ]

    down, up = points(most), points(least)
    top, bottom = (f"{value:.2g}".replace("-", "−") for value in (high, low))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 120" width="200" height="120">'
        f"<style>{_style(_LIGHT)}@media(prefers-color-scheme:dark){{{_style(_DARK)}}}</style>"
        f'<path class="axis" d="M{_LEFT:.0f} {_TOP:.0f}V{_BOTTOM:.0f}H{_RIGHT:.0f}"/>'
        f'<text x="30" y="12" text-anchor="end">{top}</text><text x="30" y="101" text-anchor="end">{bottom}</text>'
        '<text x="34" y="114">0</text><text x="194" y="114" text-anchor="end">1</text>'
        f'<path class="between" d="{_path([*up, *reversed(down)])}Z"/>'
        f'<path class="least" d="{_path(up)}"/><path class="most" d="{_path(down)}"/></svg>'
    )


def _style(colors: Mapping[str, str]) -> str:
    return (
        f"text{{fill:{colors['quiet']};font:10px system-ui,sans-serif}}"
        f".axis{{stroke:{colors['line']};fill:none}}.between{{fill:{colors['ink']};fill-opacity:.1}}"
        f".most{{stroke:{colors['most']};fill:none;stroke-width:2}}"
        f".least{{stroke:{_LEAST};fill:none;stroke-width:2;stroke-dasharray:5 3}}"
    )


def _path(points: list[str]) -> str:
    return "M" + "L".join(points)
