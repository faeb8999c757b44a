"""Repeats the paper's experiment: error rate by method, setting, layer, head and recipe [Kobayashi et al. 2020]."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, nan
from statistics import correlation, fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from alignment.aer import AER, AERScore, paired_significance
from alignment.aligner import SAMPLE, without_head
from alignment.corpora import ParallelGold
from alignment.encoder import EncoderAligner, encoder_of
from alignment.gradients import GradientKind, gradient_maps
from alignment.huggingface import HuggingFaceTokenizer
from alignment.links import Alignment
from alignment.recipes import DEFAULT_RECIPE, PIECE_RECIPES, RECIPES, Recipe
from alignment.selection import SETTINGS, Choice, Setting, highest_norm, mean_norm, most_consistent
from alignment.teacher_forcing import PieceMaps, TeacherForcedBatch, word_maps
from alignment.tokenization import TranslationTokenizer
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError, NormMeter
from captum_norm.functional import spearman
from captum_norm.show.terminal import plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AttentionMethod = Literal["norm", "weights"]
Method = AttentionMethod | GradientKind | Literal["similarity"]
ATTENTION: tuple[AttentionMethod, ...] = get_args(AttentionMethod)
AUTO, AUTO_HEAD = "auto", "auto, one head"
OF_ENCODERS = (*PIECE_RECIPES, DEFAULT_RECIPE)
"""The recipes by which :func:`encoder_sweep` reads similarities."""


@dataclass(frozen=True)
class Reading:
    """A way to read alignments: which maps, and how links are read from them.

    The layer of gradients, which pass through all layers, is 0.
    """

    method: Method
    place: Choice
    recipe: str = "paper"


@dataclass(frozen=True)
class Result:
    """The alignments of a corpus by one reading, and their score."""

    reading: Reading
    score: AERScore
    alignments: Sequence[Alignment]


@dataclass(frozen=True)
class Sweep:
    """All readings of one corpus by one model.

    Attributes:
        maps: the word maps by method and place.
        chosen: the choices of ``layer="auto"`` and ``"highest-norm"`` among the norms of all settings and layers, and
            as ``"auto, one head"`` that of ``"auto"`` among single heads.
        mean_norms: the mean norm at each place, over all pairs.
        layers: number of decoder layers, or of an encoder's.
        heads: number of heads per layer; 0 for an encoder, whose similarities have none, nor maps and norms here.
    """

    corpus: ParallelGold
    maps: Mapping[tuple[Method, Choice], Sequence[WordMap]]
    results: Mapping[Reading, Result]
    chosen: Mapping[str, Choice]
    mean_norms: Mapping[Choice, float]
    layers: int
    heads: int

    def best(self, method: Method, *, per_head: bool = False) -> Result:
        """A method's best result with the paper's recipe, over settings and layers, or single heads if ``per_head``.

        It is chosen by the gold alignments, so it bounds every rule that does without them.
        """
        candidates = [
            result
            for reading, result in self.results.items()
            if reading.method == method and reading.recipe == "paper" and (reading.place.head is not None) == per_head
        ]
        return min(candidates, key=lambda result: result.score.aer)

    def norm_correlation(self, setting: Setting) -> "NormCorrelation":
        """The correlation of AER with mean norm over all heads of all layers, with the paper's recipe."""
        heads = [place for place in self.mean_norms if place.setting == setting and place.head is not None]
        rates = [self.results[Reading("norm", place)].score.aer for place in heads]
        norms = [self.mean_norms[place] for place in heads]
        ranked = spearman(torch.tensor(rates, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64))
        varies = len(set(rates)) > 1 and len(set(norms)) > 1
        return NormCorrelation(float(ranked), correlation(rates, norms) if varies else nan)


class NormCorrelation(NamedTuple):
    """Correlation of the heads' AER with their mean norm [Kobayashi et al. 2020, section 5.3]; NaN if constant."""

    spearman: float
    pearson: float


