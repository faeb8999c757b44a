"""Analyses of layers: how far they stretch vectors, and how much each component changes the map."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from captum_norm.attr import AttentionMapAttribution, Measurements, MeterOptions, NormMeter
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.record import Layer
from captum_norm.functional import apply_linear, centred_ranks
from captum_norm.lab.analysis.corpus import TokenBatch, TokenSequence
from captum_norm.lab.analysis.results import AnalysisResult, Plot, table_of
from captum_norm.lab.analysis.statistics import (
    GREATEST,
    LEAST,
    AffineMap,
    Analysis,
    AnalysisContext,
    Array,
    Counts,
    Grid,
    Moments,
    Statistic,
)
from captum_norm.models import Explainable, Inputs, Scope
from captum_norm.results.maps import MapUnits

NORMS = Grid(LEAST, GREATEST, 4)

# How many of the most changed pairs are listed.
_LISTED = 10


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
        rates, spectra = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        for layer, (read, scale) in enumerate(zip(self.context.affine_maps, self._scale.mean, strict=True)):
            affine = read()
            corner = np.pad(affine.weight, (0, 1))
            corner[-1, :-1], corner[-1, -1] = affine.bias, 1
            values = np.linalg.svd(corner, compute_uv=False)
            norm = np.array([np.nan])
            if affine.norm is not None:
                norm = np.linalg.svd(affine.norm, compute_uv=False) * scale
            rate, norm_rate = (np.sqrt(np.mean(part**2)) for part in (values, norm))
            rates.append((layer, rate, values.max(), values.min(), norm_rate, norm.max(), rate * norm_rate))
            spectra += [(layer, index, *pair) for index, pair in enumerate(zip_longest(values, norm), 1)]
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
        spectrum = table_of(
            "singular-values",
            "Singular values by layer, in descending order",
            {"layer": "layer", "index": "index", "f": "f", "norm": "LN"},
            spectra,
        )
        summary = {"mean expansion rate of f": np.mean([row[1] for row in rates])}
        norm_rates = np.array([row[4] for row in rates])
        if not np.isnan(norm_rates).all():
            summary["mean expansion rate of LN"] = np.nanmean(norm_rates)
        plots = [
            Plot("rate-by-layer", "line", by_layer.title, "layers", "layer", "rate"),
            Plot("spectrum", "line", "Singular values of f", "singular-values", "index", "f", "layer"),
        ]
        return self._result(summary, [by_layer, spectrum], plots)


def affine_maps(model: nn.Module, inputs: Mapping[str, Tensor]) -> Sequence[Callable[[], AffineMap]]:
    """Find each layer's f on inputs of three tokens or more; the functions read it from the current parameters."""
    reader = _ValueReader(model)
    functions = [partial(reader.read, inputs, layer) for layer in range(reader.find_modules(inputs))]
    for read in functions:
        read()  # refuses values that are no affine map before the corpus is read
    return functions


