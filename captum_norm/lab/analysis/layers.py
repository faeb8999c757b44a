"""Analyses of layers: how far they stretch vectors, and how much each component changes the map."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.measurements import Measurements
from captum_norm.attr.norms import NormMeter
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.record import Layer
from captum_norm.forward.session import MeterOptions
from captum_norm.functional import apply_linear, centred_ranks
from captum_norm.lab.analysis import statistics
from captum_norm.lab.analysis.corpus import TokenBatch
from captum_norm.lab.analysis.results import AnalysisResult, Plot, grid_table, table_of
from captum_norm.models import Explainable, Inputs, Scope
from captum_norm.results.maps import MapUnits

NORMS = statistics.Grid(statistics.LEAST, statistics.GREATEST, 4)


class ExpansionRate(statistics.Analysis):
    """Singular values of f and of the normalisation behind it, and their root mean square: the expansion rate."""

    name = "expansion-rate"
    description = (
        "How much the affine map f of all heads together, and the layer normalisation after attention, stretch "
        "vectors: singular values and their root mean square [Kobayashi et al. 2021]."
    )

    def __init__(self, context: statistics.AnalysisContext) -> None:
        super().__init__(context)
        self._scale = statistics.Moments(context.layers)
        self.options = {"scopes": ["attn_res_ln" if "attn_res_ln" in context.scopes else "attn"], "maps": False}

    @classmethod
    def prepare(cls, context: statistics.AnalysisContext) -> Any:
        """Return what reads each layer's affine map; values that are none are refused before the corpus is read."""
        reads = [partial(_read_affine_map, context.model, context.inputs, layer) for layer in range(context.layers)]
        for read in reads:
            read()
        return reads

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        if measured.norm_scale is not None:
            real = batch.real.to(measured.norm_scale.device)
            self._scale.add(measured.norm_scale.transpose(1, 2).flatten(0, 1), real.flatten()[:, None])

    def result(self) -> AnalysisResult:
        rates = list[tuple[Any, ...]]()
        for layer, (read, scale) in enumerate(zip(self.context.prepared, self._scale.summary().mean, strict=True)):
            affine = read()
            # f(x) = x W + b is linear in (x, 1).
            corner = np.pad(affine.weight, (0, 1))
            corner[-1, :-1], corner[-1, -1] = affine.bias, 1
            values = np.linalg.svd(corner, compute_uv=False)
            norm = np.array([np.nan])
            if affine.norm is not None:
                norm = np.linalg.svd(affine.norm, compute_uv=False) * scale
            rate, norm_rate = (np.sqrt(np.mean(part**2)) for part in (values, norm))
            rates.append((layer, rate, values.max(), values.min(), norm_rate, norm.max(), rate * norm_rate))
        by_layer = table_of(
            "layers",
            "Expansion rate by layer",
            {
                "layer": "layer",
                "rate": "expansion rate of f",
                "max": "greatest singular value of f",
                "min": "least singular value of f",
                "norm_rate": "expansion rate of LN",
                "norm_max": "greatest singular value of LN",
                "product": "rate of f × rate of LN",
            },
            rates,
        )
        summary = {"mean expansion rate of f": np.mean([row[1] for row in rates])}
        norm_rates = np.array([row[4] for row in rates])
        if not np.isnan(norm_rates).all():
            summary["mean expansion rate of LN"] = np.nanmean(norm_rates)
        plots = [Plot("rate-by-layer", "line", by_layer.title, "layers", "layer", "rate")]
        return self._result(summary, [by_layer], plots)


class AffineMap(NamedTuple):
    """One layer's f(x) = Σ_h f_h(x) = x W + b, without the output projection's bias, and the norm behind the sum."""

    weight: statistics.Array
    bias: statistics.Array
    norm: statistics.Array | None  # but for 1/σ


def _read_affine_map(model: nn.Module, inputs: Mapping[str, Tensor], layer: int) -> AffineMap:
    reader = _ValueReader(model, accumulate=torch.float64, differentiable=True)
    reader.maps(dict(inputs), layers=[layer])
    handle = reader.module.register_forward_pre_hook(reader.track, with_kwargs=True)
    try:
        reader.maps(dict(inputs), layers=[layer])
    finally:
        handle.remove()
    if reader.affine is None:
        raise UnsupportedModelError(
            f"the value projection of layer {layer} was not found: its values are no affine map of what its attention "
            "receives"
        )
    return reader.affine


