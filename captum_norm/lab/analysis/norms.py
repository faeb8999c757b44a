"""Lengths of transformed vectors and attention weights: by head, category and frequency [Kobayashi et al. 2020]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Cell, Plot, Table, columns
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import GREATEST, LEAST, Array, Counts, Grid, Moments, RankedCounts, number

WEIGHTS = Grid(LEAST, 1, 4)
LENGTHS = Grid(LEAST, GREATEST, 5)
VALUES = Grid(LEAST, GREATEST, 9)

_INPUT = "‖x‖"
_LABELS = {"weight": "attention weight α", "transformed": "‖f(x)‖", "product": "‖αf(x)‖"}
_BANDS = 20


class Dispersion(Analysis):
    """Mean, standard deviation, coefficient of variation (SD over mean) and range of ‖f(x)‖ and ‖x‖ over all tokens.

    ‖f(x)‖ is measured for each head. x is the residual stream at the start of the block, which attention reads directly
    in a post-norm layer and after normalisation in others.
    """

    name = "dispersion"
    description = (
        "How much the lengths of the transformed vectors f(x) vary over tokens, by layer and head, and those of the "
        "residual stream x, by layer [Kobayashi et al. 2020, section 4]."
    )

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._transformed = Moments(context.layers, context.heads)
        self._inputs = Moments(context.layers)
        self.statistics = {"transformed": self._transformed, "inputs": self._inputs}
        self.options = {"head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        lengths: Any = measured.transformed_norms  # (B, L, H, S)
        inputs: Any = measured.residual_norm  # (B, L, S)
        real = batch.real.to(lengths.device)
        self._transformed.add(lengths.permute(0, 3, 1, 2).flatten(0, 1), real.flatten()[:, None, None])
        self._inputs.add(inputs.transpose(1, 2).flatten(0, 1), real.flatten()[:, None])

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:  # noqa: ARG002
        """See :class:`Analysis`."""
        lengths: Any = measured.transformed_norms
        inputs: Any = measured.residual_norm
        return {"transformed": lengths.mean(2).transpose(1, 2), "input": inputs.transpose(1, 2)}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        moments, pooled, f = self._transformed, self._transformed.over(1), _LABELS["transformed"]
        layers, heads = range(self.context.layers), self.context.heads
        variation = _variation(moments)  # (L, H)
        measures = columns(
            mean="mean length", sd="SD over tokens", cv="coefficient of variation", min="least", max="greatest"
        )
        by_head = Table(
            "heads",
            f"{f} by layer and head",
            (*columns(layer="layer", head="head"), *measures),
            [(layer, head, *_row(moments, layer, head)) for layer in layers for head in range(heads)],
        )
        by_layer = Table(
            "layers",
            f"{f} of all heads, and {_INPUT}, by layer",
            (*columns(layer="layer", vector="vector"), *measures),
            [
                (layer, vector, *_row(lengths, layer))
                for vector, lengths in ((f, pooled), (_INPUT, self._inputs))
                for layer in layers
            ],
        )
        means = {
            f"mean {f}": number(moments.mean.mean()),
            f"SD of {f}, mean over heads": number(moments.deviation.mean()),
            f"coefficient of variation of {f}, mean over heads": number(variation.mean()),
        }
        extremes = {"largest variation": divmod(int(variation.argmax()), heads)}
        extremes["smallest variation"] = divmod(int(variation.argmin()), heads)
        overall = Table(
            "overall",
            f"{f}: means over heads, and the heads that vary most and least from token to token",
            (*columns(what="", layer="layer", head="head"), *measures[:3]),
            [
                ("mean over heads", None, None, *means.values()),
                *((what, *place, *_row(moments, *place)[:3]) for what, place in extremes.items()),
            ],
        )
        plots = [
            Plot("lengths-by-layer", "line", "Length by layer", "layers", "layer", "mean", "vector", "sd"),
            Plot("variation", "heat", "Coefficient of variation", "heads", "head", "layer", value="cv"),
        ]
        return self._result(means, [overall, by_layer, by_head], plots)


def _variation(moments: Moments) -> Array:
    return moments.deviation / moments.mean


def _row(moments: Moments, *place: int) -> tuple[Cell, ...]:
    measures = (moments.mean, moments.deviation, _variation(moments), moments.least, moments.greatest)
    return tuple(number(values[place]) for values in measures)


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
        self._means = {name: Moments(*shape) for name in _LABELS}
        self._pairs = Counts(self._categories, WEIGHTS, LENGTHS)
        self.statistics = {**self._means, "pairs": self._pairs}
        self.options = {"weights": True, "per_head": True, "head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        weights: Any = measured.weights
        values = _received(batch, measured)  # (B, L, H, K)
        categories, real = batch.categories.to(weights.device), batch.real.to(weights.device)
        members = torch.nn.functional.one_hot(categories, self._categories + 1)[..., :-1].to(weights.dtype)
        sizes = members.sum(1)[:, None, None]  # (B, 1, 1, C)
        for name, value in values.items():
            total = value @ members[:, None]
            self._means[name].add(total / sizes.clamp(min=1) if name == "transformed" else total, sizes > 0)
        counted = real[:, :, None] & real[:, None, :]
        if self.context.causal:
            counted = counted & torch.ones_like(counted[0]).tril()
        self._count_pairs(weights, values["transformed"], categories, counted)

    def _count_pairs(self, weights: Tensor, lengths: Tensor, categories: Tensor, counted: Tensor) -> None:
        """Count pairs layer by layer, since the fields of one layer take as much memory as its weights."""
        size = WEIGHTS.size * LENGTHS.size
        left_out = ~counted[:, None]
        groups = (categories * size).int()[:, None]
        for layer in range(weights.shape[1]):
            places = LENGTHS.places(lengths[:, layer]) + groups  # (B, H, K)
            fields = WEIGHTS.places(weights[:, layer]).mul_(LENGTHS.size).add_(places[:, :, None])
            self._pairs.add(fields.masked_fill_(left_out, self._categories * size))

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:
        """See :class:`Analysis`."""
        return {name: value.mean(2).transpose(1, 2) for name, value in _received(batch, measured).items()}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        names, means = self.context.categories.names, {name: moments.mean for name, moments in self._means.items()}
        seen = [place for place in range(self._categories) if self._means["weight"].count[..., place].any()]
        layers, heads = range(self.context.layers), range(self.context.heads)
        measures = columns(**_LABELS)
        deviations = columns(**{f"{name}_sd": f"SD of {label} over sequences" for name, label in _LABELS.items()})
        by_head = Table(
            "heads",
            "Attention weight and lengths of vectors by layer, head and category of token",
            (*columns(layer="layer", head="head", category="category"), *measures, *deviations),
            [
                (
                    layer,
                    head,
                    names[place],
                    *(number(means[name][layer, head, place]) for name in _LABELS),
                    *(number(self._means[name].deviation[layer, head, place]) for name in _LABELS),
                )
                for layer in layers
                for head in heads
                for place in seen
            ],
        )
        by_layer = Table(
            "layers",
            "Attention weight and lengths of vectors by layer and category of token, means over heads",
            (*columns(layer="layer", category="category"), *measures),
            [
                (layer, names[place], *(number(means[name][layer, :, place].mean()) for name in _LABELS))
                for layer in layers
                for place in seen
            ],
        )
        correlations = [number(correlation) for correlation in self._pairs.spearman()]
        by_category = Table(
            "correlation",
            "Spearman's correlation of α with ‖f(x)‖ over pairs of tokens and all heads, and means over all heads",
            (*columns(category="category", spearman="Spearman's ρ of α and ‖f(x)‖"), *measures),
            [
                (names[place], correlations[place], *(number(means[name][..., place].mean()) for name in _LABELS))
                for place in seen
            ],
        )
        summary = {f"Spearman's ρ of α and ‖f(x)‖, {names[place]}": correlations[place] for place in seen}
        plots = [
            Plot(f"{name}-by-layer", "line", f"{label} by category of token", "layers", "layer", name, "category")
            for name, label in _LABELS.items()
        ]
        return self._result(summary, [by_layer, by_category, by_head], plots)


def _received(batch: TokenBatch, measured: Measurements) -> dict[str, Tensor]:
    """Each key's mean weight over queries, length, and their product, (B, L, H, K)."""
    weights: Any = measured.weights
    lengths: Any = measured.transformed_norms
    weight = weights.sum(3) / batch.real.sum(1).to(weights.device)[:, None, None, None]
    return {"weight": weight, "transformed": lengths, "product": weight * lengths}


