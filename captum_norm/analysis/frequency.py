"""Correlates the length of transformed vectors with the frequency of tokens [Kobayashi et al. 2020]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from captum_norm.analysis.analysis import Analysis, AnalysisContext, Asked, Findings
from captum_norm.analysis.results import Column, Plot, Table
from captum_norm.analysis.sequences import Batch
from captum_norm.analysis.statistics import GREATEST, LEAST, Grid, Moments, RankedCounts, Statistic, number
from captum_norm.attr import Measurements

VALUES = Grid(LEAST, GREATEST, 9)

_MEASURES = {"transformed": "‖f(x)‖", "weight": "attention weight α"}
_BANDS = 20


class Frequency(Analysis):
    """Spearman's correlation of frequency rank with ‖f(x)‖ and with α, over all tokens of the corpus.

    Of each token, ‖f(x)‖ is the mean over layers and heads, α the mean over these and over the queries that may look at
    it. Both are put in bins of 1/512 of an octave; ranks are exact. The bands of the table hold a 20th of the tokens
    each, as near as tokens of one frequency allow.
    """

    name = "frequency"
    description = (
        "How the length of the transformed vector ‖f(x)‖ of a token, and the attention weight α it gets, go with the "
        "rank of its frequency, the most frequent token having the first [Kobayashi et al. 2020]."
    )
    needs_ranks = True

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._ranked = RankedCounts(len(_MEASURES), VALUES)
        self._bands = Moments(len(_MEASURES), _BANDS)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        """See :class:`Analysis`."""
        return {"ranked": self._ranked, "bands": self._bands}

    def _asked(self) -> Asked:
        return {"weights": True, "head_norms": True, "maps": False}

    def update(self, batch: Batch, measured: Measurements) -> None:
        """Take in a batch."""
        values = self.token_values(batch, measured)
        visible = batch.real & ~batch.masked
        ranks = self._ranks()[batch.ids[visible]]
        found = torch.stack([values[name].cpu()[visible] for name in _MEASURES])  # (2, N)
        self._ranked.add(ranks, found)
        bands = (ranks * _BANDS).long().clamp(max=_BANDS - 1)
        self._bands.add(found.T[..., None], torch.nn.functional.one_hot(bands, _BANDS).bool()[:, None])

    def token_values(self, batch: Batch, measured: Measurements) -> Mapping[str, Tensor]:
        """See :class:`Analysis`."""
        weights: Any = measured.weights  # (B, L, Q, K)
        lengths: Any = measured.transformed_norms
        real = batch.real.to(weights.device)
        queries = real.flip(1).cumsum(1).flip(1) if self.context.causal else real.sum(1, keepdim=True)
        received = weights.double().mean(1).sum(1) / queries.clamp(min=1)
        return {"transformed": lengths.double().mean((1, 2)), "weight": received}

    def findings(self) -> Findings:
        """What the statistics say."""
        correlations = self._ranked.spearman()
        table = Table(
            "correlation",
            "Spearman's correlation with the rank of the token's frequency, over all tokens",
            (Column("measure", "measure"), Column("spearman", "Spearman's ρ with frequency rank")),
            [(label, number(rho)) for label, rho in zip(_MEASURES.values(), correlations, strict=True)],
        )
        bands = Table(
            "bands",
            "Means by frequency, the most frequent tokens first",
            (
                Column("rank", "share of all tokens that are more frequent"),
                *(Column(name, f"mean {label}") for name, label in _MEASURES.items()),
                *(Column(f"{name}_sd", f"SD of {label}") for name, label in _MEASURES.items()),
                Column("tokens", "tokens"),
            ),
            [
                (
                    band / _BANDS,
                    *(number(value) for value in self._bands.mean[:, band]),
                    *(number(value) for value in self._bands.deviation[:, band]),
                    int(self._bands.count[0, band]),
                )
                for band in range(_BANDS)
                if self._bands.count[0, band]
            ],
        )
        summary = {f"Spearman's ρ of frequency rank with {row[0]}": number(row[1]) for row in table.rows}
        plots = [
            Plot(f"{name}-by-frequency", "line", f"{label} by frequency", "bands", "rank", name, error=f"{name}_sd")
            for name, label in _MEASURES.items()
        ]
        return Findings(summary, [table, bands], plots)

    def _ranks(self) -> Tensor:
        if self.context.ranks is None:
            raise ValueError("the context has no frequency ranks")
        return self.context.ranks
