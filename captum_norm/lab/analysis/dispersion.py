"""Measures how much the lengths of transformed vectors differ [Kobayashi et al. 2020, section 4]."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Cell, Column, Plot, Table
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import Array, Moments, number

_TRANSFORMED, _INPUT = "‖f(x)‖", "‖x‖"


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
        lengths, inputs = _lengths(measured)
        real = batch.real.to(lengths.device)
        self._transformed.add(lengths.permute(0, 3, 1, 2).flatten(0, 1), real.flatten()[:, None, None])
        self._inputs.add(inputs.transpose(1, 2).flatten(0, 1), real.flatten()[:, None])

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:  # noqa: ARG002
        """See :class:`Analysis`."""
        lengths, inputs = _lengths(measured)
        return {"transformed": lengths.mean(2).transpose(1, 2), "input": inputs.transpose(1, 2)}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        mean, variation = self._transformed.mean, _variation(self._transformed)  # (L, H)
        measures = (
            Column("mean", "mean length"),
            Column("sd", "SD over tokens"),
            Column("cv", "coefficient of variation"),
            Column("min", "least"),
            Column("max", "greatest"),
        )
        by_head = Table(
            "heads",
            f"{_TRANSFORMED} by layer and head",
            (Column("layer", "layer"), Column("head", "head"), *measures),
            [
                (layer, head, *_row(self._transformed, layer, head))
                for layer in range(self.context.layers)
                for head in range(self.context.heads)
            ],
        )
        pooled = self._transformed.over(1)
        by_layer = Table(
            "layers",
            f"{_TRANSFORMED} of all heads, and {_INPUT}, by layer",
            (Column("layer", "layer"), Column("vector", "vector"), *measures),
            [
                (layer, vector, *_row(moments, layer))
                for vector, moments in ((_TRANSFORMED, pooled), (_INPUT, self._inputs))
                for layer in range(self.context.layers)
            ],
        )
        heads = self.context.heads
        extremes = {
            f"{which} variation": divmod(int(place), heads)
            for which, place in (("largest", variation.argmax()), ("smallest", variation.argmin()))
        }
        overall = Table(
            "overall",
            f"{_TRANSFORMED}: means over heads, and the heads that vary most and least from token to token",
            (Column("what", ""), Column("layer", "layer"), Column("head", "head"), *measures[:3]),
            [
                (
                    "mean over heads",
                    None,
                    None,
                    number(mean.mean()),
                    number(self._transformed.deviation.mean()),
                    number(variation.mean()),
                ),
                *(
                    (what, layer, head, *_row(self._transformed, layer, head)[:3])
                    for what, (layer, head) in extremes.items()
                ),
            ],
        )
        summary = {
            f"mean {_TRANSFORMED}": number(mean.mean()),
            f"SD of {_TRANSFORMED}, mean over heads": number(self._transformed.deviation.mean()),
            f"coefficient of variation of {_TRANSFORMED}, mean over heads": number(variation.mean()),
        }
        plots = [
            Plot("lengths-by-layer", "line", "Length by layer", "layers", "layer", "mean", "vector", "sd"),
            Plot("variation", "heat", "Coefficient of variation", "heads", "head", "layer", value="cv"),
        ]
        return self._result(summary, [overall, by_layer, by_head], plots)


def _lengths(measured: Measurements) -> tuple[Any, Any]:
    """‖f(x)‖, (B, L, H, S), and ‖x‖, (B, L, S)."""
    return measured.transformed_norms, measured.residual_norm


def _variation(moments: Moments) -> Array:
    return moments.deviation / moments.mean


def _row(moments: Moments, *place: int) -> tuple[Cell, ...]:
    measures = (moments.mean, moments.deviation, _variation(moments), moments.least, moments.greatest)
    return tuple(number(values[place]) for values in measures)
