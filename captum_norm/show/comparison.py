"""Shows a comparison of methods: as a figure, on a page and in the terminal, with rows by descending relevance gain."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from captum_norm.lab.comparison import MEASURES, Comparison, Measure
from captum_norm.lab.evaluation.perturbation import Output
from captum_norm.results import make_figure, make_page
from captum_norm.show import page
from captum_norm.show.colors import color_table, signed_shares_of
from captum_norm.show.figures import StandaloneFigure, font_families
from captum_norm.show.page.results import tokens_of
from captum_norm.show.terminal import has_colors, marked_tokens, signed_tokens
from captum_norm.show.text import shortened
from captum_norm.text.words import words_of_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

BOLD = (
    "Bold: no method is better by more than chance (sign-flip test over examples, p < 0.05); nothing is bold where no "
    "method is worse."
)
"""What bold numbers say."""

_ROW = 0.27
_MOST_TOKENS = 40
_LABEL_WIDTH = 14
_MOST_EXAMPLES = 20
_TITLE = 60
_UNLIMITED = 10_000
# Blue and orange of Okabe & Ito, distinct for every kind of colour vision.
_BLUE, _ORANGE = "#0072b2", "#e69f00"
# The frame of the curves in a drawing of 200 × 120.
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 194.0, 6.0, 100.0
_LIGHT, _DARK = (
    {"ink": "#1b2430", "quiet": "#566273", "line": "#d5dce5", "most": _BLUE},
    {"ink": "#e6ebf2", "quiet": "#9aa7b8", "line": "#303a48", "most": "#56b4e9"},
)


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


@make_figure.register(Comparison)
def draw_comparison(comparison: Comparison) -> "Figure":
    """Draw the scores of the first example's tokens, relevance gain, cost and agreement, with a row for each method."""
    names = comparison.ranking
    height = max(_ROW * len(names), 1.4)
    figure = StandaloneFigure(figsize=(13, 2 * height + 3.2), dpi=150, layout="constrained")
    figure.suptitle(f"{comparison.model}: {comparison.explained}", parse_math=False)
    grid = figure.add_gridspec(2, 1)
    above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    _draw_scores(above.subplots(), comparison, names)
    gain, cost, agreement = below.subplots(1, 3, width_ratios=(1, 1, 1.3))
    _draw_gains(gain, comparison, names)
    _draw_costs(cost, comparison, names)
    _draw_agreement(agreement, comparison, names)
    figure.supxlabel(comparison.signature, fontsize=6, color="0.4", parse_math=False)
    return figure


def _draw_scores(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    tokens, removable, scores = example_scores(comparison, 0)
    rows = [signed_shares_of(row, removable) for row in scores]
    shown = slice(0, _MOST_TOKENS)
    image = axes.imshow(np.array(rows)[:, shown], cmap=_signed_colors(), vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(tokens[shown])), [shortened(token, _LABEL_WIDTH) for token in tokens[shown]], rotation=90)
    for text in axes.get_xticklabels():
        text.set(parse_math=False, fontfamily=font_families(), fontsize=8)
    _name_rows(axes, names)
    rest = f", the first {_MOST_TOKENS} tokens" if len(tokens) > _MOST_TOKENS else ""
    axes.set_title(f"scores, {example_title(comparison, 0)}{rest}", fontsize="medium", parse_math=False)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    bar.set_label("share of the method's largest", fontsize=8)


def _draw_gains(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    means = comparison.means()
    values = [means[name]["relevance_gain"] for name in names]
    axes.barh(range(len(names)), values, color=[_BLUE if value >= 0 else _ORANGE for value in values], height=0.7)
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-3, 3), useMathText=True)
    _name_rows(axes, names)
    count = f"{comparison.examples} example{'s' * (comparison.examples != 1)}"
    axes.set_title(f"relevance gain, mean of {count}", fontsize="medium")


def _draw_costs(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    ratios = [comparison.results[name].forward_ratio for name in names]
    axes.scatter(ratios, range(len(names)), color=_BLUE, s=18)
    axes.set_xscale("log")
    if max(ratios) < 10 * min(ratios):  # powers of ten would be too few
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(names)), [""] * len(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="both", color="0.9")
    axes.set_axisbelow(True)
    axes.set_title("time ÷ plain forward pass", fontsize="medium")


def _draw_agreement(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    values = np.array(agreement_rows(comparison))
    axes.imshow(values, cmap=_signed_colors(), vmin=-1, vmax=1, aspect="auto")
    for row, column in np.ndindex(values.shape):
        value = float(values[row, column])
        color = "white" if abs(value) > 0.5 else "black"
        axes.text(column, row, number(100 * value, 0), ha="center", va="center", fontsize=5, color=color)
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), [""] * len(names))
    axes.set_title("agreement: Spearman's ρ × 100", fontsize="medium")