class Frequency(Analysis):
    """Spearman's correlation of frequency rank with ‖f(x)‖ and with α, over all tokens of the corpus.

    For each token, ‖f(x)‖ is averaged over layers and heads, α also over the queries that can attend to it. Both are
    binned at 1/512 of an octave; ranks are exact. Each band of the table holds about a 20th of the tokens, since tokens
    of the same frequency stay together.
    """

    name = "frequency"
    description = (
        "How the length of a token's transformed vector, ‖f(x)‖, and the attention weight α on it correlate with its "
        "frequency rank, in which the most frequent token is first [Kobayashi et al. 2020]."
    )
    needs_ranks = True

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._labels = {name: _LABELS[name] for name in ("transformed", "weight")}
        self._ranked = RankedCounts(len(self._labels), VALUES)
        self._bands = Moments(len(self._labels), _BANDS)
        self.statistics = {"ranked": self._ranked, "bands": self._bands}
        self.options = {"weights": True, "head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        if self.context.ranks is None:
            raise ValueError("the context has no frequency ranks")
        values = self.token_values(batch, measured)
        visible = batch.real & ~batch.masked
        ranks = self.context.ranks[batch.ids[visible]]
        chosen = torch.stack([values[name].cpu()[visible] for name in self._labels])  # (2, N)
        self._ranked.add(ranks, chosen)
        bands = (ranks * _BANDS).long().clamp(max=_BANDS - 1)
        self._bands.add(chosen.T[..., None], torch.nn.functional.one_hot(bands, _BANDS).bool()[:, None])

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:
        """See :class:`Analysis`."""
        weights: Any = measured.weights  # (B, L, Q, K)
        lengths: Any = measured.transformed_norms
        real = batch.real.to(weights.device)
        queries = real.flip(1).cumsum(1).flip(1) if self.context.causal else real.sum(1, keepdim=True)
        received = weights.double().mean(1).sum(1) / queries.clamp(min=1)
        return {"transformed": lengths.double().mean((1, 2)), "weight": received}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        labels, bands = self._labels, self._bands
        correlations = dict(zip(labels.values(), map(number, self._ranked.spearman()), strict=True))
        table = Table(
            "correlation",
            "Spearman's correlation with the rank of the token's frequency, over all tokens",
            columns(measure="measure", spearman="Spearman's ρ with frequency rank"),
            list(correlations.items()),
        )
        by_band = Table(
            "bands",
            "Means by frequency, the most frequent tokens first",
            (
                *columns(rank="share of all tokens that are more frequent"),
                *columns(**{name: f"mean {label}" for name, label in labels.items()}),
                *columns(**{f"{name}_sd": f"SD of {label}" for name, label in labels.items()}),
                *columns(tokens="tokens"),
            ),
            [
                (
                    band / _BANDS,
                    *map(number, bands.mean[:, band]),
                    *map(number, bands.deviation[:, band]),
                    int(bands.count[0, band]),
                )
                for band in range(_BANDS)
                if bands.count[0, band]
            ],
        )
        summary = {f"Spearman's ρ of frequency rank with {label}": rho for label, rho in correlations.items()}
        plots = [
            Plot(f"{name}-by-frequency", "line", f"{label} by frequency", "bands", "rank", name, error=f"{name}_sd")
            for name, label in labels.items()
        ]
        return self._result(summary, [table, by_band], plots)