class _ValueReader(AttentionMapAttribution):
    """Reads f of a layer from the derivatives of its values by what attention receives; its maps are of no use."""

    name, units = "values", MapUnits("weight")
    received: Tensor | None = None
    affine: AffineMap | None = None

    def layer_map(self, layer: Layer) -> Tensor:
        """Note the attention module, and read f once it is known what this received."""
        self.module = layer.call.module
        if self.received is not None:
            self.affine = _affine_map(layer, self.received)
        return layer.weights.mean(1)

    def track(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Make what the module receives the leaf of a graph."""
        values = [*arguments, *options.values()]
        place = next(index for index, value in enumerate(values) if isinstance(value, Tensor))
        values[place] = self.received = values[place].detach().requires_grad_()
        return tuple(values[: len(arguments)]), dict(zip(options, values[len(arguments) :], strict=True))


def _affine_map(layer: Layer, received: Tensor) -> AffineMap | None:
    """Read f from a layer's values and what its attention received; None if they are no affine map of it."""
    values = layer.values.transpose(1, 2).flatten(2).flatten(0, 1)  # (B · K, H · d)
    inputs, dtype = received.detach().flatten(0, -2).double(), values.dtype
    weight = inputs.new_zeros(inputs.shape[1], values.shape[1])
    for columns in torch.arange(values.shape[1], device=values.device).split(len(values)):
        # One column at each position, whose value depends on this position alone.
        rows = torch.arange(len(columns), device=values.device)
        (gradient,) = torch.autograd.grad(values[rows, columns].sum(), received, retain_graph=True)
        weight[:, columns] = gradient.flatten(0, -2)[: len(columns)].T.double()
    values = values.detach().double()
    bias = (values - inputs @ weight).mean(0)
    rounding = torch.finfo(received.dtype).eps ** 0.5
    if not torch.allclose(inputs @ weight + bias, values, rtol=0, atol=rounding * float(values.abs().amax())):
        return None
    output, final = layer.block.projection.weight(dtype).detach(), layer.carry.final
    eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)
    norm = None if final is None else apply_linear(final, eye).detach().cpu().numpy()
    return AffineMap((weight @ output).cpu().numpy(), (bias @ output).cpu().numpy(), norm)


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
        options: see :class:`captum_norm.forward.session.MeterOptions`.

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
    scopes = tuple(stages)
    ((stack, measured),) = meter.measure(inputs, additional_forward_args, scopes=scopes).items()
    maps = torch.stack([measured.norms[scope].detach().cpu() for scope in scopes])
    entries = list(_entries(maps, measured.real.cpu(), causal=stack == "decoder"))
    return ContextualizationChange(
        tuple(stages.values())[1:],
        scopes,
        torch.stack([_changes(norms).T for norms in entries]),
        _changes(torch.cat(entries, -1)).T,
    )


def _entries(maps: Tensor, real: Tensor, *, causal: bool) -> Iterator[Tensor]:
    """Yield the entries of each example's maps, (C + 1, B, L, S, S): pairs of real positions, (C + 1, L, n)."""
    pairs = real[:, :, None] & real[:, None, :]
    for example, pair in enumerate(pairs.tril() if causal else pairs):
        yield maps[:, example][..., pair]


def _changes(norms: Tensor) -> Tensor:
    """1 − Spearman's correlation of entries before and after each component, (C + 1, L, n) -> (C, L)."""
    ranks: Tensor = torch.stack([centred_ranks(row) for row in norms.flatten(0, 1)]).unflatten(0, norms.shape[:2])
    squares = ranks.square().sum(-1)
    changes: Tensor = 1 - (ranks[:-1] * ranks[1:]).sum(-1) / (squares[:-1] * squares[1:]).sqrt()
    return changes


class ComponentChanges(statistics.Analysis):
    """1 − Spearman's correlation of the map before and after each component, see :func:`contextualization_change`."""

    name = "contextualization-change"
    description = (
        "How much each component of a layer changes the contextualisation: 1 − Spearman's ρ of the maps before and "
        "after it [Kobayashi et al. 2024]."
    )

    def __init__(self, context: statistics.AnalysisContext) -> None:
        super().__init__(context)
        self._components = list(context.prepared.values())[1:]
        self._scopes = list(context.prepared)
        shape = len(self._components), context.layers
        self._macro = statistics.Moments(*shape)  # over sequences
        self._micro = statistics.Counts(shape[0] * shape[1], NORMS, NORMS)  # of the pairs of all sequences
        self.options = {"scopes": self._scopes}

    @classmethod
    def prepare(cls, context: statistics.AnalysisContext) -> Any:
        """Find the scopes through the whole layer."""
        return context.meter.stages(context.inputs)

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        maps = torch.stack([measured.norms[scope].cpu() for scope in self._scopes])  # (C + 1, B, L, S, S)
        groups = torch.arange(len(self._components) * self.context.layers).view(len(self._components), -1, 1)
        for norms in _entries(maps, batch.real, causal=self.context.causal):
            change = _changes(norms)
            self._macro.add(change[None], ~change.isnan()[None])
            places = NORMS.places(norms).long()
            self._micro.add((groups * NORMS.size + places[:-1]) * NORMS.size + places[1:])

    def result(self) -> AnalysisResult:
        layers, (mean, deviation, *_) = range(self.context.layers), self._macro.summary()  # (C, L)
        micro = 1 - np.array(self._micro.spearman()).reshape(mean.shape)
        labels = [f"{place}. {component}" for place, component in enumerate(self._components, 1)]
        steps = [f"{before} → {after}" for before, after in pairwise(self._scopes)]
        measures = {"scopes": "from → to", "macro": "contextualisation change, mean over sequences"}
        micro_label = {"micro": "contextualisation change, all pairs together"}
        by_layer = grid_table(
            "layers",
            "Contextualisation change by component and layer",
            {"layer": layers, "component": labels},
            measures | {"sd": "SD over sequences"} | micro_label,
            [[steps] * len(layers), mean.T, deviation.T, micro.T],
        )
        by_component = grid_table(
            "components",
            "Contextualisation change by component, means over layers",
            {"component": labels},
            measures | micro_label,
            [steps, mean.mean(1), micro.mean(1)],
        )
        summary = {f"macro, {label}": size for label, size in zip(labels, mean.mean(1), strict=True)}
        plots = [
            Plot("change", "heat", by_layer.title, "layers", "layer", "component", value="macro"),
            Plot("change-by-layer", "line", by_layer.title, "layers", "layer", "macro", "component", "sd"),
        ]
        return self._result(summary, [by_component, by_layer], plots)
