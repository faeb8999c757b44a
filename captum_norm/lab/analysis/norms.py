"""Analyses of tokens: lengths of vectors, attention weights and mixing ratios [Kobayashi et al. 2020, 2021]."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import one_hot

from captum_norm.attr.measurements import Measurements
from captum_norm.functional import spearman
from captum_norm.lab.analysis import statistics
from captum_norm.lab.analysis.corpus import TokenBatch
from captum_norm.lab.analysis.results import AnalysisResult, Plot, grid_table, table_of

WEIGHTS = statistics.Grid(statistics.LEAST, 1, 4)
LENGTHS = statistics.Grid(statistics.LEAST, statistics.GREATEST, 5)
VALUES = statistics.Grid(statistics.LEAST, statistics.GREATEST, 9)
# Below 2^-24, a ratio in float32 is rounding noise.
RATIOS = statistics.Grid(-24, 1, 10)

_INPUT = "‖x‖"
_LABELS = {"weight": "attention weight α", "transformed": "‖f(x)‖", "product": "‖αf(x)‖"}
_SPREAD = {"mean": "mean length", "sd": "SD over tokens", "cv": "coefficient of variation"}
_MEASURES = _SPREAD | {"min": "least", "max": "greatest"}
_MIXING = {"mean": "mixing ratio", "sd": "SD over tokens", "min": "least", "max": "greatest", "tokens": "tokens"}
_BANDS = 20
_VARIANTS = {
    "weights": "Attn-W",
    "attn": "Attn-N",
    "weights_res": "AttnRes-W",
    "attn_res": "AttnRes-N",
    "attn_res_ln": "AttnResLn-N",
    "atb": "ATB-N",
}


class Dispersion(statistics.Analysis):
    """How ‖f(x)‖, for each head, and ‖x‖ of the residual stream before the block vary over all tokens."""

    name = "dispersion"
    description = (
        "How much the lengths of the transformed vectors f(x) vary over tokens, by layer and head, and those of the "
        "residual stream x, by layer [Kobayashi et al. 2020, section 4]."
    )

    def __init__(self, context: statistics.AnalysisContext) -> None:
        super().__init__(context)
        self._transformed = statistics.Moments(context.layers, context.heads)
        self._inputs = statistics.Moments(context.layers)
        self.options = {"head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        lengths: Any = measured.transformed_norms  # (B, L, H, S)
        inputs: Any = measured.residual_norm  # (B, L, S)
        real = batch.real.to(lengths.device)
        self._transformed.add(lengths.permute(0, 3, 1, 2).flatten(0, 1), real.flatten()[:, None, None])
        self._inputs.add(inputs.transpose(1, 2).flatten(0, 1), real.flatten()[:, None])

    def result(self) -> AnalysisResult:
        f, layers, heads = _LABELS["transformed"], range(self.context.layers), range(self.context.heads)
        spreads = _spreads(self._transformed)
        axes = {"layer": layers, "head": heads}
        by_head = grid_table("heads", f"{f} by layer and head", axes, _MEASURES, spreads)
        both = zip(_spreads(self._transformed.over(1)), _spreads(self._inputs), strict=True)
        by_layer = grid_table(
            "layers",
            f"{f} of all heads, and {_INPUT}, by layer",
            {"layer": layers, "vector": [f, _INPUT]},
            _MEASURES,
            [np.stack(pair, 1) for pair in both],
        )
        mean, deviation, variation = (spread.mean() for spread in spreads[:3])
        means = {
            f"mean {f}": mean,
            f"SD of {f}, mean over heads": deviation,
            f"coefficient of variation of {f}, mean over heads": variation,
        }
        largest, smallest = (divmod(int(index), len(heads)) for index in (spreads[2].argmax(), spreads[2].argmin()))
        overall = table_of(
            "overall",
            f"{f}: means over heads, and the heads that vary most and least from token to token",
            {"what": "", "layer": "layer", "head": "head", **_SPREAD},
            [
                ("mean over heads", None, None, *means.values()),
                ("largest variation", *largest, *(spread[largest] for spread in spreads[:3])),
                ("smallest variation", *smallest, *(spread[smallest] for spread in spreads[:3])),
            ],
        )
        plots = [
            Plot("lengths-by-layer", "line", "Length by layer", "layers", "layer", "mean", "vector", "sd"),
            Plot("variation", "heat", "Coefficient of variation", "heads", "head", "layer", value="cv"),
        ]
        return self._result(means, [overall, by_layer, by_head], plots)


def _spreads(moments: statistics.Moments) -> list[statistics.Array]:
    """Mean, standard deviation, coefficient of variation, minimum and maximum."""
    mean, deviation, *extremes, _ = moments.summary()
    return [mean, deviation, deviation / mean, *extremes]


class SpecialTokens(statistics.Analysis):
    """α, ‖f(x)‖ and ‖αf(x)‖ of each category of keys by layer and head, and the correlation of α with ‖f(x)‖."""

    name = "special-tokens"
    description = (
        "How much attention weight each category of tokens receives, and how much it contributes: the weight α and the "
        "lengths of the transformed vector ‖f(x)‖ and the weighted one ‖αf(x)‖ [Kobayashi et al. 2020, section 4]."
    )

    def __init__(self, context: statistics.AnalysisContext) -> None:
        super().__init__(context)
        self._categories = len(context.categories.names)
        self._means = statistics.Moments(len(_LABELS), context.layers, context.heads, self._categories)
        self._pairs = statistics.Counts(self._categories, WEIGHTS, LENGTHS)
        self.options = {"weights": True, "per_head": True, "head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        weights: Any = measured.weights
        lengths: Any = measured.transformed_norms  # (B, L, H, K)
        received = weights.sum(3) / batch.real.sum(1).to(weights.device)[:, None, None, None]
        values = (received, lengths, received * lengths)  # as the labels
        categories, real = batch.categories.to(weights.device), batch.real.to(weights.device)
        members = one_hot(categories, self._categories + 1)[..., :-1].to(weights.dtype)
        sizes = members.sum(1)[:, None, None]  # (B, 1, 1, C)
        totals = torch.stack([value @ members[:, None] for value in values], 1)  # (B, 3, L, H, C)
        totals[:, 1] /= sizes.clamp(min=1)
        self._means.add(totals, sizes[:, None] > 0)
        counted = real[:, :, None] & real[:, None, :]
        if self.context.causal:
            counted = counted & torch.ones_like(counted[0]).tril()
        # Layer by layer, since the fields of one layer take as much memory as its weights.
        size = WEIGHTS.size * LENGTHS.size
        left_out = ~counted[:, None]
        groups = (categories * size).int()[:, None]
        for layer in range(weights.shape[1]):
            places = LENGTHS.places(lengths[:, layer]) + groups  # (B, H, K)
            fields = WEIGHTS.places(weights[:, layer]).mul_(LENGTHS.size).add_(places[:, :, None])
            self._pairs.add(fields.masked_fill_(left_out, self._categories * size))

    def result(self) -> AnalysisResult:
        summary = self._means.summary()
        seen, names = self._seen(summary)
        means, deviations = summary.mean[..., seen], summary.deviation[..., seen]  # (3, L, H, C)
        layers, heads = range(self.context.layers), range(self.context.heads)
        by_head = grid_table(
            "heads",
            "Attention weight and lengths of vectors by layer, head and category of token",
            {"layer": layers, "head": heads, "category": names},
            _LABELS | {f"{name}_sd": f"SD of {label} over sequences" for name, label in _LABELS.items()},
            [*means, *deviations],
        )
        by_layer = grid_table(
            "layers",
            "Attention weight and lengths of vectors by layer and category of token, means over heads",
            {"layer": layers, "category": names},
            _LABELS,
            means.mean(2),
        )
        correlations = np.array(self._pairs.spearman())[seen]
        by_category = grid_table(
            "correlation",
            "Spearman's correlation of α with ‖f(x)‖ over pairs of tokens and all heads, and means over all heads",
            {"category": names},
            {"spearman": "Spearman's ρ of α and ‖f(x)‖", **_LABELS},
            [correlations, *means.mean((1, 2))],
        )
        headlines = {f"Spearman's ρ of α and ‖f(x)‖, {row[0]}": row[1] for row in by_category.rows}
        plots = [
            Plot(f"{name}-by-layer", "line", f"{label} by category of token", "layers", "layer", name, "category")
            for name, label in _LABELS.items()
        ]
        return self._result(headlines, [by_layer, by_category, by_head], plots)


class Frequency(statistics.Analysis):
    """Spearman's correlation of frequency rank with ‖f(x)‖ and with α, means of layers and heads, over all tokens."""

    name = "frequency"
    description = (
        "How the length of a token's transformed vector, ‖f(x)‖, and the attention weight α on it correlate with its "
        "frequency rank, in which the most frequent token is first [Kobayashi et al. 2020]."
    )

    def __init__(self, context: statistics.AnalysisContext) -> None:
        super().__init__(context)
        self._labels = {name: _LABELS[name] for name in ("transformed", "weight")}
        self._ranked = statistics.RankedCounts(len(self._labels), VALUES)
        self._bands = statistics.Moments(len(self._labels), _BANDS)
        self.options = {"weights": True, "head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        weights: Any = measured.weights  # (B, L, Q, K)
        lengths: Any = measured.transformed_norms
        real = batch.real.to(weights.device)
        queries = real.flip(1).cumsum(1).flip(1) if self.context.causal else real.sum(1, keepdim=True)
        received = weights.double().mean(1).sum(1) / queries.clamp(min=1)
        visible = batch.real & ~batch.masked
        ranks = self.context.ranks[batch.ids[visible]]
        values = torch.stack([lengths.double().mean((1, 2)), received]).cpu()[:, visible]  # (2, N)
        self._ranked.add(ranks, values)
        bands = (ranks * _BANDS).long().clamp(max=_BANDS - 1)
        self._bands.add(values.T[..., None], one_hot(bands, _BANDS).bool()[:, None])

    def result(self) -> AnalysisResult:
        correlations = dict(zip(self._labels.values(), self._ranked.spearman(), strict=True))
        correlation = table_of(
            "correlation",
            "Spearman's correlation with the rank of the token's frequency, over all tokens",
            {"measure": "measure", "spearman": "Spearman's ρ with frequency rank"},
            correlations.items(),
        )
        bands = self._bands.summary()
        (seen,) = bands.number[0].nonzero()
        by_band = table_of(
            "bands",
            "Means by frequency, the most frequent tokens first",
            {
                "rank": "share of all tokens that are more frequent",
                **{name: f"mean {label}" for name, label in self._labels.items()},
                **{f"{name}_sd": f"SD of {label}" for name, label in self._labels.items()},
                "tokens": "tokens",
            },
            zip(seen / _BANDS, *bands.mean[:, seen], *bands.deviation[:, seen], bands.number[0, seen], strict=True),
        )
        summary = {f"Spearman's ρ of frequency rank with {label}": rho for label, rho in correlations.items()}
        plots = [
            Plot(f"{name}-by-frequency", "line", f"{label} by frequency", "bands", "rank", name, error=f"{name}_sd")
            for name, label in self._labels.items()
        ]
        return self._result(summary, [correlation, by_band], plots)


class MixingRatio(statistics.Analysis):
    """Mixing ratios of the variants that the layers have, by layer and category; masked tokens are a category."""

    name = "mixing-ratio"
    description = (
        "How much of each output comes from other positions than its own, for attention alone, with the residual "
        "connection and with the normalisation, by weights (W) and by norms (N) [Kobayashi et al. 2021]."
    )
    mask_rate = 0.12

    def __init__(self, context: statistics.AnalysisContext) -> None:
        super().__init__(context)
        # A block with a norm after the residual connection, or nothing after it, ends at an earlier scope than atb.
        has_end = {"attn_res_ln", "attn_res"} & set(context.scopes)
        scopes = [name for name in _VARIANTS if name in context.scopes and (name != "atb" or not has_end)]
        self._variants = [name for name in _VARIANTS if name in {"weights", "weights_res", *scopes}]
        self._ratios = statistics.Moments(context.layers, len(self._variants), len(context.categories.names))
        self._frequencies = statistics.RankedCounts(len(self._variants), RATIOS)
        self.options = {"scopes": scopes, "weights": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        ratios = torch.stack([measured.mixing_ratio[name] for name in self._variants], -1).cpu()  # (B, L, S, V)
        ratios = ratios.transpose(1, 2)[batch.real]  # (N, L, V)
        members = one_hot(batch.categories[batch.real], len(self.context.categories.names)).bool()
        self._ratios.add(ratios.unsqueeze(-1), members[:, None, None])
        visible = ~batch.masked[batch.real]
        ranks = self.context.ranks[batch.ids[batch.real][visible]]
        self._frequencies.add(ranks, ratios[visible].double().mean(1).T)

    def result(self) -> AnalysisResult:
        ratios = self._ratios.summary()
        seen, names = self._seen(ratios)
        titles, layers = [_VARIANTS[name] for name in self._variants], range(self.context.layers)
        pooled, cells = self._ratios.over(2).summary(), [part[..., seen] for part in ratios]
        mean, depth = pooled[0], torch.arange(self.context.layers)
        with_depth = [spearman(depth, torch.from_numpy(column)).item() for column in mean.T]
        variants = grid_table(
            "variants",
            "Mixing ratio, all tokens: mean over layers, layers with the least and the greatest mean, and Spearman's ρ",
            {"variant": titles},
            {
                "mean": "mean mixing ratio",
                "min": "least mean of a layer",
                "max": "greatest mean of a layer",
                "depth": "Spearman's ρ with depth",
                "frequency": "Spearman's ρ with frequency rank",
            },
            [mean.mean(0), mean.min(0), mean.max(0), with_depth, self._frequencies.spearman()],
        )
        axes: dict[str, Sequence[Any]] = {"layer": layers, "variant": titles}
        by_layer = grid_table("layers", "Mixing ratio by layer and variant, all tokens", axes, _MIXING, pooled)
        by_category = grid_table(
            "categories",
            "Mixing ratio by layer, variant and category of token",
            axes | {"category": names},
            _MIXING,
            cells,
        )
        end = grid_table(
            "end-of-block",
            f"Mixing ratio at the end of the attention block ({titles[-1]}) by layer and category of token",
            {"layer": layers, "category": names},
            _MIXING,
            [part[:, -1] for part in cells],
        )
        summary: dict[str, Any] = {}
        for title, ratio, *_, frequency in variants.rows:
            summary |= {f"mean {title}": ratio, f"Spearman's ρ with frequency rank, {title}": frequency}
        plots = [
            Plot("variants-by-layer", "line", "Mixing ratio by layer", "layers", "layer", "mean", "variant", "sd"),
            Plot("categories-by-layer", "line", end.title, "end-of-block", "layer", "mean", "category"),
        ]
        return self._result(summary, [variants, by_layer, end, by_category], plots)
