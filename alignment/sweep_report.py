"""Turns sweeps into tables, records and heatmaps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from rich.table import Table

from alignment.aer import AERScore
from alignment.recipes import RECIPES
from alignment.selection import Choice
from alignment.settings import SETTINGS, Setting
from alignment.significance import paired_significance
from alignment.sweep import AUTO, AUTO_HEAD, AttentionMethod, Method, Reading, Result, Sweep
from captum_norm import InvalidInputError
from captum_norm.commands.terminal import plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES: Mapping[Method, str] = {
    "norm": "norms",
    "weights": "weights",
    "saliency": "saliency",
    "gradient_x_input": "gradient × input",
}
ATTENTION: tuple[AttentionMethod, ...] = get_args(AttentionMethod)
SIGNIFICANT = 0.05


def records(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """One record per reading, with AER, 95 % interval, precision, recall, F1 and number of links."""
    for reading, result in sweep.results.items():
        score = result.score
        yield {
            "corpus": sweep.corpus.name,
            "direction": f"{sweep.corpus.source_language}-{sweep.corpus.target_language}",
            "method": reading.method,
            "setting": reading.place.setting,
            "layer": reading.place.layer,
            "head": reading.place.head,
            "recipe": reading.recipe,
            "aer": score.aer,
            "aer_interval": score.interval,
            "precision": score.precision,
            "recall": score.recall,
            "f1": score.f1,
            "links": score.links,
        }


def tables(sweep: Sweep) -> list[Table]:
    """The paper's tables (layers, heads, rules, correlation with norms), and tables of the other recipes."""
    recipes = (_recipes(sweep, rule) for rule in (AUTO, AUTO_HEAD))
    return [_layers([sweep]), _heads(sweep), _rules(sweep), _correlations([sweep]), *recipes]


def spread_tables(sweeps: Sequence[Sweep]) -> list[Table]:
    """Mean and population standard deviation over models of the same shape, such as several seeds.

    Raises:
        InvalidInputError: the models differ in the number of layers or heads.
    """
    shapes = {(sweep.layers, sweep.heads) for sweep in sweeps}
    if len(shapes) > 1:
        shown = " and ".join(f"{layers} layers of {heads} heads" for layers, heads in sorted(shapes))
        raise InvalidInputError(f"got models of {shown}; expected the same shape for all")
    over = f", mean ± population SD of {len(sweeps)} models"
    rules = plain_table(f"Norms chosen without gold{over}", ["rule"], ["AER"])
    for rule in sweeps[0].chosen:
        found = [sweep.results[Reading("norm", sweep.chosen[rule])].score.aer for sweep in sweeps]
        rules.add_row(rule, _mean_cell(found))
    return [_layers(sweeps, over), rules, _correlations(sweeps, over)]


def corpora_tables(sweeps: Sequence[Sweep]) -> list[Table]:
    """AER by recipe on several corpora, their mean, and whether norms and weights differ over all pairs together.

    Args:
        sweeps: sweeps of one model on corpora of one direction; each is read at its own choice.
    """
    return [_corpora(sweeps, rule) for rule in (AUTO, AUTO_HEAD)]


def _corpora(sweeps: Sequence[Sweep], rule: str) -> Table:
    numbers = [*(sweep.corpus.name for sweep in sweeps), "mean", "p, all pairs"]
    table = plain_table(f"AER by recipe, {rule}; p of the difference from norms", ["recipe", "method"], numbers)
    for recipe in RECIPES:
        found = {
            method: [sweep.results[Reading(method, sweep.chosen[rule], recipe)] for sweep in sweeps]
            for method in ATTENTION
        }
        p_value = pooled_significance(found["norm"], found["weights"], sweeps)
        for method, results in found.items():
            rates = [result.score.aer for result in results]
            cells = [f"{rate:.1f}" for rate in (*rates, fmean(rates))]
            table.add_row(recipe, TITLES[method], *cells, _p_cell(None if method == "norm" else p_value))
    return table


def pooled_significance(
    baseline: Sequence[Result], other: Sequence[Result], sweeps: Sequence[Sweep], trials: int = 1000
) -> float:
    """The p-value of the difference between two readings, over the sentence pairs of all corpora.

    Args:
        baseline: the result of one reading on each corpus.
        other: that of the other reading.
        sweeps: the sweeps that the results are from.
        trials: number of trials of approximate randomisation.
    """
    one, two = ([links for result in results for links in result.alignments] for results in (baseline, other))
    gold = [pair for sweep in sweeps for pair in sweep.corpus.gold]
    return paired_significance(one, [two], gold, trials=trials).p_values[0]


def _layers(sweeps: Sequence[Sweep], over: str = "") -> Table:
    title = f"AER by setting and layer, the paper's recipe{over}"
    places = [Choice(setting, layer) for setting in SETTINGS for layer in range(sweeps[0].layers)]
    table = plain_table(title, ["method"], [f"{place.setting} {place.layer}" for place in places])
    for method in _methods(sweeps[0]):
        readings = [Reading(method, place) for place in places]
        found = [
            [sweep.results[reading].score.aer for sweep in sweeps if reading in sweep.results] for reading in readings
        ]
        table.add_row(TITLES[method], *(_mean_cell(rates) for rates in found))
    return table


