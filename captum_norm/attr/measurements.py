"""Combines the measurements of single layers, by stack."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_norm.forward.stacking import real_keys, real_queries, stacked
from captum_norm.functional import Baseline
from captum_norm.map_parts import kept, kept_entries, own_patches, padded, place_of
from captum_norm.map_stacks import Entry, MapStack, dataset_of, frame_of, top_entries
from captum_norm.maps import AttributionMaps, Modality, Patches
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.layouts import Layout, Scope
from captum_norm.models.positions import Positions
from captum_norm.models.stacks import STACKS, Role, StackName
from captum_norm.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from captum_norm.visualization.page import Page


@dataclass(frozen=True, eq=False, repr=False)
class Measurements(Result):
    """Results of one forward pass for one stack of layers; every entry at a padded position is exactly 0.

    ``measured[0]`` are those of the first example without padding, ``measured.layer(4)`` those of the fifth layer. A
    notebook shows all maps as a page.

    In cross-attention, keys are the encoder's positions, queries the decoder's. There the residual stream belongs to
    no key: norms at ``attn_res`` are those at ``attn``, and mixing ratios compare all that attention adds with it.

    Attributes:
        weights: attention weights, (B, L, Q, K) averaged over heads or (B, L, H, Q, K) per head; None if not requested.
        norms: for each scope, the norms ‖v_ij‖ of the vectors summed over heads, (B, L, Q, K); empty without maps.
        head_norms: ‖α_ij f_h(x_j)‖, (B, L, H, Q, K); None if not requested, or without maps.
        transformed_norms: ‖f_h(x_j)‖, (B, L, H, K); None if not requested.
        mixing_ratio: (B, L, Q) for each scope, and for ``"weights"`` and ``"weights_res"`` (of A and of (A + I)/2) if
            weights were requested.
        residual_norm: ‖r_i‖ of the residual stream added to attention's output, (B, L, Q): in a post-norm layer, the
            input of attention; None without scopes up to the attention block's end.
        norm_scale: 1/σ of the normalisation of that sum, (B, L, Q); None without a scope that includes one.
        convergence_delta: relative completeness error, (B, L); None if only weights were requested.
        real: True at real query positions, (B, Q).
        tokens: see :class:`captum_norm.AttributionMaps`.
        baseline: start of the integrated-gradients paths; None without scopes through a feed-forward network.
        layer_names: names of the L modules that contain the blocks; empty without scopes.
        layouts: the arrangement of each of them.
        layer_scopes: the scopes of each of them; those through a feed-forward network only if one was requested.
        modality: see :class:`captum_norm.AttributionMaps`.
        patches: see :class:`captum_norm.AttributionMaps`.
        virtual: see :class:`captum_norm.AttributionMaps`.
        cached: see :class:`captum_norm.AttributionMaps`.
        real_keys: True at real key positions, (B, K); None if all are.
        crosses: whether keys are other positions than queries, those of the encoder.
    """

    weights: Tensor | None
    norms: Mapping[Scope, Tensor]
    head_norms: Tensor | None
    transformed_norms: Tensor | None
    mixing_ratio: Mapping[str, Tensor]
    residual_norm: Tensor | None
    norm_scale: Tensor | None
    convergence_delta: Tensor | None
    real: Tensor
    tokens: Sequence[Sequence[str]] | None
    baseline: Baseline | None = None
    layer_names: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    layer_scopes: tuple[tuple[Scope, ...], ...] = ()
    modality: Sequence[Sequence[Modality]] | None = None
    patches: Sequence[Patches] = ()
    virtual: int = 0
    cached: int = 0
    real_keys: Tensor | None = None
    crosses: bool = False

    axes = MappingProxyType(
        {
            "weights": ("BLQK", "BLHQK"),
            "head_norms": ("BLHQK",),
            "transformed_norms": ("BLHK",),
            "residual_norm": ("BLQ",),
            "norm_scale": ("BLQ",),
            "convergence_delta": ("BL",),
            "real": ("BQ",),
            "real_keys": ("BK",),
            "tokens": ("B",),
        }
    )

    def __repr__(self) -> str:
        parts = [f"{stack.name} {tuple(stack.values.shape)}" for stack in self.stacks()]
        if self.mixing_ratio:
            parts.append(f"mixing ratios of {', '.join(self.mixing_ratio)}")
        if self.convergence_delta is not None and self.convergence_delta.numel():
            parts.append(f"convergence delta {float(self.convergence_delta.max()):.1e}")
        return f"Measurements({', '.join(parts)})"

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, example: int) -> "Measurements":
        """Return the results of one example, as a batch of one without padding.

        Raises:
            InvalidInputError: there is no such example.
        """
        place = place_of("example", example, len(self))
        queries = self.real[place]
        keys = None if self.real_keys is None else self.real_keys[place]

        def own(values: Tensor, axes: str) -> Tensor:
            values = values[place : place + 1]
            values = kept(values, axes.index("Q") - len(axes), queries) if "Q" in axes else values
            return kept(values, axes.index("K") - len(axes), keys) if "K" in axes and keys is not None else values

        tokens = None if self.tokens is None else [self.tokens[place]]
        if tokens is not None and keys is not None:
            tokens = [kept_entries(tokens[0], keys)]
        modality = None if self.modality is None else [kept_entries(self.modality[place], queries)]
        return replace(
            self,
            **self._changed(own),
            tokens=tokens,
            modality=modality,
            patches=own_patches(self.patches, place, queries),
        )

    def __iter__(self) -> Iterator["Measurements"]:
        return (self[example] for example in range(len(self)))

    def layer(self, index: int) -> "Measurements":
        """Return the results of one layer, with an axis L of 1.

        Args:
            index: its place among the layers measured, from 0, or from −1 backwards.

        Raises:
            InvalidInputError: there is no such layer.
        """
        counts = {stack.values.shape[1] for stack in self.stacks()} | {len(self.layer_names or [0])}
        place = place_of("layer", index, max(counts))

        def own(values: Tensor, axes: str) -> Tensor:
            return values[:, place, None] if "L" in axes else values

        of_layers = {name: getattr(self, name) for name in ("layer_names", "layouts", "layer_scopes")}
        return replace(
            self, **self._changed(own), **{name: found[place : place + 1] for name, found in of_layers.items() if found}
        )

    def stacks(self) -> list[MapStack]:
        """Return all maps with the tokens of their rows and columns: ``weights``, one of each scope, ``head_norms``."""
        given: dict[str, Tensor | None] = {"weights": self.weights}
        given |= {str(scope): values for scope, values in self.norms.items()}
        given["head_norms"] = self.head_norms
        found = {name: values for name, values in given.items() if values is not None}
        stacks = []
        for name, values in found.items():
            queries, keys = values.shape[-2:]
            texts = self.tokens if self.tokens is None or all(len(row) == keys for row in self.tokens) else None
            real_keys = self.real.new_ones(len(self), keys) if self.real_keys is None else padded(self.real_keys, keys)
            # Rows of cross-attention are the decoder's positions, whose texts are not known.
            rows = None if texts is None or self.crosses else [row[keys - queries :] for row in texts]
            unit = "attention weight" if name == "weights" else "norm"
            stacks.append(MapStack(name, unit, values, rows, texts, padded(self.real, queries), real_keys))
        return stacks

    def top(self, count: int = 10) -> list[Entry]:
        """Return the largest entries of the maps, largest first."""
        return top_entries(self.stacks(), count)

    def to_frame(self) -> "pd.DataFrame":
        """Return a data frame of pandas with a row for each entry, see :meth:`captum_norm.AttributionMaps.to_frame`.

        Raises:
            InvalidInputError: pandas is not installed.
        """
        return frame_of(self.stacks())

    def to_xarray(self) -> "xr.Dataset":
        """Return a dataset of xarray, see :meth:`captum_norm.AttributionMaps.to_xarray`.

        Raises:
            InvalidInputError: xarray is not installed.
        """
        by_query: dict[str, Tensor | None] = {
            f"mixing_ratio_{name}": values for name, values in self.mixing_ratio.items()
        }
        by_query |= {"residual_norm": self.residual_norm, "norm_scale": self.norm_scale}
        others: dict[str, tuple[Sequence[str], Tensor]] = {
            name: (("example", "layer", "query"), values) for name, values in by_query.items() if values is not None
        }
        if self.transformed_norms is not None:
            others["transformed_norms"] = (("example", "layer", "head", "key"), self.transformed_norms)
        if self.convergence_delta is not None:
            others["convergence_delta"] = (("example", "layer"), self.convergence_delta)
        return dataset_of(self.stacks(), others)

    def plot(self) -> "Figure":
        """Draw all maps of the only example, the mean over heads; a notebook shows the figure.

        Raises:
            InvalidInputError: there are several examples.
        """
        from captum_norm.visualization.heatmap import draw_stacks

        return draw_stacks(self.stacks())

    def page(self) -> "Page":
        """Return what a notebook shows, as the data of a page."""
        from captum_norm.visualization.page.maps import measurements_page

        return measurements_page(self)

    def _changed(self, change: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Change all tensors; the function also gets the letters of their axes."""
        patterns = self.axes
        found: dict[str, Any] = {}
        for name in patterns:
            values = getattr(self, name)
            if isinstance(values, Tensor):
                found[name] = change(values, next(axes for axes in patterns[name] if len(axes) == values.dim()))
        found["norms"] = {scope: change(values, "BLQK") for scope, values in self.norms.items()}
        found["mixing_ratio"] = {name: change(values, "BLQ") for name, values in self.mixing_ratio.items()}
        return found


