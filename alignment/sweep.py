"""Repeats the paper's experiment: error rate by method, setting, layer, head and recipe [Kobayashi et al. 2020]."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import correlation
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from alignment.aer import AER, AERScore
from alignment.aligner import SAMPLE, without_head
from alignment.corpora import ParallelGold
from alignment.extraction import PieceMaps, gradient_maps, word_maps
from alignment.gradients import GradientKind
from alignment.links import Alignment
from alignment.recipes import RECIPES, Recipe
from alignment.selection import Choice, highest_norm, mean_norm, most_consistent
from alignment.settings import SETTINGS, Setting
from alignment.teacher_forcing import TeacherForcedBatch
from alignment.tokenization import TranslationTokenizer
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError, NormMeter
from captum_norm.functional import spearman

AttentionMethod = Literal["norm", "weights"]
Method = AttentionMethod | GradientKind
AUTO, AUTO_HEAD = "auto", "auto, one head"


@dataclass(frozen=True)
class Reading:
    """A way to read alignments: which maps, and how links are read from them.

    Attributes:
        method: the method that computes the maps.
        place: setting, layer and head; the layer of gradients, which pass through all layers, is 0.
        recipe: the name of a recipe.
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
        corpus: the corpus.
        maps: the word maps by method and place.
        results: the result of each reading.
        chosen: the choices of ``layer="auto"`` and ``"highest-norm"`` among the norms of all settings and layers, and
            as ``"auto, one head"`` that of ``"auto"`` among single heads.
        mean_norms: the mean norm at each place, over all pairs.
        layers: number of decoder layers.
        heads: number of heads per layer.
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
        found = [
            result
            for reading, result in self.results.items()
            if reading.method == method and reading.recipe == "paper" and (reading.place.head is not None) == per_head
        ]
        return min(found, key=lambda result: result.score.aer)

    def norm_correlation(self, setting: Setting) -> "NormCorrelation":
        """The correlation of AER with mean norm over all heads of all layers, with the paper's recipe."""
        heads = [place for place in self.mean_norms if place.setting == setting and place.head is not None]
        rates = [self.results[Reading("norm", place)].score.aer for place in heads]
        norms = [self.mean_norms[place] for place in heads]
        ranked = spearman(torch.tensor(rates, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64))
        varies = len(set(rates)) > 1 and len(set(norms)) > 1
        return NormCorrelation(float(ranked), correlation(rates, norms) if varies else nan)


class NormCorrelation(NamedTuple):
    """Correlation of the heads' AER with their mean norm [Kobayashi et al. 2020, section 5.3]; NaN if one is constant.

    Attributes:
        spearman: rank correlation.
        pearson: linear correlation.
    """

    spearman: float
    pearson: float


@dataclass
class AllMaps:
    """Piece maps of all norms and weights from one forward pass: every layer, heads together and one by one.

    Attributes:
        labels: method, layer and head of each map; known after the first batch.
    """

    meter: NormMeter
    labels: Sequence[tuple[AttentionMethod, int, int | None]] = ()

    def __call__(self, batch: TeacherForcedBatch) -> Tensor:
        """(B, 2L + 2LH, T, S)."""
        cross = self.meter.measure(
            batch.inputs, scopes=["attn"], weights=True, per_head=True, head_norms=True, stacks=["cross"]
        )["cross"]
        norms: Tensor = cross.norms["attn"]
        weights: Any = cross.weights
        head_norms: Any = cross.head_norms
        _, layers, heads, _, _ = weights.shape
        together: list[int | None] = [None]
        self.labels = [
            (method, layer, head)
            for every in (together, list(range(heads)))
            for method in get_args(AttentionMethod)
            for layer in range(layers)
            for head in every
        ]
        return torch.cat([norms, weights.mean(2), head_norms.flatten(1, 2), weights.flatten(1, 2)], dim=1)


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
        corpus: sentence pairs with gold alignments, in the direction of the model.
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
        for method in get_args(AttentionMethod)
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


def attention_word_maps(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    *,
    max_tokens: int = 4096,
) -> dict[tuple[Method, Choice], list[WordMap]]:
    """Compute the word maps of norms and weights at every place, in one forward pass.

    Args:
        model: a translation model as for :class:`alignment.WordAligner`.
        tokenizer: its tokenizer.
        pairs: the words of both sentences of each pair.
        max_tokens: the largest batch, padding included.

    Returns:
        By method and place, the map of each pair, (T, S + 1), in float64.

    Raises:
        InvalidInputError: a pair is unusable.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
    """
    everything = AllMaps(NormMeter(without_head(model)))
    maps = dict[tuple[Method, Choice], list[WordMap]]()
    for setting, number, stack in _stacks(model, tokenizer, pairs, everything, max_tokens):
        method, layer, head = everything.labels[number]
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
    found = dict(word_maps(model, tokenizer, pairs, piece_maps, settings=SETTINGS, max_tokens=max_tokens))
    for setting in SETTINGS:
        for number in range(len(found[0][setting])):
            yield setting, number, [found[index][setting][number].astype("float64") for index in range(len(pairs))]


def maps_to_read(
    maps: Mapping[tuple[Method, Choice], Sequence[WordMap]], method: Method, place: Choice, recipe: Recipe
) -> list[dict[Setting, WordMap]]:
    """The maps that a recipe reads for each pair, as in :class:`alignment.WordAligner`.

    Args:
        maps: the maps of a :class:`Sweep`.
        method: the method that computed the maps.
        place: setting, layer and head to read.
        recipe: the recipe.
    """
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