def sweep(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    corpus: ParallelGold,
    *,
    gradients: bool = True,
    n_bootstrap: int = 1000,
    max_tokens: int = 4096,
) -> Sweep:
    """Align a corpus in every way, and score the alignments.

    The paper's recipe reads norms and weights of every layer and head, and gradient baselines, in both settings. The
    other recipes read norms and weights at the layer and setting, and at the single head, that ``"auto"`` chooses from
    the norms without gold alignments.

    Args:
        model: a translation model as for :class:`alignment.WordAligner`.
        tokenizer: its tokenizer.
        corpus: sentence pairs in the direction of the model.
        gradients: whether to compute the gradient baselines, which take most of the time.
        n_bootstrap: resamples for the 95 % intervals; 1 for none.
        max_tokens: the largest batch, padding included.

    Raises:
        InvalidInputError: there is no sentence pair, or one is unusable.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
    """
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    if not pairs:
        raise InvalidInputError(f"got the corpus {corpus.name} without a sentence pair")
    maps = attention_word_maps(model, tokenizer, pairs, max_tokens=max_tokens)
    for kind in get_args(GradientKind) if gradients else ():
        stacks = _stacks(model, tokenizer, pairs, gradient_maps(model, kind), max_tokens)
        maps |= {(kind, Choice(setting, 0)): stack for setting, _, stack in stacks}

    norms = {place: stack[:SAMPLE] for (method, place), stack in maps.items() if method == "norm"}
    together, single = (
        {place: stack for place, stack in norms.items() if (place.head is not None) == per_head}
        for per_head in (False, True)
    )
    sample = (corpus.sources[:SAMPLE], corpus.targets[:SAMPLE])
    chosen = {
        AUTO: most_consistent(together, *sample),
        "highest-norm": highest_norm(together),
        AUTO_HEAD: most_consistent(single, *sample),
    }
    layers = 1 + max(place.layer for _, place in maps)
    heads = 1 + max(place.head for _, place in maps if place.head is not None)
    readings = [Reading(method, place) for method, place in maps]
    readings += [
        Reading(method, chosen[rule], recipe)
        for rule in (AUTO, AUTO_HEAD)
        for recipe in RECIPES
        if recipe != "paper"
        for method in ATTENTION
    ]
    metric = AER([corpus.gold])
    results = {}
    for reading in readings:
        recipe = RECIPES[reading.recipe]
        to_read = maps_to_read(maps, reading.method, reading.place, recipe)
        alignments = [recipe(pair, reading.place.setting) for pair in to_read]
        results[reading] = Result(reading, metric.corpus_score(alignments, None, n_bootstrap), alignments)
    mean_norms = {place: mean_norm(stack) for (method, place), stack in maps.items() if method == "norm"}
    return Sweep(corpus, maps, results, chosen, mean_norms, layers, heads)


def encoder_sweep(
    model: nn.Module,
    tokenizer: HuggingFaceTokenizer,
    corpus: ParallelGold,
    *,
    n_bootstrap: int = 1000,
    max_tokens: int = 4096,
) -> Sweep:
    """Align a corpus by similarity of an encoder's states, at each layer by recipes of pieces and ``hmm``.

    Arguments and errors are those of :class:`alignment.EncoderAligner` and :func:`sweep`.
    """
    sides, metric = (corpus.sources, corpus.targets), AER([corpus.gold])
    config: Any = encoder_of(model).config
    results = {}
    for layer, recipe in product(range(config.num_hidden_layers), OF_ENCODERS):
        reading = Reading("similarity", Choice("AWI", layer), recipe)
        aligner = EncoderAligner(model, tokenizer, layer, recipe=recipe, max_tokens=max_tokens)
        alignments = aligner.align(*sides)
        results[reading] = Result(reading, metric.corpus_score(alignments, None, n_bootstrap), alignments)
    chosen = EncoderAligner(model, tokenizer, max_tokens=max_tokens).choose(list(zip(*sides, strict=True)))
    return Sweep(corpus, {}, results, {AUTO: chosen}, {}, config.num_hidden_layers, 0)


