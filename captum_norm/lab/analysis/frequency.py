"""Correlates the length of transformed vectors with the frequency of tokens [Kobayashi et al. 2020]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Column, Plot, Table
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import GREATEST, LEAST, Grid, Moments, RankedCounts, number

VALUES = Grid(LEAST, GREATEST, 9)

_MEASURES = {"transformed": "‖f(x)‖", "weight": "attention weight α"}
_BANDS = 20


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
        self._ranked = RankedCounts(len(_MEASURES), VALUES)
        self._bands = Moments(len(_MEASURES), _BANDS)
        self.statistics = {"ranked": self._ranked, "bands": self._bands}
        self.options = {"weights": True, "head_norms": True, "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        values = self.token_values(batch, measured)
        visible = batch.real & ~batch.masked
        ranks = self._ranks()[batch.ids[visible]]
        found = torch.stack([values[name].cpu()[visible] for name in _MEASURES])  # (2, N)
        self._ranked.add(ranks, found)
        bands = (ranks * _BANDS).long().clamp(max=_BANDS - 1)
        self._bands.add(found.T[..., None], torch.nn.functional.one_hot(bands, _BANDS).bool()[:, None])

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
        return self._result(summary, [table, bands], plots)

    def _ranks(self) -> Tensor:
        if self.context.ranks is None:
            raise ValueError("the context has no frequency ranks")
        return self.context.ranks