def _name_rows(axes: "Axes", names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for text in axes.get_yticklabels():
        text.set(parse_math=False, fontsize=8)


def _signed_colors() -> "ListedColormap":
    from matplotlib.colors import ListedColormap

    table = np.concatenate([color_table(below=True)[::-1], color_table()])
    return ListedColormap(table / 255, name="captum_norm_signed")


def render_comparison(comparison: Comparison) -> str:
    """Render the page; everything in it is escaped."""
    return page.render(comparison_page(comparison))


@make_page.register
def comparison_page(comparison: Comparison) -> page.Page:
    """Put a comparison on a page: measures and cost, the texts with a row for each method, agreement and curves."""
    examples = range(min(comparison.examples, _MOST_EXAMPLES))
    left_out = f"Shown are the first {len(examples)} of {comparison.examples} texts. The measures are of all."
    tables = [_measure_table(comparison), _agreement_table(comparison)]
    if comparison.refused:
        tables.append(_word_table("Methods that were refused", "reason", comparison.refused))
    signatures = {name: comparison.results[name].signature for name in comparison.ranking}
    return page.Page(
        f"Explanations of {comparison.model} compared",
        facts=comparison.facts(),
        examples=[_page_example(comparison, example) for example in examples],
        tables=[*tables, _word_table("Signatures", "signature", signatures, folded=True)],
        figures=_curves(comparison),
        notes=[left_out] if len(examples) < comparison.examples else [],
    )


def _page_example(comparison: Comparison, example: int) -> page.Example:
    tokens, removable, rows = example_scores(comparison, example)
    return page.Example(
        shortened(" ".join(tokens), _TITLE),
        tokens_of(words_of_tokens(tokens)),
        facts={"explained": example_title(comparison, example)},
        scores=[
            page.Scores(name, "score", row, signed=any(score < 0 for score in row))
            for name, row in zip(comparison.ranking, rows, strict=True)
        ],
        counted=removable,
    )


def _measure_table(comparison: Comparison) -> page.Table:
    measures = shown_measures(comparison)
    means = comparison.means()
    rows = list(method_rows(comparison))
    return page.Table(
        "Faithfulness and cost",
        [
            page.Column("method"),
            *(
                page.Column(
                    f"{one.title} {one.arrow}",
                    "number",
                    digits=3,
                    meaning=f"{one.meaning}; {'higher' if one.higher else 'lower'} is better",
                )
                for one in measures
            ),
            page.Column("seconds", "number", digits=2),
            page.Column(
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


def _agreement_table(comparison: Comparison) -> page.Table:
    return page.Table(
        "Agreement",
        [
            page.Column("method"),
            *(
                page.Column(str(place), "heat", digits=2, meaning=name)
                for place, name in enumerate(comparison.ranking, 1)
            ),
        ],
        [
            [f"{place} {name}", *values]
            for place, (name, values) in enumerate(zip(comparison.ranking, agreement_rows(comparison), strict=True), 1)
        ],
        note="Spearman's ρ of two methods' scores of the tokens that may be removed, mean over examples.",
    )


def _word_table(title: str, what: str, words: Mapping[str, str], *, folded: bool = False) -> page.Table:
    return page.Table(title, [page.Column("method"), page.Column(what)], list(words.items()), folded=folded)


def _curves(comparison: Comparison) -> list[page.Figure]:
    """Draw each method's curves; all have the same axes."""
    results = {name: comparison.results[name].faithfulness for name in comparison.ranking}
    curves = [[one.morf.mean(0), one.lerf.mean(0)] for one in results.values()]
    low = min(float(curve.min()) for pair in curves for curve in pair)
    high = max(float(curve.max()) for pair in curves for curve in pair)
    watched = "the probability" if comparison.explained == "probability" else "the output"
    return [
        page.Figure(
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
        f"<style>{_curve_style(_LIGHT)}@media(prefers-color-scheme:dark){{{_curve_style(_DARK)}}}</style>"
        f'<path class="axis" d="M{_LEFT:.0f} {_TOP:.0f}V{_BOTTOM:.0f}H{_RIGHT:.0f}"/>'
        f'<text x="30" y="12" text-anchor="end">{top}</text><text x="30" y="101" text-anchor="end">{bottom}</text>'
        '<text x="34" y="114">0</text><text x="194" y="114" text-anchor="end">1</text>'
        f'<path class="between" d="{_path([*up, *reversed(down)])}Z"/>'
        f'<path class="least" d="{_path(up)}"/><path class="most" d="{_path(down)}"/></svg>'
    )


def _curve_style(colors: Mapping[str, str]) -> str:
    return (
        f"text{{fill:{colors['quiet']};font:10px system-ui,sans-serif}}"
        f".axis{{stroke:{colors['line']};fill:none}}.between{{fill:{colors['ink']};fill-opacity:.1}}"
        f".most{{stroke:{colors['most']};fill:none;stroke-width:2}}"
        f".least{{stroke:{_ORANGE};fill:none;stroke-width:2;stroke-dasharray:5 3}}"
    )


def _path(points: list[str]) -> str:
    return "M" + "L".join(points)


def show_comparison(comparison: Comparison, console: Console, *, words: bool = False) -> None:
    """Print the facts of a comparison, the table of methods, the first example's scores, and agreement.

    Args:
        comparison: the comparison.
        console: where to print.
        words: print words instead of tokens, with the sums of their tokens' scores.
    """
    for name, value in comparison.facts().items():
        _say(console, f"{name}: {value}")
    console.print()
    _print_full(console, _drawn_methods(comparison))
    _say(
        console,
        "Rows by descending gain; ↑ higher is better, ↓ lower; × forward: ÷ the time of the plain forward pass.",
    )
    _say(console, BOLD)
    for name, reason in comparison.refused.items():
        _say(console, f"refused: {name}: {reason}")
    _say(console, f"\n{example_title(comparison, 0)}")
    console.print(_drawn_tokens(comparison, console, words=words))
    count = len(comparison.results)
    tables = [
        _drawn_agreement(comparison, count, named=True),
        *(_drawn_agreement(comparison, most) for most in range(count, 1, -1)),
    ]
    fitting = next((table for table in tables if _full_width(console, table) <= console.width), tables[-1])
    left_out = count - len(fitting.columns[1:])
    _say(console, "\nAgreement: Spearman's ρ × 100" + (f", with the first {count - left_out}" if left_out else ""))
    _print_full(console, fitting)


def _say(console: Console, text: str) -> None:
    """Print literally: ``:mask:`` in a signature is no emoji."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _full_width(console: Console, table: Table) -> int:
    """The full width of a table."""
    return console.measure(table, options=console.options.update(max_width=_UNLIMITED)).maximum


def _print_full(console: Console, table: Table) -> None:
    """Print a table at its full width, since truncated names and numbers are useless."""
    table.width = _full_width(console, table)
    console.print(table, crop=False)


def _drawn_methods(comparison: Comparison) -> Table:
    table = _plain_table("method")
    table.columns[0].vertical = "bottom"
    titles = [f"{measure.title.replace('-', '- ')} {measure.arrow}" for measure in shown_measures(comparison)]
    for title in (*titles, "time (s)", "× forward"):
        table.add_column("\n".join(title.split()), justify="right", vertical="bottom")
    for row in method_rows(comparison):
        cells = [Text(cell["text"], style="bold" if cell["best"] else "") for cell in row["cells"]]
        table.add_row(Text(row["name"]), *cells, row["seconds"], row["ratio"])
    return table


def _drawn_tokens(comparison: Comparison, console: Console, *, words: bool) -> Table:
    tokens, removable, scores = example_scores(comparison, 0)
    own = words_of_tokens(tokens)
    shown, counted = own.pieces, removable
    if words:
        shown = own.texts
        counted = own.scores(Tensor([removable]), "max")[0].bool().tolist()
        scores = own.scores(Tensor(scores) * Tensor(removable)).tolist()
    draw = signed_tokens if has_colors(console) else marked_tokens
    table = _plain_table("method")
    table.add_column("scores of the tokens")
    for place, (name, row) in enumerate(zip(comparison.ranking, scores, strict=True), 1):
        table.add_row(Text(f"{place} {name}"), draw(shown, signed_shares_of(row, counted)))
    return table


def _drawn_agreement(comparison: Comparison, most: int, *, named: bool = False) -> Table:
    """The agreement of methods with the first ones, which have their numbers in the table of scores."""
    table = _plain_table("")
    for place in range(1, most + 1):
        table.add_column(str(place), justify="right")
    rows = zip(comparison.ranking, agreement_rows(comparison), strict=True)
    for place, (name, values) in enumerate(rows, 1):
        label = f"{place} {name}" if named else str(place)
        table.add_row(Text(label), *(number(100 * value, 0) for value in values[:most]))
    return table


def _plain_table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table
