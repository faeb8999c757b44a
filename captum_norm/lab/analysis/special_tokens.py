"""Measures attention weights and vector norms by category of token [Kobayashi et al. 2020, section 4]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Column, Plot, Table
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import GREATEST, LEAST, Counts, Grid, Moments, number

WEIGHTS = Grid(LEAST, 1, 4)
LENGTHS = Grid(LEAST, GREATEST, 5)

_MEASURES = {"weight": "attention weight α", "transformed": "‖f(x)‖", "product": "‖αf(x)‖"}


class SpecialTokens(Analysis):
    """α, ‖f(x)‖ and ‖αf(x)‖ of each category G of keys, by layer and head, and the correlation of α with ‖f(x)‖.

    In each sequence that contains the category, with all tokens as queries i: α is the mean over i of Σ_{j∈G} α_ij,
    ‖αf(x)‖ the mean over i of Σ_{j∈G} ‖α_ij f(x_j)‖, ‖f(x)‖ the mean over j∈G. All are averaged over sequences.
    Spearman's correlation of α_ij with ‖f(x_j)‖ is over all pairs of the corpus (in causal models, j ≤ i) and all heads
    of all layers; α is binned at 1/16 of an octave, ‖f(x)‖ at 1/32.
    """

    name = "special-tokens"
    description = (
        "How much attention weight each category of tokens receives, and how much it contributes: the weight α and the "
        "lengths of the transformed vector ‖f(x)‖ and the weighted one ‖αf(x)‖ [Kobayashi et al. 2020, section 4]."
    )

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._categories = len(context.categories.names)
        shape = context.layers, context.heads, self._categories
        self._means = {name: Moments(*shape) for name in _MEASURES}
        self._pairs = Counts(self._categories, WEIGHTS, LENGTHS)
        self.statistics = {**self._means, "pairs": self._pairs}
        self.options = {"weights": True, "per_head": True, "head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        weights: Any = measured.weights
        lengths: Any = measured.transformed_norms
        categories, real = batch.categories.to(weights.device), batch.real.to(weights.device)
        members = torch.nn.functional.one_hot(categories, self._categories + 1)[..., :-1].to(weights.dtype)
        sizes = members.sum(1)[:, None, None]  # (B, 1, 1, C)
        members = members[:, None]  # (B, 1, K, C)
        received = weights.sum(3) / real.sum(1)[:, None, None, None]  # (B, L, H, K), mean over queries
        self._means["weight"].add(received @ members, sizes > 0)
        self._means["transformed"].add((lengths @ members) / sizes.clamp(min=1), sizes > 0)
        self._means["product"].add((received * lengths) @ members, sizes > 0)
        counted = real[:, :, None] & real[:, None, :]
        if self.context.causal:
            counted = counted & torch.ones_like(counted[0]).tril()
        self._count_pairs(weights, lengths, categories, counted)

    def _count_pairs(self, weights: Tensor, lengths: Tensor, categories: Tensor, counted: Tensor) -> None:
        """Count pairs layer by layer, since the fields of one layer take as much memory as its weights."""
        size = WEIGHTS.size * LENGTHS.size
        left_out = ~counted[:, None]
        groups = (categories * size).int()[:, None]
        for layer in range(weights.shape[1]):
            columns = LENGTHS.places(lengths[:, layer]) + groups  # (B, H, K)
            fields = WEIGHTS.places(weights[:, layer]).mul_(LENGTHS.size).add_(columns[:, :, None])
            self._pairs.add(fields.masked_fill_(left_out, self._categories * size))

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:
        """See :class:`Analysis`."""
        weights: Any = measured.weights
        lengths: Any = measured.transformed_norms
        received = weights.sum(3) / batch.real.sum(1).to(weights.device)[:, None, None, None]
        values = {"weight": received, "transformed": lengths, "product": received * lengths}
        return {name: value.mean(2).transpose(1, 2) for name, value in values.items()}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        names = self.context.categories.names
        seen = [place for place in range(self._categories) if self._means["weight"].count[..., place].any()]
        layers, heads = range(self.context.layers), range(self.context.heads)
        means = {name: moments.mean for name, moments in self._means.items()}  # (L, H, C)
        by_head = Table(
            "heads",
            "Attention weight and lengths of vectors by layer, head and category of token",
            (
                Column("layer", "layer"),
                Column("head", "head"),
                Column("category", "category"),
                *(Column(name, label) for name, label in _MEASURES.items()),
                *(Column(f"{name}_sd", f"SD of {label} over sequences") for name, label in _MEASURES.items()),
            ),
            [
                (
                    layer,
                    head,
                    names[place],
                    *(number(means[name][layer, head, place]) for name in _MEASURES),
                    *(number(self._means[name].deviation[layer, head, place]) for name in _MEASURES),
                )
                for layer in layers
                for head in heads
                for place in seen
            ],
        )
        by_layer = Table(
            "layers",
            "Attention weight and lengths of vectors by layer and category of token, means over heads",
            (
                Column("layer", "layer"),
                Column("category", "category"),
                *(Column(name, label) for name, label in _MEASURES.items()),
            ),
            [
                (layer, names[place], *(number(means[name][layer, :, place].mean()) for name in _MEASURES))
                for layer in layers
                for place in seen
            ],
        )
        correlations = self._pairs.spearman()
        by_category = Table(
            "correlation",
            "Spearman's correlation of α with ‖f(x)‖ over pairs of tokens and all heads, and means over all heads",
            (
                Column("category", "category"),
                Column("spearman", "Spearman's ρ of α and ‖f(x)‖"),
                *(Column(name, label) for name, label in _MEASURES.items()),
            ),
            [
                (
                    names[place],
                    number(correlations[place]),
                    *(number(means[name][..., place].mean()) for name in _MEASURES),
                )
                for place in seen
            ],
        )
        summary = {f"Spearman's ρ of α and ‖f(x)‖, {row[0]}": row[1] for row in by_category.rows}
        plots = [
            Plot(f"{name}-by-layer", "line", f"{label} by category of token", "layers", "layer", name, "category")
            for name, label in _MEASURES.items()
        ]
        return self._result(summary, [by_layer, by_category, by_head], plots)  # type: ignore[arg-type]
