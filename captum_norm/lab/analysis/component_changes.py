"""Measures how much each component of a layer changes the map, over a corpus [Kobayashi et al. 2024]."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.functional import average_ranks
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Column, Plot, Table
from captum_norm.lab.analysis.sequences import TokenBatch, TokenSequence
from captum_norm.lab.analysis.statistics import GREATEST, LEAST, Counts, Grid, Moments, Statistic, number

NORMS = Grid(LEAST, GREATEST, 4)

_KEPT = 10
_FIELDS = ("change", "direction", "component", "layer", "line", "window", "query", "key")


class ChangedPairs(Statistic):
    """The pairs of tokens that a component moves furthest up or down among the pairs of their sequence.

    Args:
        components: the number of components, C.
        layers: the number of layers, L.
    """

    def __init__(self, components: int, layers: int) -> None:
        super().__init__({"pairs": np.zeros((0, len(_FIELDS))), "words": np.zeros((0, 2), np.str_)})
        self._threshold = np.full((2, components, layers), -np.inf)

    def thresholds(self) -> Tensor:
        """Return the least change of a pair that is kept, (2, C, L), upwards and downwards."""
        return torch.from_numpy(self._threshold)

    def add(self, pairs: list[tuple[float, ...]], words: list[tuple[str, str]]) -> None:
        """Add pairs, each as (change, direction, component, layer, line, window, query, key), and their words."""
        if pairs:
            self._keep_best(np.array(pairs), np.array(words, np.str_))

    def merge(self, other: "ChangedPairs") -> None:
        """Add the pairs of another part of the corpus."""
        self._keep_best(other.parts["pairs"], other.parts["words"])

    def _keep_best(self, pairs: Any, words: Any) -> None:
        pairs, words = np.concatenate([self.parts["pairs"], pairs]), np.concatenate([self.parts["words"], words])
        change, *groups = pairs.T[:4]
        order = np.lexsort((*pairs.T[:3:-1], -change, *groups[::-1]))
        kept, fill = [], dict[tuple[int, ...], int]()
        for row in order:
            group = tuple(int(value) for value in pairs[row, 1:4])
            fill[group] = fill.get(group, 0) + 1
            if fill[group] <= _KEPT:
                kept.append(row)
            if fill[group] == _KEPT:
                self._threshold[group] = change[row]
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
            ranks = torch.stack([average_ranks(values) for values in norms.flatten(0, 1)]).unflatten(0, norms.shape[:2])
            change = 1 - _correlations(ranks)  # (C, L)
            self._macro.add(change[None], ~change.isnan()[None])
            self._count(norms)
            self._list((ranks[1:] - ranks[:-1]) / norms.shape[-1], attended, sequence, batch.categories[row, :length])

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
        found, places = both.topk(min(_KEPT, both.shape[-1]))
        better = (found >= self._pairs.thresholds()[..., None]) & (found > 0)
        rows, words = list[tuple[float, ...]](), list[tuple[str, str]]()
        for direction, component, layer, place in better.nonzero().tolist():
            pair = places[direction, component, layer, place]
            query, key = int(queries[pair]), int(keys[pair])
            change = float(found[direction, component, layer, place])
            rows.append((change, direction, component, layer, sequence.line, sequence.window, query, key))
            words.append((self._word(sequence, query), self._word(sequence, key)))
        self._pairs.add(rows, words)

    def _word(self, sequence: TokenSequence, position: int) -> str:
        """The word to which a token belongs."""
        ids = [sequence.ids[position]]
        if sequence.words is not None:
            word = sequence.words[position]
            ids = [token for token, other in zip(sequence.ids, sequence.words, strict=True) if other == word]
        return self.context.decode(ids).strip()

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        micro = 1 - np.array(self._micro.spearman()).reshape(self._macro.count.shape)
        labels = [f"{place + 1}. {component}" for place, component in enumerate(self._components)]
        layers = range(self.context.layers)
        steps = [f"{before} → {after}" for before, after in pairwise(self._scopes)]
        columns = (
            Column("macro", "contextualisation change, mean over sequences"),
            Column("sd", "SD over sequences"),
            Column("micro", "contextualisation change, all pairs together"),
        )
        by_layer = Table(
            "layers",
            "Contextualisation change by component and layer",
            (Column("layer", "layer"), Column("component", "component"), Column("scopes", "from → to"), *columns),
            [
                (
                    layer,
                    labels[place],
                    steps[place],
                    number(self._macro.mean[place, layer]),
                    number(self._macro.deviation[place, layer]),
                    number(micro[place, layer]),
                )
                for place in range(len(labels))
                for layer in layers
            ],
        )
        by_component = Table(
            "components",
            "Contextualisation change by component, means over layers",
            (Column("component", "component"), Column("scopes", "from → to"), columns[0], columns[2]),
            [
                (label, step, number(self._macro.mean[place].mean()), number(micro[place].mean()))
                for place, (label, step) in enumerate(zip(labels, steps, strict=True))
            ],
        )
        pairs = Table(
            "pairs",
            "The pairs of tokens that each component moves furthest up or down among the pairs of their sequence",
            (
                Column("component", "component"),
                Column("layer", "layer"),
                Column("direction", "direction"),
                Column("change", "change of rank, in shares of the sequence's pairs"),
                Column("query_word", "query's word"),
                Column("key_word", "key's word"),
                Column("line", "line"),
                Column("window", "window"),
                Column("query", "query's position"),
                Column("key", "key's position"),
            ),
            [self._pair_row(labels, row, words) for row, words in self._listed()],
        )
        summary = {f"macro, {row[0]}": number(row[2]) for row in by_component.rows}
        plots = [
            Plot("change", "heat", by_layer.title, "layers", "layer", "component", value="macro"),
            Plot("change-by-layer", "line", by_layer.title, "layers", "layer", "macro", "component", "sd"),
        ]
        return self._result(summary, [by_component, by_layer, pairs], plots)

    def _listed(self) -> list[tuple[Any, Any]]:
        return list(zip(self._pairs.parts["pairs"].tolist(), self._pairs.parts["words"].tolist(), strict=True))

    @staticmethod
    def _pair_row(labels: list[str], row: list[float], words: list[str]) -> tuple[Any, ...]:
        change, direction, component, layer, line, window, query, key = row
        signed = -change if direction else change
        where = (int(line), int(window), int(query), int(key))
        return labels[int(component)], int(layer), "down" if direction else "up", signed, *words, *where


def _correlations(ranks: Tensor) -> Tensor:
    """Correlations of the ranks before and after each component, (C + 1, L, n) -> (C, L); NaN for equal ranks."""
    centered = ranks - ranks.mean(-1, keepdim=True)
    lengths = centered.norm(dim=-1)
    correlation: Tensor = (centered[:-1] * centered[1:]).sum(-1) / (lengths[:-1] * lengths[1:])
    return correlation
