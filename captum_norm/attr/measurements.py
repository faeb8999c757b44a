"""Results of one forward pass for one stack of layers: norms, mixing ratios and weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from captum_norm.attr.layer_maps import real_positions_of, stacked
from captum_norm.attr.layer_norms import LayerResults
from captum_norm.functional.feed_forward import Baseline
from captum_norm.models.call import ModelCall, Positions
from captum_norm.models.layouts import Layout, Scope
from captum_norm.models.stacks import Role
from captum_norm.results.maps import Modality, Patches, numbered
from captum_norm.results.stacks import MapStack, Side, StackResult, place_of_layer
from captum_norm.text.words import Words, WordScore

_AXES = {
    "weights": "BLHqK",
    "head_norms": "BLHqK",
    "transformed_norms": "BLHK",
    "residual_norm": "BLq",
    "norm_scale": "BLq",
    "convergence_delta": "BL",
    "real": "Bq",
    "real_keys": "BK",
}
"""The letters of the axes of tensors, see ``Measurements._sides``; weights may be without heads."""


@dataclass(frozen=True, eq=False, repr=False)
class Measurements(StackResult):
    """Results of one forward pass for one stack of layers; every entry at a padded position is exactly 0.

    ``measured[0]`` are those of the first example without padding, ``measured.layer(4)`` those of layer 4, the model's
    fifth. A notebook shows all maps as a page.

    In cross-attention, keys are the encoder's positions, queries the decoder's. There the residual stream belongs to
    no key: norms at ``attn_res`` are those at ``attn``, and mixing ratios compare all that attention adds with it.
    Modality, patches, virtual tokens and cached positions are as in :class:`captum_norm.AttributionMaps`.

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
        tokens: the texts of the keys, see :class:`captum_norm.AttributionMaps`.
        baseline: start of the integrated-gradients paths; None without scopes through a feed-forward network.
        layer_names: names of the L modules that contain the blocks; empty without scopes.
        layouts: the arrangement of each of them.
        layer_scopes: the scopes of each of them; those through a feed-forward network only if one was requested.
        real_keys: True at real key positions, (B, K); None if all are.
        crosses: whether keys are other positions than queries, those of the encoder.
        query_tokens: the texts of the decoder's keys in cross-attention, the last of which are the queries'.
        layers: the numbers of the L layers, from 0; 0 to L − 1 if they are not given.
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
    query_tokens: Sequence[Sequence[str]] | None = None
    layers: Sequence[int] = ()

    _axes = MappingProxyType(
        {name: (letters.upper(),) for name, letters in _AXES.items()}
        | {"weights": ("BLQK", "BLHQK"), "tokens": ("B",), "query_tokens": ("B",)}
    )
    _texts = MappingProxyType({"tokens": "K", "query_tokens": "Q", "modality": "Q"})
    _added = MappingProxyType({"query_tokens": None, "layers": []})

    def __post_init__(self) -> None:
        counts = [len(self.layers)]

        def count(values: Tensor, axes: str) -> Tensor:
            counts.extend(values.shape[1:2] if "L" in axes else ())
            return values

        self._changed(count)
        object.__setattr__(self, "layers", numbered("measurements", self.layers, counts[-1]))

    def _sides(self) -> dict[str, Side]:
        """Return the positions of queries and keys."""
        queries = self.query_tokens if self.crosses else self.tokens
        return {"Q": Side(self.real, queries), "K": Side(self.real_keys, self.tokens)}

    def _changed(self, change: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Return the fields of tensors, changed by a function that also gets the letters of their axes."""
        fields: dict[str, Any] = {}
        for name, letters in _AXES.items():
            values = getattr(self, name)
            if values is not None:
                fields[name] = change(values, letters if values.dim() == len(letters) else letters.replace("H", ""))
        fields["norms"] = {scope: change(values, "BLqK") for scope, values in self.norms.items()}
        fields["mixing_ratio"] = {name: change(values, "BLq") for name, values in self.mixing_ratio.items()}
        return fields

    def layer(self, layer: int) -> "Measurements":
        """Return the results of one layer, with an axis L of 1.

        Args:
            layer: its number, from 0, as in :attr:`layers`; or from −1 backwards among these.

        Raises:
            InvalidInputError: it was not measured.
        """
        place = place_of_layer("the measurements", layer, self.layers)

        def own(values: Tensor, axes: str) -> Tensor:
            return values[:, place, None] if "L" in axes else values

        of_layers = {name: getattr(self, name) for name in ("layer_names", "layouts", "layer_scopes", "layers")}
        return replace(
            self, **self._changed(own), **{name: found[place : place + 1] for name, found in of_layers.items() if found}
        )

    def stacks(self) -> list[MapStack]:
        """Return all maps with the tokens of their rows and columns: ``weights``, one of each scope, ``head_norms``."""
        maps: dict[str, Tensor | None] = {"weights": self.weights}
        maps |= {str(scope): values for scope, values in self.norms.items()} | {"head_norms": self.head_norms}
        return [
            self._stack(name, values, "qK", self.layers, "attention weight" if name == "weights" else "norm")
            for name, values in maps.items()
            if values is not None
        ]

    def _of_words(self, words: Mapping[str, Words]) -> dict[str, Any]:
        """Return the texts of words, all of which are real."""
        return {
            "tokens": [words["K"].texts],
            "query_tokens": [words["Q"].texts] if self.crosses else None,
            "real_keys": self.real.new_ones(1, len(words["K"].texts)),
        }

    def words(
        self, score: WordScore = "sum", words: Sequence[Words] | None = None, query_words: Sequence[Words] | None = None
    ) -> "Measurements":
        """Return the measurements of words: a key's is that of its tokens together, a query's the mean of theirs.

        See :meth:`captum_norm.AttributionMaps.words`: norms are of tokens; those of a word's vectors, which are added
        first, are another thing.

        Args:
            score: how a column comes from its tokens': ``"sum"``, ``"mean"`` or ``"max"``.
            words: the words of each example's tokens without padding; None to find them by the marks of
                :attr:`tokens`.
            query_words: in cross-attention, the same for :attr:`query_tokens`.

        Raises:
            InvalidInputError: the tokens are not known, or the words do not fit.
        """
        keys = queries = self._words_by_marks("measurements", "tokens", words)
        if self.crosses:
            queries = self._words_by_marks("the queries", "query_tokens", query_words)
        by_words = self._words({"K": keys, "Q": queries}, score)
        return replace(by_words, real_keys=None) if cast(Tensor, by_words.real_keys).all() else by_words


def assemble(
    call: ModelCall,
    role: Role,
    layers: Sequence[tuple[int, LayerResults]],
    scopes: Sequence[Scope],
    baseline: Baseline | None,
) -> Measurements:
    """Stack the results of layers, given with their numbers; each layer's tensors are dropped once they are copied."""
    results = [layer for _, layer in layers]
    queries, keys = call.positions_of(role)
    by_pair, by_query, by_key = {-2: queries, -1: keys}, {-1: queries}, {-1: keys}

    def field_of(name: str, axes: Mapping[int, Positions]) -> Tensor | None:
        parts = [getattr(layer, name) for layer in results]
        for layer in results:
            setattr(layer, name, None)
        return None if any(part is None for part in parts) else stacked(parts, axes)

    def fields_of(name: str, names: Sequence[str], axes: Mapping[int, Positions]) -> dict[Any, Tensor]:
        tables = [getattr(layer, name) for layer in results]
        made = {}
        for key in names:
            if key in tables[0]:
                parts = [table[key] for table in tables]
                for table in tables:
                    table.pop(key, None)
                made[key] = stacked(parts, axes)
        return made

    blocks = [layer.block for layer in results if layer.block is not None]
    deltas = [torch.stack([delta for delta, _ in layer.deltas]).amax(0) for layer in results if layer.deltas]
    count = results[0].queries
    return Measurements(
        weights=field_of("weights", by_pair),
        norms=fields_of("norms", scopes, by_pair),
        head_norms=field_of("head_norms", by_pair),
        transformed_norms=field_of("transformed_norms", by_key),
        mixing_ratio=fields_of("mixing_ratio", (*scopes, "weights", "weights_res"), by_query),
        residual_norm=field_of("residual_norm", by_query),
        norm_scale=field_of("norm_scale", by_query),
        convergence_delta=stacked(deltas, {}) if deltas else None,
        real=real_positions_of(call, queries, count),
        real_keys=None if keys.real is None else keys.shift_back(keys.real, -1),
        crosses=role == "cross",
        tokens=call.texts_of("encoder" if role == "cross" and call.encoder is not None else role),
        query_tokens=call.texts_of("self" if call.encoder is None else "decoder") if role == "cross" else None,
        virtual=call.prefix.virtual_tokens,
        cached=call.without_rows,
        baseline=baseline,
        layer_names=tuple(block.name for block in blocks),
        layouts=tuple(block.layout for block in blocks),
        layer_scopes=tuple(block.scopes for block in blocks),
        modality=call.pictures.modality,
        patches=call.pictures.patches_among(count),
        layers=[number for number, _ in layers],
    )