def attention_word_maps(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    *,
    max_tokens: int = 4096,
) -> dict[tuple[Method, Choice], list[WordMap]]:
    """Compute each pair's word maps of norms and weights at every place, (T, S + 1) in float64, in one forward pass."""
    meter = NormMeter(without_head(model))
    labels: list[tuple[AttentionMethod, int, int | None]] = []

    def every_map(batch: TeacherForcedBatch) -> Tensor:
        """(B, 2L + 2LH, T, S): norms and weights of every layer, of all heads together and then of each."""
        cross = meter.measure(
            batch.inputs, scopes=["attn"], weights=True, per_head=True, head_norms=True, stacks=["cross"]
        )["cross"]
        weights, head_norms = cast(Tensor, cross.weights), cast(Tensor, cross.head_norms)
        _, layers, heads, _, _ = weights.shape
        together: list[int | None] = [None]
        labels[:] = [
            (method, layer, head)
            for places in (together, range(heads))
            for method in ATTENTION
            for layer in range(layers)
            for head in places
        ]
        maps = [cross.norms["attn"], weights.mean(2), head_norms.flatten(1, 2), weights.flatten(1, 2)]
        return torch.cat(maps, dim=1)

    maps = dict[tuple[Method, Choice], list[WordMap]]()
    for setting, number, stack in _stacks(model, tokenizer, pairs, every_map, max_tokens):
        method, layer, head = labels[number]
        maps[method, Choice(setting, layer, head)] = stack
    return maps


def _stacks(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    piece_maps: PieceMaps,
    max_tokens: int,
) -> Iterator[tuple[Setting, int, list[WordMap]]]:
    """Yield setting, index in the stack, and that map of every pair."""
    maps = dict(word_maps(model, tokenizer, pairs, piece_maps, settings=SETTINGS, max_tokens=max_tokens))
    for setting in SETTINGS:
        for number in range(len(maps[0][setting])):
            yield setting, number, [maps[index][setting][number].astype("float64") for index in range(len(pairs))]


def maps_to_read(
    maps: Mapping[tuple[Method, Choice], Sequence[WordMap]], method: Method, place: Choice, recipe: Recipe
) -> list[dict[Setting, WordMap]]:
    """The maps that a recipe reads for each pair of a :class:`Sweep`, as in :class:`alignment.WordAligner`."""
    stacks = {place.setting: maps[method, place]}
    last = max(choice.layer for kind, choice in maps if kind == method)
    for other in set(recipe.settings(place.setting)) - {place.setting}:
        if place.head is None:
            stacks[other] = maps[method, Choice(other, last)]
        else:
            heads = [
                stack
                for (kind, choice), stack in maps.items()
                if kind == method and choice.head is not None and choice == Choice(other, last, choice.head)
            ]
            stacks[other] = [np.mean(pair, axis=0) for pair in zip(*heads, strict=True)]
    return [dict(zip(stacks, pair, strict=True)) for pair in zip(*stacks.values(), strict=True)]


TITLES: Mapping[Method, str] = {
    "norm": "norms",
    "weights": "weights",
    "saliency": "saliency",
    "gradient_x_input": "gradient × input",
}
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
    """The paper's tables (layers, heads, rules, correlation with norms), and of other recipes; one for an encoder."""
    if not sweep.heads:
        return [_similarities(sweep)]
    recipes = (_recipes(sweep, rule) for rule in (AUTO, AUTO_HEAD))
    return [_layers(sweep), _heads(sweep), _rules(sweep), _correlations(sweep), *recipes]


