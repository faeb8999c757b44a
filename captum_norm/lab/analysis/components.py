"""Measures how much each component of a layer changes the map [Kobayashi et al. 2024]."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from captum_norm.attr import Measurements, MeterOptions, NormMeter
from captum_norm.functional import centred_ranks, spearman
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Plot, Table, columns
from captum_norm.lab.analysis.sequences import TokenBatch, TokenSequence
from captum_norm.lab.analysis.statistics import GREATEST, LEAST, Array, Counts, Grid, Moments, Statistic, number
from captum_norm.models import Explainable, Inputs, Scope

NORMS = Grid(LEAST, GREATEST, 4)

_KEPT = 10
_FIELDS = ("change", "direction", "component", "layer", "line", "window", "query", "key")


@dataclass(frozen=True)
class ContextualizationChange:
    """1 − ρ of the maps before and after each component, with ρ Spearman's rank correlation of their entries.

    0 if a component keeps the order of all entries, 2 if it reverses it. Entries are all pairs of real positions; in
    causal models, those with the key at or before the query. NaN for a single position, or if all entries are equal.

    Attributes:
        components: the names of the C components after attention, in the order of the layer.
        scopes: the scopes of the maps, attention first: component c is between scopes c and c + 1.
        per_example: the change in each example, (B, L, C).
        micro: the change over the pooled entries of all examples, (L, C).
    """

    components: tuple[str, ...]
    scopes: tuple[Scope, ...]
    per_example: Tensor
    micro: Tensor

    @property
    def macro(self) -> Tensor:
        """The mean over examples, (L, C), without NaN; NaN if all are."""
        return self.per_example.nanmean(0)


def contextualization_change(
    model: Explainable, inputs: Inputs, additional_forward_args: Any = None, **options: Unpack[MeterOptions]
) -> ContextualizationChange:
    """Measure how much each component of each layer changes the map [Kobayashi et al. 2024].

    Args:
        model: a model with one stack of layers, such as the encoder of an encoder–decoder model.
        inputs: see :meth:`captum_norm.NormMeter.measure`.
        additional_forward_args: see there.
        options: see :class:`captum_norm.MeterOptions`.

    Raises:
        InvalidInputError: for an encoder–decoder model, or layers of different arrangements.
        UnsupportedScopeError: if the feed-forward networks are not understood.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> change = contextualization_change(BertModel(config), torch.tensor([[2, 7, 9, 3]]))
        >>> change.components, change.macro.shape
        (('RES', 'LN', 'FF', 'RES', 'LN'), torch.Size([2, 5]))
    """
    meter = NormMeter(model, **options)
    stages = meter.stages(inputs, additional_forward_args)
    scopes = tuple(stage.scope for stage in stages)
    ((stack, measured),) = meter.measure(inputs, additional_forward_args, scopes=scopes).items()
    maps = torch.stack([measured.norms[scope].detach().cpu() for scope in scopes])  # (C + 1, B, L, S, S)
    real = measured.real.cpu()
    pairs = real[:, :, None] & real[:, None, :]
    if stack == "decoder":
        pairs = pairs.tril()
    entries = [maps[:, example][..., pair] for example, pair in enumerate(pairs)]  # (C + 1, L, n)
    return ContextualizationChange(
        tuple(stage.component for stage in stages[1:]),
        scopes,
        torch.stack([_changes(norms) for norms in entries]),
        _changes(torch.cat(entries, -1)),
    )


def _changes(norms: Tensor) -> Tensor:
    """1 − Spearman's correlation before and after each component, (C + 1, L, n) -> (L, C)."""
    steps = [[1 - spearman(*rows) for rows in zip(*stages, strict=True)] for stages in pairwise(norms)]
    return torch.stack([torch.stack(step) for step in steps], -1)


class ChangedPairs(Statistic):
    """The pairs of tokens that a component moves furthest up or down among the pairs of their sequence."""

    def __init__(self, components: int, layers: int) -> None:
        super().__init__(pairs=np.zeros((0, len(_FIELDS))), words=np.zeros((0, 2), np.str_))
        self.thresholds = np.full((2, components, layers), -np.inf)

    def join(self, parts: Any) -> None:
        """Add pairs, each as (change, direction, component, layer, line, window, query, key), and their words."""
        if not len(parts["pairs"]):
            return
        pairs, words = (np.concatenate([self.parts[name], parts[name]]) for name in ("pairs", "words"))
        change, *groups = pairs.T[:4]
        order = np.lexsort((*pairs.T[:3:-1], -change, *groups[::-1]))
        kept, fill = [], dict[tuple[int, ...], int]()
        for row in order:
            group = tuple(int(value) for value in pairs[row, 1:4])
            fill[group] = fill.get(group, 0) + 1
            if fill[group] <= _KEPT:
                kept.append(row)
            if fill[group] == _KEPT:
                self.thresholds[group] = change[row]
        self.parts = {"pairs": pairs[kept], "words": words[kept]}


