"""Draws a comparison of methods as one figure."""

from typing import TYPE_CHECKING

import numpy as np

from captum_norm.lab.comparison.results import Comparison
from captum_norm.results import make_figure
from captum_norm.show.colors import color_table, signed_shares_of
from captum_norm.show.comparison.tables import agreement_rows, example_scores, example_title, number
from captum_norm.show.figures import StandaloneFigure, font_families
from captum_norm.show.text import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

_ROW = 0.27
_MOST_TOKENS = 40
_LABEL_WIDTH = 14
# Blue and orange of Okabe & Ito, distinct for every kind of colour vision.
_BLUE, _ORANGE = "#0072b2", "#e69f00"


@make_figure.register(Comparison)
def draw_comparison(comparison: Comparison) -> "Figure":
    """Draw the scores of the first example's tokens, relevance gain, cost and agreement, with a row for each method."""
    names = comparison.ranking
    height = max(_ROW * len(names), 1.4)
    figure = StandaloneFigure(figsize=(13, 2 * height + 3.2), dpi=150, layout="constrained")
    figure.suptitle(f"{comparison.model}: {comparison.explained}", parse_math=False)
    grid = figure.add_gridspec(2, 1)
    above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    _scores(above.subplots(), comparison, names)
    gain, cost, agreement = below.subplots(1, 3, width_ratios=(1, 1, 1.3))
    _gains(gain, comparison, names)
    _costs(cost, comparison, names)
    _agreement(agreement, comparison, names)
    figure.supxlabel(comparison.signature, fontsize=6, color="0.4", parse_math=False)
    return figure


def _scores(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    tokens, removable, scores = example_scores(comparison, 0)
    rows = [signed_shares_of(row, removable) for row in scores]
    shown = slice(0, _MOST_TOKENS)
    image = axes.imshow(np.array(rows)[:, shown], cmap=_colors(), vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(tokens[shown])), [shortened(token, _LABEL_WIDTH) for token in tokens[shown]], rotation=90)
    for text in axes.get_xticklabels():
        text.set(parse_math=False, fontfamily=font_families(), fontsize=8)
    _rows(axes, names)
    rest = f", the first {_MOST_TOKENS} tokens" if len(tokens) > _MOST_TOKENS else ""
    axes.set_title(f"scores, {example_title(comparison, 0)}{rest}", fontsize="medium", parse_math=False)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    bar.set_label("share of the method's largest", fontsize=8)


def _gains(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    means = comparison.means()
    values = [means[name]["relevance_gain"] for name in names]
    axes.barh(range(len(names)), values, color=[_BLUE if value >= 0 else _ORANGE for value in values], height=0.7)
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-3, 3), useMathText=True)
    _rows(axes, names)
    count = f"{comparison.examples} example{'s' * (comparison.examples != 1)}"
    axes.set_title(f"relevance gain, mean of {count}", fontsize="medium")


def _costs(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
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


def _agreement(axes: "Axes", comparison: Comparison, names: list[str]) -> None:
    values = np.array(agreement_rows(comparison))
    axes.imshow(values, cmap=_colors(), vmin=-1, vmax=1, aspect="auto")
    for row, column in np.ndindex(values.shape):
        value = float(values[row, column])
        color = "white" if abs(value) > 0.5 else "black"
        axes.text(column, row, number(100 * value, 0), ha="center", va="center", fontsize=5, color=color)
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), [""] * len(names))
    axes.set_title("agreement: Spearman's ρ × 100", fontsize="medium")


def _rows(axes: "Axes", names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for text in axes.get_yticklabels():
        text.set(parse_math=False, fontsize=8)


def _colors() -> "ListedColormap":
    from matplotlib.colors import ListedColormap

    table = np.concatenate([color_table(below=True)[::-1], color_table()])
    return ListedColormap(table / 255, name="captum_norm_signed")
