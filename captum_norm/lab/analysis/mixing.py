"""Mixing ratios, and how far attention's affine map and the norm stretch vectors [Kobayashi et al. 2021]."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_norm.attr import AttentionMapAttribution, Measurements
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.record import Layer
from captum_norm.functional import Normalization, apply_linear, spearman
from captum_norm.lab.analysis.analysis import AffineMap, Analysis, AnalysisContext
from captum_norm.lab.analysis.results import AnalysisResult, Cell, Plot, Table, columns
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.lab.analysis.statistics import Array, Grid, Moments, RankedCounts, number
from captum_norm.results.maps import MapUnits

# Below 2^-24, a ratio in float32 is rounding noise.
RATIOS = Grid(-24, 1, 10)

_TITLES = {
    "weights": "Attn-W",
    "attn": "Attn-N",
    "weights_res": "AttnRes-W",
    "attn_res": "AttnRes-N",
    "attn_res_ln": "AttnResLn-N",
    "atb": "ATB-N",
}
# This many tokens distinguish the columns of a module's output.
_ROWS = 32


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
        scopes = [name for name in _TITLES if name in context.scopes and (name != "atb" or not has_end)]
        self._variants = [name for name in _TITLES if name in {"weights", "weights_res", *scopes}]
        self._ratios = Moments(context.layers, len(self._variants), len(context.categories.names))
        self._frequencies = RankedCounts(len(self._variants), RATIOS)
        self.statistics = {"ratios": self._ratios, "frequencies": self._frequencies}
        self.options = {"scopes": scopes, "weights": True, "maps": False}

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
        pooled, depth = self._ratios.over(2), torch.arange(self.context.layers)
        titles = [_TITLES[name] for name in self._variants]
        by_variant = list[tuple[str, float | None, float | None, float | None, float | None, float | None]]()
        for title, means, frequency in zip(titles, pooled.mean.T, self._frequencies.spearman(), strict=True):
            rho = spearman(depth, torch.from_numpy(means)).item()
            least, greatest = number(means.min()), number(means.max())
            by_variant.append((title, number(means.mean()), least, greatest, number(rho), number(frequency)))
        variants = Table(
            "variants",
            "Mixing ratio, all tokens: mean over layers, layers with the least and the greatest mean, and Spearman's ρ",
            columns(
                variant="variant",
                mean="mean mixing ratio",
                min="least mean of a layer",
                max="greatest mean of a layer",
                depth="Spearman's ρ with depth",
                frequency="Spearman's ρ with frequency rank",
            ),
            by_variant,
        )
        measures = columns(mean="mixing ratio", sd="SD over tokens", min="least", max="greatest", tokens="tokens")
        by_layer = Table(
            "layers",
            "Mixing ratio by layer and variant, all tokens",
            (*columns(layer="layer", variant="variant"), *measures),
            [
                (layer, title, *_moments_row(pooled, layer, place))
                for place, title in enumerate(titles)
                for layer in layers
            ],
        )
        by_category = Table(
            "categories",
            "Mixing ratio by layer, variant and category of token",
            (*columns(layer="layer", variant="variant", category="category"), *measures),
            [
                (layer, title, names[category], *_moments_row(self._ratios, layer, place, category))
                for place, title in enumerate(titles)
                for layer in layers
                for category in seen
            ],
        )
        end = Table(
            "end-of-block",
            f"Mixing ratio at the end of the attention block ({titles[-1]}) by layer and category of token",
            (*columns(layer="layer", category="category"), *measures),
            [(layer, *cells) for layer, title, *cells in by_category.rows if title == titles[-1]],
        )
        summary: dict[str, float | None] = {}
        for row in by_variant:
            summary |= {f"mean {row[0]}": row[1], f"Spearman's ρ with frequency rank, {row[0]}": row[5]}
        plots = [
            Plot("variants-by-layer", "line", "Mixing ratio by layer", "layers", "layer", "mean", "variant", "sd"),
            Plot("categories-by-layer", "line", end.title, "end-of-block", "layer", "mean", "category"),
        ]
        return self._result(summary, [variants, by_layer, end, by_category], plots)


def _moments_row(moments: Moments, *place: int) -> tuple[Cell, ...]:
    measures = (moments.mean, moments.deviation, moments.least, moments.greatest)
    return *(number(values[place]) for values in measures), int(moments.count[place])


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
    needs_affine_maps = True

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
        maps, norms = list[Array](), list[Array | None]()
        for read, scale in zip(self.context.affine_maps, self._scale.mean, strict=True):
            layer = read()
            corner = np.pad(layer.weight, (0, 1))
            corner[-1, :-1], corner[-1, -1] = layer.bias, 1
            maps.append(np.linalg.svd(corner, compute_uv=False))
            norms.append(None if layer.norm is None else np.linalg.svd(layer.norm, compute_uv=False) * scale)
        layers = list(enumerate(zip(maps, norms, strict=True)))
        by_layer = Table(
            "layers",
            "Expansion rate by layer",
            columns(
                layer="layer",
                rate="expansion rate of f",
                max="greatest singular value of f",
                min="least singular value of f",
                norm_rate="expansion rate of LN",
                norm_max="greatest singular value of LN",
                product="rate of f × rate of LN",
            ),
            [(layer, *_rates(*values)) for layer, values in layers],
        )
        spectrum = Table(
            "singular-values",
            "Singular values by layer, in descending order",
            columns(layer="layer", index="index", f="f", norm="LN"),
            [
                (layer, index + 1, float(value), None if norm is None or index >= len(norm) else float(norm[index]))
                for layer, (values, norm) in layers
                for index, value in enumerate(values)
            ],
        )
        summary = {"mean expansion rate of f": number(np.mean([_rate(values) for values in maps]))}
        rates = [_rate(norm) for norm in norms if norm is not None]
        if rates:
            summary["mean expansion rate of LN"] = number(np.mean(rates))
        plots = [
            Plot("rate-by-layer", "line", by_layer.title, "layers", "layer", "rate"),
            Plot("spectrum", "line", "Singular values of f", "singular-values", "index", "f", "layer"),
        ]
        return self._result(summary, [by_layer, spectrum], plots)


def _rate(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _rates(values: Array, norm: Array | None) -> tuple[Cell, ...]:
    cells = (_rate(values), float(values.max()), float(values.min()))
    if norm is None:
        return *cells, None, None, None
    return *cells, number(_rate(norm)), number(norm.max()), number(_rate(values) * _rate(norm))


def affine_maps(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Callable[[], AffineMap]]:
    """Find each layer's f on inputs of three tokens or more; the functions read it from the current parameters."""

    def read(layer: int) -> AffineMap:
        (source,) = _ValueReader(model).sources(inputs, [layer])
        return source.read()

    return [partial(read, layer) for layer in range(len(_ValueReader(model).sources(inputs)))]