def _similarities(sweep: Sweep) -> Table:
    table = plain_table("AER by layer, similarity of states", ["layer"], OF_ENCODERS)
    for layer in range(sweep.layers):
        place = Choice("AWI", layer)
        name = f"{layer}, auto" if place == sweep.chosen[AUTO] else str(layer)
        table.add_row(name, *(_cell(sweep.results[Reading("similarity", place, recipe)]) for recipe in OF_ENCODERS))
    return table


def corpora_tables(sweeps: Sequence[Sweep]) -> list[Table]:
    """AER by recipe on several corpora, their mean, and whether norms and weights differ over all pairs together."""
    return [_corpora(sweeps, rule) for rule in (AUTO, AUTO_HEAD)]


def _corpora(sweeps: Sequence[Sweep], rule: str) -> Table:
    numbers = [*(sweep.corpus.name for sweep in sweeps), "mean", "p, all pairs"]
    table = plain_table(f"AER by recipe, {rule}; p of the difference from norms", ["recipe", "method"], numbers)
    for recipe in RECIPES:
        compared = {
            method: [sweep.results[Reading(method, sweep.chosen[rule], recipe)] for sweep in sweeps]
            for method in ATTENTION
        }
        p_value = pooled_significance(compared["norm"], compared["weights"], sweeps)
        for method, results in compared.items():
            rates = [result.score.aer for result in results]
            cells = [f"{rate:.1f}" for rate in (*rates, fmean(rates))]
            table.add_row(recipe, TITLES[method], *cells, _p_cell(None if method == "norm" else p_value))
    return table


def pooled_significance(
    baseline: Sequence[Result], other: Sequence[Result], sweeps: Sequence[Sweep], trials: int = 1000
) -> float:
    """The p-value of the difference between two readings, over the sentence pairs of all corpora."""
    first, second = ([links for result in results for links in result.alignments] for results in (baseline, other))
    gold = [pair for sweep in sweeps for pair in sweep.corpus.gold]
    return paired_significance(first, [second], gold, trials=trials).p_values[0]


def _layers(sweep: Sweep) -> Table:
    places = [Choice(setting, layer) for setting in SETTINGS for layer in range(sweep.layers)]
    columns = [f"{place.setting} {place.layer}" for place in places]
    table = plain_table("AER by setting and layer, the paper's recipe", ["method"], columns)
    for method in _methods(sweep):
        readings = [sweep.results.get(Reading(method, place)) for place in places]
        table.add_row(TITLES[method], *("–" if result is None else _cell(result) for result in readings))
    return table


def _correlations(sweep: Sweep) -> Table:
    numbers = ["Spearman", "Pearson", "AER of the head with the highest norm"]
    table = plain_table("AER of single heads against their mean norm", ["setting"], numbers)
    for setting in SETTINGS:
        heads = [place for place in sweep.mean_norms if place.setting == setting and place.head is not None]
        highest = max(heads, key=lambda place: sweep.mean_norms[place])
        correlations = ["–" if isnan(value) else f"{value:.2f}" for value in sweep.norm_correlation(setting)]
        table.add_row(setting, *correlations, _cell(sweep.results[Reading("norm", highest)]))
    return table


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
        significance = paired_significance(
            baseline.alignments, [other.alignments for other in others], sweep.corpus.gold, trials=1000
        )
        for result, p_value in zip(compared, (None, *significance.p_values), strict=True):
            method, place = result.reading.method, result.reading.place
            title = TITLES[method] if method in ATTENTION else f"{TITLES[method]}, {place.setting}"
            table.add_row(recipe, title, *_score_cells(result.score), _p_cell(p_value))
    return table


def _methods(sweep: Sweep) -> list[Method]:
    measured = {reading.method for reading in sweep.results}
    return [method for method in TITLES if method in measured]


def _cell(result: Result) -> str:
    return f"{result.score.aer:.1f}"


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
    sweep: Sweep, rows: Sequence[str], columns: Sequence[str], place: Callable[[int, int], Choice], note: str = ""
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
