"""Measures how much of each output comes from other positions [Kobayashi et al. 2021]."""

from collections.abc import Mapping

import torch
from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.functional import spearman
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Column, Plot, Table
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import Grid, Moments, RankedCounts, number
from captum_norm.models.layouts import Scope

# Below 2^-24, a ratio in float32 is rounding noise.
RATIOS = Grid(-24, 1, 10)

_SCOPES: tuple[Scope, ...] = ("attn", "attn_res", "attn_res_ln", "atb")
_TITLES = {
    "weights": "Attn-W",
    "attn": "Attn-N",
    "weights_res": "AttnRes-W",
    "attn_res": "AttnRes-N",
    "attn_res_ln": "AttnResLn-N",
    "atb": "ATB-N",
}


class MixingRatio(Analysis):
    """Mixing ratios of the paper's five variants, as far as the model's layers have them, by layer and category.

    Means are over all tokens; masked tokens are a category. Spearman's correlation with depth is between the means of
    the layers and their indices. The correlation with frequency is over all tokens that are not masked, between the
    token's frequency rank and its mean ratio over layers, binned at 1/1024 of an octave.
    """

    name = "mixing-ratio"
    description = (
        "How much of each output comes from other positions than its own, for attention alone, with the residual "
        "connection and with the normalisation, by weights (W) and by norms (N) [Kobayashi et al. 2021]."
    )
    needs_ranks = True
    mask_rate = 0.12

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        # A block with a norm after the residual connection, or nothing after it, ends at an earlier scope than atb.
        has_end = {"attn_res_ln", "attn_res"} & set(context.scopes)
        self._scopes = [scope for scope in _SCOPES if scope in context.scopes and (scope != "atb" or not has_end)]
        self._variants = [name for name in _TITLES if name in {"weights", "weights_res", *self._scopes}]
        categories = len(context.categories.names)
        self._ratios = Moments(context.layers, len(self._variants), categories)
        self._frequencies = RankedCounts(len(self._variants), RATIOS)
        self.statistics = {"ratios": self._ratios, "frequencies": self._frequencies}
        self.options = {"scopes": self._scopes, "weights": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        ratios = torch.stack([measured.mixing_ratio[name] for name in self._variants], -1).cpu()  # (B, L, S, V)
        ratios = ratios.transpose(1, 2)[batch.real]  # (N, L, V)
        categories = batch.categories[batch.real]
        members = torch.nn.functional.one_hot(categories, len(self.context.categories.names)).bool()
        self._ratios.add(ratios.unsqueeze(-1), members[:, None, None])
        if self.context.ranks is not None:
            visible = ~batch.masked[batch.real]
            ids = batch.ids[batch.real][visible]
            self._frequencies.add(self.context.ranks[ids], ratios[visible].double().mean(1).T)

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:  # noqa: ARG002
        """See :class:`Analysis`."""
        return {name: measured.mixing_ratio[name].transpose(1, 2) for name in self._variants}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        names, layers = self.context.categories.names, range(self.context.layers)
        seen = [place for place in range(len(names)) if self._ratios.count[..., place].any()]
        pooled = self._ratios.over(2)  # (L, V)
        depth = torch.arange(self.context.layers)
        correlations = self._frequencies.spearman()
        variants = Table(
            "variants",
            "Mixing ratio, all tokens: mean over layers, layers with the least and the greatest mean, and Spearman's ρ",
            (
                Column("variant", "variant"),
                Column("mean", "mean mixing ratio"),
                Column("min", "least mean of a layer"),
                Column("max", "greatest mean of a layer"),
                Column("depth", "Spearman's ρ with depth"),
                Column("frequency", "Spearman's ρ with frequency rank"),
            ),
            [
                (
                    _TITLES[name],
                    number(pooled.mean[:, place].mean()),
                    number(pooled.mean[:, place].min()),
                    number(pooled.mean[:, place].max()),
                    number(spearman(depth, torch.from_numpy(pooled.mean[:, place])).item()),
                    number(correlations[place]),
                )
                for place, name in enumerate(self._variants)
            ],
        )
        measures = (
            Column("mean", "mixing ratio"),
            Column("sd", "SD over tokens"),
            Column("min", "least"),
            Column("max", "greatest"),
            Column("tokens", "tokens"),
        )

        def row(moments: Moments, *place: int) -> tuple[float | None, ...]:
            found = (moments.mean, moments.deviation, moments.least, moments.greatest)
            return *(number(values[place]) for values in found), int(moments.count[place])

        by_layer = Table(
            "layers",
            "Mixing ratio by layer and variant, all tokens",
            (Column("layer", "layer"), Column("variant", "variant"), *measures),
            [
                (layer, _TITLES[name], *row(pooled, layer, place))
                for place, name in enumerate(self._variants)
                for layer in layers
            ],
        )
        by_category = Table(
            "categories",
            "Mixing ratio by layer, variant and category of token",
            (Column("layer", "layer"), Column("variant", "variant"), Column("category", "category"), *measures),
            [
                (layer, _TITLES[name], names[category], *row(self._ratios, layer, place, category))
                for place, name in enumerate(self._variants)
                for layer in layers
                for category in seen
            ],
        )
        last = self._variants[-1]
        end = Table(
            "end-of-block",
            f"Mixing ratio at the end of the attention block ({_TITLES[last]}) by layer and category of token",
            (Column("layer", "layer"), Column("category", "category"), *measures),
            [
                (layer, names[category], *row(self._ratios, layer, len(self._variants) - 1, category))
                for layer in layers
                for category in seen
            ],
        )
        summary: dict[str, float | None] = {}
        for found in variants.rows:
            summary[f"mean {found[0]}"] = found[1]  # type: ignore[assignment]
            summary[f"Spearman's ρ with frequency rank, {found[0]}"] = found[5]  # type: ignore[assignment]
        plots = [
            Plot("variants-by-layer", "line", "Mixing ratio by layer", "layers", "layer", "mean", "variant", "sd"),
            Plot("categories-by-layer", "line", end.title, "end-of-block", "layer", "mean", "category"),
        ]
        return self._result(summary, [variants, by_layer, end, by_category], plots)
