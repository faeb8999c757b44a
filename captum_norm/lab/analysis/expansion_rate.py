"""Measures how much attention's affine map and the following normalisation stretch vectors [Kobayashi et al. 2021]."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from captum_norm.attr import Measurements
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Cell, Column, Plot, Table
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import Array, Moments, number
from captum_norm.lab.analysis.value_maps import AffineMap


class ExpansionRate(Analysis):
    """Singular values of f and of the normalisation, and their root mean square: the expansion rate.

    f(x) = Σ_h f_h(x) = x W + b sums all heads, without the bias of the output projection. It is linear in (x, 1) with
    the matrix [[W, 0], [b, 1]], which has D + 1 singular values. The normalisation after the residual connection of a
    post-norm layer is, with frozen statistics, γ ⊙ (I − 11ᵀ/D) / σ, without β; 1/σ is averaged over all tokens of the
    corpus.
    """

    name = "expansion-rate"
    description = (
        "How much the affine map f of all heads together, and the layer normalisation after attention, stretch "
        "vectors: singular values and their root mean square [Kobayashi et al. 2021]."
    )
    needs_value_maps = True

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._scale = Moments(context.layers)
        self.statistics = {"scale": self._scale}
        self.options = {"scopes": ["attn_res_ln" if "attn_res_ln" in self.context.scopes else "attn"], "maps": False}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        if measured.norm_scale is not None:
            real = batch.real.to(measured.norm_scale.device)
            self._scale.add(measured.norm_scale.transpose(1, 2).flatten(0, 1), real.flatten()[:, None])

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:
        """See :class:`Analysis`."""
        if measured.norm_scale is None:
            return super().token_values(batch, measured)
        return {"norm_scale": measured.norm_scale.transpose(1, 2)}

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        affine, norms = list[Array](), list[Array | None]()
        for found, scale in zip(self.context.value_maps, self._scale.mean, strict=True):
            layer = found.read()
            affine.append(np.linalg.svd(_homogeneous(layer), compute_uv=False))
            norms.append(None if layer.norm is None else np.linalg.svd(layer.norm, compute_uv=False) * scale)
        columns = [Column("rate", "expansion rate of f"), Column("max", "greatest singular value of f")]
        columns += [Column("min", "least singular value of f"), Column("norm_rate", "expansion rate of LN")]
        columns += [Column("norm_max", "greatest singular value of LN"), Column("product", "rate of f × rate of LN")]
        by_layer = Table(
            "layers",
            "Expansion rate by layer",
            (Column("layer", "layer"), *columns),
            [(layer, *_row(*values)) for layer, values in enumerate(zip(affine, norms, strict=True))],
        )
        spectrum = Table(
            "singular-values",
            "Singular values by layer, in descending order",
            (Column("layer", "layer"), Column("index", "index"), Column("f", "f"), Column("norm", "LN")),
            [
                (layer, index + 1, float(value), None if norm is None or index >= len(norm) else float(norm[index]))
                for layer, (values, norm) in enumerate(zip(affine, norms, strict=True))
                for index, value in enumerate(values)
            ],
        )
        summary = {"mean expansion rate of f": number(np.mean([_rate(values) for values in affine]))}
        rates = [_rate(norm) for norm in norms if norm is not None]
        if rates:
            summary["mean expansion rate of LN"] = number(np.mean(rates))
        plots = [
            Plot("rate-by-layer", "line", by_layer.title, "layers", "layer", "rate"),
            Plot("spectrum", "line", "Singular values of f", "singular-values", "index", "f", "layer"),
        ]
        return self._result(summary, [by_layer, spectrum], plots)


def _homogeneous(layer: AffineMap) -> Array:
    """[[W, 0], [b, 1]]."""
    width = layer.weight.shape[1]
    corner = np.zeros((len(layer.weight) + 1, width + 1))
    corner[:-1, :-1], corner[-1, :-1], corner[-1, -1] = layer.weight, layer.bias, 1
    return corner


def _rate(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _row(values: Array, norm: Array | None) -> tuple[Cell, ...]:
    own = (_rate(values), float(values.max()), float(values.min()))
    if norm is None:
        return *own, None, None, None
    return *own, number(_rate(norm)), number(norm.max()), number(_rate(values) * _rate(norm))