@dataclass(frozen=True, eq=False)
class _Source:
    """The columns of a module's output that, plus an offset, are a layer's values, and what follows them."""

    module: nn.Module
    inputs: Tensor
    outputs: Tensor
    places: list[int]
    offset: Tensor
    output: Tensor
    norm: Normalization | None

    def is_affine(self) -> bool:
        """Whether the module computed x W + b, up to rounding."""
        if not self.inputs.is_floating_point():
            return False
        weight, bias = self._affine()
        expected = self.inputs.flatten(0, -2).cpu().double() @ weight + bias
        rounding = torch.finfo(self.outputs.dtype).eps ** 0.5
        atol = rounding * float(expected.abs().amax())
        return torch.allclose(self.outputs.cpu().double(), expected, rtol=0, atol=atol)

    @torch.no_grad()
    def read(self) -> AffineMap:
        """Compute the matrices."""
        weight, bias = (part[..., self.places] for part in self._affine())
        output, eye = self.output.cpu(), torch.eye(self.output.shape[1], dtype=torch.float64, device=self.output.device)
        norm = None if self.norm is None else apply_linear(self.norm, eye).cpu().numpy()
        return AffineMap((weight @ output).numpy(), ((bias + self.offset) @ output).numpy(), norm)

    def _affine(self) -> tuple[Tensor, Tensor]:
        """W and b, in float64, by what a copy of the module makes of the unit vectors and of 0."""
        probe, width = copy.deepcopy(self.module).to("cpu", torch.float64), self.inputs.shape[-1]
        bias = probe(torch.zeros(1, width, dtype=torch.float64))
        return probe(torch.eye(width, dtype=torch.float64)) - bias, bias[0]