class _ValueReader(AttentionMapAttribution):
    """Reads the affine maps from what attention receives to its values: their derivatives; its maps are of no use."""

    name, title, units = "values", "values", MapUnits("weight")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, accumulate=torch.float64, differentiable=True)
        self._modules: list[nn.Module] = []
        self._received: dict[nn.Module, Tensor] = {}
        self._affine: AffineMap | None = None

    def find_modules(self, inputs: Mapping[str, Tensor]) -> int:
        """Run the model, to find the attention module of each layer; return the number of layers."""
        self.maps(dict(inputs))
        return len(self._modules)

    def read(self, inputs: Mapping[str, Tensor], layer: int) -> AffineMap:
        """Run the model, and read f of one layer."""
        handles = [module.register_forward_pre_hook(self._track, with_kwargs=True) for module in {*self._modules}]
        try:
            self.maps(dict(inputs), layers=[layer])
        finally:
            for handle in handles:
                handle.remove()
            self._received.clear()
        if self._affine is None:
            raise UnsupportedModelError(
                f"the value projection of layer {layer} was not found: its values are no affine map of what its "
                "attention receives"
            )
        return self._affine

    def layer_map(self, layer: Layer) -> Tensor:
        """Note the attention module of a layer, or read its f."""
        received = self._received.get(layer.call.module)
        if received is None:
            self._modules.append(layer.call.module)
        else:
            values = layer.values.transpose(1, 2).flatten(2).flatten(0, 1)  # (B · K, H · d)
            self._affine = _affine_map(values, received, layer)
        return layer.weights.mean(1)

    def _track(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Make what a module receives the leaf of a graph."""
        values = [*arguments, *options.values()]
        place = next(index for index, value in enumerate(values) if isinstance(value, Tensor))
        values[place] = self._received[module] = values[place].detach().requires_grad_()
        return tuple(values[: len(arguments)]), dict(zip(options, values[len(arguments) :], strict=True))


def _affine_map(values: Tensor, received: Tensor, layer: Layer) -> AffineMap | None:
    """Read f from values (B · K, H · d) and what attention received; None if they are no affine map of it."""
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
        options: see :class:`captum_norm.MeterOptions`.

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
    scopes = tuple(stage.scope for stage in stages)
    ((stack, measured),) = meter.measure(inputs, additional_forward_args, scopes=scopes).items()
    maps = torch.stack([measured.norms[scope].detach().cpu() for scope in scopes])  # (C + 1, B, L, S, S)
    real = measured.real.cpu()
    pairs = real[:, :, None] & real[:, None, :]
    if stack == "decoder":
        pairs = pairs.tril()
    entries = [maps[:, example][..., pair] for example, pair in enumerate(pairs)]  # (C + 1, L, n)
    return ContextualizationChange(
        tuple(stage.component for stage in stages[1:]),
        scopes,
        torch.stack([_changes(_ranks(norms)).T for norms in entries]),
        _changes(_ranks(torch.cat(entries, -1))).T,
    )


def _ranks(norms: Tensor) -> Tensor:
    """Centred ranks of the entries of each map, (C + 1, L, n) -> (C + 1, L, n)."""
    ranks: Tensor = torch.stack([centred_ranks(row) for row in norms.flatten(0, 1)]).unflatten(0, norms.shape[:2])
    return ranks


def _changes(ranks: Tensor) -> Tensor:
    """1 − Spearman's correlation before and after each component, (C + 1, L, n) -> (C, L)."""
    squares = ranks.square().sum(-1)
    changes: Tensor = 1 - (ranks[:-1] * ranks[1:]).sum(-1) / (squares[:-1] * squares[1:]).sqrt()
    return changes


class ChangedPairs(Statistic):
    """The pairs of tokens that each component moves furthest up and down among the pairs of their sequence.

    ``change`` is (2, C, L, n) for up and down, ``place`` (2, C, L, n, 4): line, window, query and key, ``words``
    (2, C, L, n, 2).
    """

    def __init__(self, *shape: int) -> None:
        change, place = np.zeros((2, *shape, 0)), np.zeros((2, *shape, 0, 4), np.int64)
        super().__init__(change=change, place=place, words=np.zeros((2, *shape, 0, 2), np.str_))

    def join(self, parts: Mapping[str, Array]) -> None:
        """Keep the pairs that change most; the first in the text, of equal ones."""
        pairs = {name: np.concatenate([part, parts[name]], 3) for name, part in self.parts.items()}
        keys = np.moveaxis(pairs["place"], -1, 0)[::-1]
        order = np.lexsort((*keys, -pairs["change"]))[..., :_LISTED]
        for name, part in pairs.items():
            self.parts[name] = np.take_along_axis(part, order.reshape(*order.shape, *[1] * (part.ndim - 4)), 3)


class ComponentChanges(Analysis):
    """1 − Spearman's correlation of the map before and after each component, as in ``contextualization_change``.

    ``macro`` is the mean over sequences; ``micro`` pools the pairs of all sequences, with norms binned at 1/16 of an
    octave. If norms are spread evenly over n bins or more, the error of ``micro`` is at most about 1/n²
    (:class:`~captum_norm.lab.analysis.statistics.Counts`): 0.004 within a single octave. A pair's change is the change
    of its rank among the pairs of its sequence, as a share of their number, from −1 to 1. Pairs of a token with itself
    or with a special token are not listed.
    """

    name = "contextualization-change"
    description = (
        "How much each component of a layer changes the contextualisation: 1 − Spearman's ρ of the maps before and "
        "after it, and the pairs of tokens that it moves furthest [Kobayashi et al. 2024]."
    )
    needs_stages = True

    def __init__(self, context: AnalysisContext) -> None:
        super().__init__(context)
        self._components = [stage.component for stage in context.stages[1:]]
        self._scopes = [stage.scope for stage in context.stages]
        shape = len(self._components), context.layers
        self._macro = Moments(*shape)
        self._micro = Counts(shape[0] * shape[1], NORMS, NORMS)
        self._pairs = ChangedPairs(*shape)
        self.statistics = {"macro": self._macro, "micro": self._micro, "pairs": self._pairs}
        self.options = {"scopes": self._scopes}

    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """See :class:`Analysis`."""
        maps = torch.stack([measured.norms[scope].cpu() for scope in self._scopes])  # (C + 1, B, L, S, S)
        for row, sequence in enumerate(batch.sequences):
            length = len(sequence.ids)
            attended = torch.ones(length, length, dtype=torch.bool)
            if self.context.causal:
                attended = attended.tril()
            norms = maps[:, row, :, :length, :length][..., attended]  # (C + 1, L, n)
            ranks = _ranks(norms)
            change = _changes(ranks)
            self._macro.add(change[None], ~change.isnan()[None])
            self._count(norms)
            shift = (ranks[1:] - ranks[:-1]) / (2 * norms.shape[-1])  # centred ranks count twice
            self._list(shift, attended, sequence, batch.categories[row, :length])

    def _count(self, norms: Tensor) -> None:
        places = NORMS.places(norms).long()
        groups = torch.arange(len(self._components) * self.context.layers).view(len(self._components), -1, 1)
        self._micro.add((groups * NORMS.size + places[:-1]) * NORMS.size + places[1:])

    def _list(self, changes: Tensor, attended: Tensor, sequence: TokenSequence, categories: Tensor) -> None:
        """Keep the pairs of one sequence that changed most; ``changes`` are (C, L, n)."""
        ordinary = categories >= len(self.context.categories.names) - 2
        listed = ordinary[:, None] & ordinary & ~torch.eye(len(ordinary), dtype=torch.bool)
        both = torch.stack([changes, -changes]).where(listed[attended], -torch.inf)  # (2, C, L, n)
        change, indices = both.topk(min(_LISTED, both.shape[-1]))
        pairs = attended.nonzero()[indices].numpy()  # (2, C, L, n, 2)
        words = np.array([self._word(sequence, position) for position in range(len(sequence.ids))])
        line = np.broadcast_to([sequence.line, sequence.window], pairs.shape)
        place = np.concatenate([line, pairs], -1)
        self._pairs.join({"change": change.numpy(), "place": place, "words": words[pairs]})

    def _word(self, sequence: TokenSequence, position: int) -> str:
        """The word to which a token belongs."""
        ids = [sequence.ids[position]]
        if sequence.words is not None:
            word = sequence.words[position]
            ids = [token for token, other in zip(sequence.ids, sequence.words, strict=True) if other == word]
        return self.context.decode(ids).strip()

    def result(self) -> AnalysisResult:
        """See :class:`Analysis`."""
        layers, mean, deviation = range(self.context.layers), self._macro.mean, self._macro.deviation  # (C, L)
        micro = 1 - np.array(self._micro.spearman()).reshape(mean.shape)
        labels = [f"{place}. {component}" for place, component in enumerate(self._components, 1)]
        steps = [f"{before} → {after}" for before, after in pairwise(self._scopes)]
        component = {"component": "component", "scopes": "from → to"}
        macro_label = {"macro": "contextualisation change, mean over sequences"}
        micro_label = {"micro": "contextualisation change, all pairs together"}
        by_layer = table_of(
            "layers",
            "Contextualisation change by component and layer",
            {"layer": "layer", **component, **macro_label, "sd": "SD over sequences", **micro_label},
            [
                (layer, label, step, mean[place, layer], deviation[place, layer], micro[place, layer])
                for layer in layers
                for place, (label, step) in enumerate(zip(labels, steps, strict=True))
            ],
        )
        by_component = table_of(
            "components",
            "Contextualisation change by component, means over layers",
            {**component, **macro_label, **micro_label},
            zip(labels, steps, mean.mean(1), micro.mean(1), strict=True),
        )
        change, places, words = (self._pairs.parts[name] for name in ("change", "place", "words"))
        pairs = table_of(
            "pairs",
            "The pairs of tokens that each component moves furthest up or down among the pairs of their sequence",
            {
                "component": "component",
                "layer": "layer",
                "direction": "direction",
                "change": "change of rank, in shares of the sequence's pairs",
                "query_word": "query's word",
                "key_word": "key's word",
                "line": "line",
                "window": "window",
                "query": "query's position",
                "key": "key's position",
            },
            [
                (labels[place], layer, direction, -size if direction == "down" else size, *words[index], *places[index])
                for index, size in np.ndenumerate(change)
                if size > 0
                for direction, place, layer in [(("up", "down")[index[0]], *index[1:3])]
            ],
        )
        summary = {f"macro, {label}": size for label, size in zip(labels, mean.mean(1), strict=True)}
        plots = [
            Plot("change", "heat", by_layer.title, "layers", "layer", "component", value="macro"),
            Plot("change-by-layer", "line", by_layer.title, "layers", "layer", "macro", "component", "sd"),
        ]
        return self._result(summary, [by_component, by_layer, pairs], plots)