@dataclass(eq=False)
class LayerResults:
    """Results of one layer, filled in by its reducers: as in :class:`Measurements`, without the axis L.

    Attributes:
        block: the attention block; None for attention weights alone.
        queries: Q.
        deltas: completeness errors, (B,) each.
    """

    block: Block | None = None
    queries: int = 0
    weights: Tensor | None = None
    norms: dict[Scope, Tensor] = field(default_factory=dict)
    head_norms: Tensor | None = None
    transformed_norms: Tensor | None = None
    mixing_ratio: dict[str, Tensor] = field(default_factory=dict)
    residual_norm: Tensor | None = None
    norm_scale: Tensor | None = None
    deltas: list[Tensor] = field(default_factory=list)


def assemble(
    call: ModelCall,
    role: Role,
    layers: Sequence[LayerResults],
    scopes: Sequence[Scope],
    baseline: Baseline | None,
) -> Measurements:
    """Stack the results of layers, one of which may come several times.

    Each layer's maps are freed once copied, so not all of them are held twice.
    """
    results = list(dict.fromkeys(layers))
    places = [[place for place, layer in enumerate(layers) if layer is one] for one in results]
    queries, keys = call.positions_of(role)
    by_pair, by_query, by_key = {-2: queries, -1: keys}, {-1: queries}, {-1: keys}

    def field_of(name: str, axes: Mapping[int, Positions]) -> Tensor | None:
        if any(getattr(layer, name) is None for layer in results):
            return None
        return stacked((vars(layer).pop(name) for layer in results), axes, places)

    blocks = [layer.block for layer in layers if layer.block is not None]
    deltas = [torch.stack(layer.deltas).amax(0) for layer in results if layer.deltas]
    return Measurements(
        weights=field_of("weights", by_pair),
        norms={
            scope: stacked((layer.norms.pop(scope) for layer in results), by_pair, places)
            for scope in scopes
            if scope in results[0].norms
        },
        head_norms=field_of("head_norms", by_pair),
        transformed_norms=field_of("transformed_norms", by_key),
        mixing_ratio={
            name: stacked([layer.mixing_ratio[name] for layer in results], by_query, places)
            for name in (*scopes, "weights", "weights_res")
            if name in results[0].mixing_ratio
        },
        residual_norm=field_of("residual_norm", by_query),
        norm_scale=field_of("norm_scale", by_query),
        convergence_delta=stacked(deltas, {}, places) if deltas else None,
        real=real_queries(call, role, results[0].queries),
        real_keys=real_keys(call, role),
        crosses=role == "cross",
        tokens=call.key_texts,
        virtual=call.before.virtual_tokens,
        cached=call.without_rows,
        baseline=baseline,
        layer_names=tuple(block.name for block in blocks),
        layouts=tuple(block.layout for block in blocks),
        layer_scopes=tuple(block.scopes for block in blocks),
        modality=call.pictures.modality,
        patches=call.pictures.patches,
    )