class _ValueReader(AttentionMapAttribution):
    """Finds the modules that output the values of a model's layers; its maps are of no use."""

    name, title, units = "values", "values", MapUnits("weight")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, accumulate=torch.float64)
        self._calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []
        self._candidates: list[list[_Source]] = []

    def sources(self, inputs: Mapping[str, Tensor], layers: list[int] | None = None) -> list[_Source]:
        """Run the model, and return the source of the values of each layer."""
        with torch.no_grad():
            with self._noting_calls():
                self.maps(dict(inputs), layers=layers)
            # Modules are copied when nothing hooks into them any more.
            sources = [next(filter(_Source.is_affine, candidates), None) for candidates in self._candidates]
        if None in sources:
            layer = f"layer {sources.index(None)}"
            raise UnsupportedModelError(
                f"the value projection of {layer} was not found: no linear module outputs the values"
            )
        return [source for source in sources if source is not None]

    def layer_map(self, layer: Layer) -> Tensor:
        """Find the modules whose output contains the values of one layer, among those called so far."""
        values = layer.values.transpose(1, 2).flatten(0, 1).flatten(1)  # (B · K, H · d)
        width, candidates = values.shape[1], []
        output = layer.block.projection.weight(values.dtype)
        for name, module, inputs, outputs in reversed(self._calls):
            for added in (None, *self._vectors(name, width)):
                offset = values.new_zeros(width) if added is None else added.to(values)
                places = _columns(values, outputs.to(values), offset)
                if places is not None:
                    source = _Source(module, inputs, outputs, places, offset.cpu(), output, layer.carry.final)
                    candidates.append(source)
        self._candidates.append(candidates)
        return layer.weights.mean(1)

    def _vectors(self, name: str, width: int) -> list[Tensor]:
        """The parameters beside a module that attention may add to its values."""
        beside = self.model.get_submodule(name.rpartition(".")[0])
        return [parameter for parameter in beside.parameters(recurse=False) if parameter.shape == (width,)]

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        """Note the input and output of every module that has a matrix; layers may share a module."""
        calls, handles = self._calls, []

        def hook(name: str) -> Callable[..., None]:
            def note(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
                if arguments and isinstance(arguments[0], Tensor) and isinstance(output, Tensor):
                    calls.append((name, module, arguments[0], output.clone().flatten(0, -2)))

            return note

        for name, module in self.model.named_modules():
            if any(parameter.dim() == 2 for parameter in module.parameters(recurse=False)):
                handles.append(module.register_forward_hook(hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            calls.clear()


def _columns(values: Tensor, outputs: Tensor, offset: Tensor) -> list[int] | None:
    """The columns of a module's output that, plus a vector, equal the values bit for bit; None unless all are found."""
    if len(outputs) != len(values):
        return None
    places, few = list[int](), outputs[:_ROWS].cpu()
    for column, added in zip(values[:_ROWS].T.cpu(), offset.cpu(), strict=True):
        equal = (few + added == column[:, None]).all(0).nonzero()
        if not len(equal):
            return None
        places.append(int(equal[0]))
    return places if torch.equal(outputs[:, places] + offset, values) else None