class ComponentChanges(Analysis):
    """1 − Spearman's correlation of the map before and after each component, as in ``contextualization_change``.

    ``macro`` is the mean over sequences; ``micro`` pools the pairs of all sequences, with norms binned at 1/16 of an
    octave. If norms are spread evenly over n bins or more, the error of ``micro`` is at most about 1/n²
    (:class:`~captum_norm.lab.analysis.statistics.Counts`): 0.004 within a single octave. A pair's change is the change
    of its rank among the pairs of its sequence, as a share of their number, from −1 to 1. Pairs of a token with itself
    or with a special token are not listed.
    """

    name = "contextualization-change"
    description = (
        "How much each component of a layer changes the contextualisation: 1 − Spearman's ρ of the maps before and "
        "after it, and the pairs of tokens that it moves furthest [Kobayashi et al. 2024]."
    )
    needs_stages = True

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._components = [stage.component for stage in context.stages[1:]]
        self._scopes = [stage.scope for stage in context.stages]
        shape = len(self._components), context.layers
        self._macro = Moments(*shape)
        self._micro = Counts(shape[0] * shape[1], NORMS, NORMS)
        self._pairs = ChangedPairs(*shape)
        self.statistics = {"macro": self._macro, "micro": self._micro, "pairs": self._pairs}
        self.options = {"scopes": self._scopes}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        maps = torch.stack([measured.norms[scope].cpu() for scope in self._scopes])  # (C + 1, B, L, S, S)
        for row, sequence in enumerate(batch.sequences):
            length = len(sequence.ids)
            attended = torch.ones(length, length, dtype=torch.bool)
            if self.context.causal:
                attended = attended.tril()
            norms = maps[:, row, :, :length, :length][..., attended]  # (C + 1, L, n)
            ranks = torch.stack([centred_ranks(values) for values in norms.flatten(0, 1)]).unflatten(0, norms.shape[:2])
            squares = ranks.square().sum(-1)
            change = 1 - (ranks[:-1] * ranks[1:]).sum(-1) / (squares[:-1] * squares[1:]).sqrt()  # (C, L)
            self._macro.add(change[None], ~change.isnan()[None])
            self._count(norms)
            shift = (ranks[1:] - ranks[:-1]) / (2 * norms.shape[-1])  # centred ranks count twice
            self._list(shift, attended, sequence, batch.categories[row, :length])

    def _count(self, norms: Tensor) -> None:
        places = NORMS.places(norms).long()
        groups = torch.arange(len(self._components) * self.context.layers).view(len(self._components), -1, 1)
        self._micro.add((groups * NORMS.size + places[:-1]) * NORMS.size + places[1:])

    def _list(self, changes: Tensor, attended: Tensor, sequence: TokenSequence, categories: Tensor) -> None:
        """Keep the pairs of one sequence that changed most; ``changes`` are (C, L, n)."""
        ordinary = categories >= len(self.context.categories.names) - 2
        listed = ordinary[:, None] & ordinary & ~torch.eye(len(ordinary), dtype=torch.bool)
        queries, keys = attended.nonzero(as_tuple=True)
        both = torch.stack([changes, -changes]).where(listed[attended], -torch.inf)  # (2, C, L, n)
        top, places = both.topk(min(_KEPT, both.shape[-1]))
        better = (top >= torch.from_numpy(self._pairs.thresholds)[..., None]) & (top > 0)
        rows, words = list[tuple[float, ...]](), list[tuple[str, str]]()
        for direction, component, layer, place in better.nonzero().tolist():
            pair = places[direction, component, layer, place]
            query, key = int(queries[pair]), int(keys[pair])
            change = float(top[direction, component, layer, place])
            rows.append((change, direction, component, layer, sequence.line, sequence.window, query, key))
            words.append((self._word(sequence, query), self._word(sequence, key)))
        self._pairs.join({"pairs": np.array(rows), "words": np.array(words, np.str_)})

    def _word(self, sequence: TokenSequence, position: int) -> str:
        """The word to which a token belongs."""
        ids = [sequence.ids[position]]
        if sequence.words is not None:
            word = sequence.words[position]
            ids = [token for token, other in zip(sequence.ids, sequence.words, strict=True) if other == word]
        return self.context.decode(ids).strip()

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        macro, layers = self._macro, range(self.context.layers)
        micro: Array = 1 - np.array(self._micro.spearman()).reshape(macro.count.shape)
        labels = [f"{place + 1}. {component}" for place, component in enumerate(self._components)]
        steps = [f"{before} → {after}" for before, after in pairwise(self._scopes)]
        components = list(enumerate(zip(labels, steps, strict=True)))
        measures = columns(
            macro="contextualisation change, mean over sequences",
            sd="SD over sequences",
            micro="contextualisation change, all pairs together",
        )
        by_layer = Table(
            "layers",
            "Contextualisation change by component and layer",
            (*columns(layer="layer", component="component", scopes="from → to"), *measures),
            [
                (layer, *names, *(number(part[place, layer]) for part in (macro.mean, macro.deviation, micro)))
                for place, names in components
                for layer in layers
            ],
        )
        by_component = Table(
            "components",
            "Contextualisation change by component, means over layers",
            (*columns(component="component", scopes="from → to"), measures[0], measures[2]),
            [(*names, *(number(part[place].mean()) for part in (macro.mean, micro))) for place, names in components],
        )
        pairs = Table(
            "pairs",
            "The pairs of tokens that each component moves furthest up or down among the pairs of their sequence",
            columns(
                component="component",
                layer="layer",
                direction="direction",
                change="change of rank, in shares of the sequence's pairs",
                query_word="query's word",
                key_word="key's word",
                line="line",
                window="window",
                query="query's position",
                key="key's position",
            ),
            [
                (labels[int(component)], int(layer), *_signed(change, down), *words, *map(int, position))
                for (change, down, component, layer, *position), words in zip(
                    *(self._pairs.parts[name].tolist() for name in ("pairs", "words")), strict=True
                )
            ],
        )
        summary = {f"macro, {row[0]}": number(row[2]) for row in by_component.rows}
        plots = [
            Plot("change", "heat", by_layer.title, "layers", "layer", "component", value="macro"),
            Plot("change-by-layer", "line", by_layer.title, "layers", "layer", "macro", "component", "sd"),
        ]
        return self._result(summary, [by_component, by_layer, pairs], plots)


def _signed(change: float, down: float) -> tuple[str, float]:
    return ("down", -change) if down else ("up", change)