def maps_of_stacks(
    measured: Mapping[StackName, Measurements],
    choose: Callable[[StackName, Measurements], tuple[Tensor, Tensor | None]],
) -> AttributionMaps:
    """Combine the maps of all stacks; ``choose`` takes maps and mixing ratio from one stack's measurements."""
    chosen = {name: choose(name, stack) for name, stack in measured.items()}
    maps = {name: stack for name, (stack, _) in chosen.items()}
    # A tower has pictures for examples.
    main = {name: stack for name, stack in measured.items() if name in STACKS} or measured
    ratios = [chosen[name][1] for name in main]
    deltas = [m.convergence_delta for m in main.values() if m.convergence_delta is not None]
    inputs, *_ = main.values()
    return AttributionMaps(
        encoder=maps.get("encoder"),
        decoder=maps.get("decoder"),
        cross=maps.get("cross"),
        mixing_ratio=ratios[0] if len(ratios) == 1 else None,
        convergence_delta=torch.cat([delta.to(deltas[0].device) for delta in deltas], 1) if deltas else None,
        real=inputs.real,
        decoder_real=measured["cross"].real if "cross" in measured else None,
        tokens=inputs.tokens,
        towers={name: stack for name, stack in maps.items() if name not in STACKS},
        modality=inputs.modality,
        patches=inputs.patches,
        virtual=inputs.virtual,
        cached=inputs.cached,
    )