def _correlations(sweeps: Sequence[Sweep], over: str = "") -> Table:
    title = f"AER of single heads against their mean norm{over}"
    table = plain_table(title, ["setting"], ["Spearman", "Pearson", "AER of the head with the highest norm"])
    for setting in SETTINGS:
        found = [sweep.norm_correlation(setting) for sweep in sweeps]
        highest = [sweep.results[Reading("norm", _highest_head(sweep, setting))].score.aer for sweep in sweeps]
        ranked, linear = ([one.spearman for one in found], [one.pearson for one in found])
        table.add_row(setting, _mean_cell(ranked, digits=2), _mean_cell(linear, digits=2), _mean_cell(highest))
    return table


def _highest_head(sweep: Sweep, setting: Setting) -> Choice:
    heads = [place for place in sweep.mean_norms if place.setting == setting and place.head is not None]
    return max(heads, key=lambda place: sweep.mean_norms[place])


def _heads(sweep: Sweep) -> Table:
    setting = sweep.chosen[AUTO].setting
    heads = [f"head {head}" for head in range(sweep.heads)]
    table = plain_table(f"AER by head, {setting}, the paper's recipe", ["layer", "method"], heads)
    for layer in range(sweep.layers):
        for method in ATTENTION:
            cells = [_cell(sweep.results[Reading(method, Choice(setting, layer, head))]) for head in range(sweep.heads)]
            table.add_row(f"layer {layer}", TITLES[method], *cells)
    return table


def _rules(sweep: Sweep) -> Table:
    table = plain_table("AER of norms chosen without gold", ["rule", "choice"], ["AER"])
    for rule, choice in sweep.chosen.items():
        table.add_row(rule, str(choice), _cell(sweep.results[Reading("norm", choice)]))
    for rule, per_head in (("(by gold)", False), ("(by gold, one head)", True)):
        best = sweep.best("norm", per_head=per_head)
        table.add_row(rule, str(best.reading.place), _cell(best))
    return table


def _recipes(sweep: Sweep, rule: str) -> Table:
    title = f"AER by recipe, {sweep.chosen[rule]}; p of the difference from norms"
    table = plain_table(title, ["recipe", "method"], ["AER", "95 %", "precision", "recall", "p"])
    for recipe in RECIPES:
        compared = [sweep.results[Reading(method, sweep.chosen[rule], recipe)] for method in ATTENTION]
        if recipe == "paper":
            compared += [sweep.best(method) for method in _methods(sweep) if method not in ATTENTION]
        baseline, *others = compared
        found = paired_significance(
            baseline.alignments, [other.alignments for other in others], sweep.corpus.gold, trials=1000
        )
        for result, p_value in zip(compared, (None, *found.p_values), strict=True):
            method, place = result.reading.method, result.reading.place
            title = TITLES[method] if method in ATTENTION else f"{TITLES[method]}, {place.setting}"
            table.add_row(recipe, title, *_score_cells(result.score), _p_cell(p_value))
    return table


def _methods(sweep: Sweep) -> list[Method]:
    found = {reading.method for reading in sweep.results}
    return [method for method in TITLES if method in found]


def _cell(result: Result) -> str:
    return f"{result.score.aer:.1f}"


def _mean_cell(values: Sequence[float], digits: int = 1) -> str:
    """A single value, or the mean ± population standard deviation of several."""
    if not values or any(value != value for value in values):
        return "–"
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {pstdev(values):.{digits}f}"


def _score_cells(score: AERScore) -> tuple[str, str, str, str]:
    interval = "" if score.interval is None else f"± {score.interval:.1f}"
    return f"{score.aer:.1f}", interval, f"{score.precision:.1f}", f"{score.recall:.1f}"


def _p_cell(p_value: float | None) -> str:
    if p_value is None:
        return ""
    return f"{p_value:.3f}{' *' if p_value < SIGNIFICANT else ''}"


def layer_figure(sweep: Sweep) -> "Figure":
    """Heatmaps of the AER of norms and weights: a row per setting, a column per layer."""
    layers = [f"layer {layer}" for layer in range(sweep.layers)]
    return _figure(sweep, SETTINGS, layers, lambda row, column: Choice(SETTINGS[row], column))


def head_figure(sweep: Sweep) -> "Figure":
    """Heatmaps of the AER of norms and weights at the most consistent setting: a row per layer, a column per head."""
    setting = sweep.chosen[AUTO].setting
    layers = [f"layer {layer}" for layer in range(sweep.layers)]
    heads = [f"head {head}" for head in range(sweep.heads)]
    return _figure(sweep, layers, heads, lambda row, column: Choice(setting, row, column), f", {setting}")


def _figure(
    sweep: Sweep,
    rows: Sequence[str],
    columns: Sequence[str],
    place: Callable[[int, int], Choice],
    note: str = "",
) -> "Figure":
    from captum_norm.show import StandaloneFigure

    size = (1.5 + 1.6 * len(columns), 1.2 + 0.45 * len(rows))
    figure = StandaloneFigure(figsize=size, dpi=150, layout="constrained")
    corpus = sweep.corpus
    direction = f"{corpus.source_language}–{corpus.target_language}"
    figure.suptitle(f"AER (%), {corpus.name} {direction}{note}", fontsize=10)
    for axes, method in zip(figure.subplots(1, len(ATTENTION)), ATTENTION, strict=True):
        rates = np.array(
            [
                [sweep.results[Reading(method, place(row, column))].score.aer for column in range(len(columns))]
                for row in range(len(rows))
            ]
        )
        axes.imshow(rates, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set_title(TITLES[method], fontsize=9)
        axes.set_xticks(range(len(columns)), columns, fontsize=7)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        for (row, column), rate in np.ndenumerate(rates):
            color = "white" if rate < 60 else "black"
            axes.text(column, row, f"{rate:.1f}", ha="center", va="center", color=color, fontsize=7)
    return figure
