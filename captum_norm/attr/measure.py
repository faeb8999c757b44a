"""Several norm analyses from one forward pass; what the attribution methods stand on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as integer
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from captum_norm.attr._products import ProductCache
from captum_norm.attr._reducers import LayerReducer, NormReducer, WeightReducer
from captum_norm.errors import (
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    UnsupportedModelError,
    UnsupportedScopeError,
)
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import Inputs, ModelCall, bind_inputs
from captum_norm.models.layouts import Scope
from captum_norm.models.resolver import resolve
from captum_norm.recording import CHUNK_BYTES, record

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
)
"""The largest relative completeness error accepted, by the model's dtype.

Vectors are added up in float32 or better, so the error of half-precision models is that of the model's own rounding: a
few units in the last place (2⁻¹¹ and 2⁻⁸ of the value) of the attention weights, values and hidden states.
"""

PROBE_LENGTH = 16


class MeterOptions(TypedDict, total=False):
    """How the norms of a model are computed.

    Attributes:
        accumulate: the least precise dtype to compute in, float32 if not given; float64 where the vectors of the heads
            nearly cancel.
        chunk_bytes: how much memory the attention weights may take at a time, 4 MiB if not given.
        differentiable: run under ``torch.enable_grad``, so that gradients flow through the results; False if not given.
    """

    accumulate: torch.dtype
    chunk_bytes: int
    differentiable: bool


@dataclass(frozen=True)
class Measurements:
    """What one forward pass gave; every entry at a padded position is exactly 0.

    Attributes:
        weights: attention weights, (B, L, Q, K) averaged over heads or (B, L, H, Q, K) per head; None if not asked for.
        norms: for each scope the norms ‖v_ij‖ of the vectors summed over heads, (B, L, Q, K).
        head_norms: ‖α_ij f_h(x_j)‖, (B, L, H, Q, K); None if not asked for.
        transformed_norms: ‖f_h(x_j)‖, (B, L, H, K); None if not asked for.
        mixing_ratio: (B, L, Q) for each scope, and for ``"weights"`` and ``"weights_res"`` (of A and of (A + I)/2) if
            weights were asked for.
        convergence_delta: relative completeness error, (B, L); None without scopes.
        causal: whether attention only looks back.
        real: True at real positions, (B, Q).
        tokens: the tokens' texts, if the inputs brought them.
    """

    weights: Tensor | None
    norms: Mapping[Scope, Tensor]
    head_norms: Tensor | None
    transformed_norms: Tensor | None
    mixing_ratio: Mapping[str, Tensor]
    convergence_delta: Tensor | None
    causal: bool
    real: Tensor
    tokens: Sequence[Sequence[str]] | None


class NormMeter:
    """Measures the norms of a model's attention blocks, any number of them in one forward pass.

    Products of the model's weights are computed on first use and kept as long as the weights do not change: one (H·d)²
    matrix a layer for ``attn`` and ``attn_res``, one more for scopes behind a norm.

    Args:
        model: a Hugging Face model, in any mode and dtype, on any device; left as it is.
        accumulate: see :class:`MeterOptions`.
        chunk_bytes: see :class:`MeterOptions`.
        differentiable: see :class:`MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> meter = NormMeter(BertModel(config))
        >>> measured = meter.measure(torch.tensor([[2, 7, 9, 3]]), scopes=("attn", "attn_res_ln"), weights=True)
        >>> measured.norms["attn_res_ln"].shape, measured.mixing_ratio["weights"].shape
        (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        accumulate: torch.dtype = torch.float32,
        chunk_bytes: int = CHUNK_BYTES,
        differentiable: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"got a model of type {type(model).__name__}; expected a torch.nn.Module")
        if accumulate not in (torch.float32, torch.float64):
            raise InvalidInputError(f"got accumulate={accumulate!r}; expected torch.float32 or torch.float64")
        if as_index("chunk_bytes", chunk_bytes) < 1:
            raise InvalidInputError(f"got chunk_bytes={chunk_bytes}; expected a positive number of bytes")
        self.model = model
        self.differentiable = differentiable
        self._accumulate = accumulate
        self._chunk_bytes = chunk_bytes
        self._cache = ProductCache()
        self._blocks: dict[nn.Module, Block] | None = None

    def measure(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        scopes: Sequence[Scope] = (),
        weights: bool = False,
        per_head: bool = False,
        head_norms: bool = False,
        layers: Sequence[int] | None = None,
    ) -> Measurements:
        """Run the model once and measure.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), pixel values, a tuple of tensors, or a mapping such as a
                tokenizer's output.
            additional_forward_args: the model's further positional arguments (attention mask first).
            scopes: how far to carry the vectors: any of ``attn``, ``attn_res``, ``attn_res_ln``, ``atb``.
            weights: also return the attention weights.
            per_head: return the attention weights of each head rather than their mean.
            head_norms: with scopes, also return the norms of each head's vectors, ‖α_ij f_h(x_j)‖ and ‖f_h(x_j)‖.
            layers: 0-based indices of the layers to measure, negative ones from the last; all if None.

        Raises:
            InvalidInputError: the inputs or options do not fit the model.
            UnsupportedModelError: the model's attention blocks could not be understood.
            UnsupportedScopeError: a scope does not exist in the model's layers.
            IncompleteDecompositionError: the vectors do not add up to what the model computed.
            NonFiniteError: the model's weights or activations contain NaN or infinity.
        """
        if isinstance(scopes, str):
            raise InvalidInputError(f'got scopes="{scopes}"; expected a sequence, such as ["{scopes}"]')
        if not scopes and (head_norms or not weights):
            raise InvalidInputError("nothing to measure norms of: got no scopes")
        if per_head and not weights:
            raise InvalidInputError("got per_head=True, which is about attention weights, and weights=False")
        if layers is not None:
            layers = [as_index("layer", layer) for layer in as_sequence("layers", layers)]
        with torch.set_grad_enabled(self.differentiable):
            call = bind_inputs(self.model, inputs, additional_forward_args)
            wanted = _Wanted(scopes, weights, per_head, head_norms, layers)
            known = self._blocks is not None
            try:
                return self._measure(call, wanted)
            except NonFiniteError:
                _refuse_non_finite(self.model)
                raise
            except (IncompleteDecompositionError, UnsupportedModelError):
                # A weight written through .data changes without a trace, and so does a module that was exchanged.
                if not known:
                    raise
                self._cache.clear()
                self._blocks = None
                return self._measure(call, wanted)

    def _understand(self, call: ModelCall) -> dict[nn.Module, Block]:
        known = self._blocks
        if known is None or any(block.projection.parameter.dtype != block.dtype for block in known.values()):
            try:
                known = resolve(call.excerpt(PROBE_LENGTH))
            except InvalidInputError:
                # Some argument does not fit an excerpt.
                known = resolve(call)
            except UnsupportedModelError:
                _refuse_non_finite(self.model)
                raise
            self._blocks = known
        return known

    def _check_scopes(self, scopes: Sequence[Scope], blocks: Mapping[nn.Module, Block]) -> None:
        for block in blocks.values():
            for scope in scopes:
                if scope not in block.layout.scopes:
                    raise UnsupportedScopeError(
                        f'got the scope "{scope}"; the layers of {type(self.model).__name__} are {block.layout.style}, '
                        f"which have the scopes {', '.join(block.layout.scopes)}"
                    )

    def _measure(self, call: ModelCall, wanted: "_Wanted") -> Measurements:
        blocks = self._understand(call) if wanted.scopes else None
        self._check_scopes(wanted.scopes, blocks or {})
        reducers: list[LayerReducer | None] = []

        def make(index: int, block: Block | None) -> LayerReducer | None:
            reducer = wanted.reducer(block, self._cache, self._accumulate, call.real) if wanted.has(index) else None
            reducers.append(reducer)
            return reducer

        causal = record(call, make, blocks, self._chunk_bytes)
        layers = []
        for index in layer_indices(wanted.layers, len(reducers)):
            layer = reducers[index]
            if layer is not None:
                self._check(index, layer)
                layers.append(layer)
        return _assemble(call, layers, causal)

    def _check(self, index: int, layer: LayerReducer) -> None:
        numbers = [] if layer.weights is None else [layer.weights.map.detach().sum()]
        if layer.norms is not None:
            numbers += [layer.norms.delta.max(), layer.norms.discrepancy.max()]
        if not all(number.isfinite() for number in numbers):
            _refuse_non_finite(self.model)
            raise NonFiniteError(f"what {type(self.model).__name__} computes in layer {index} contains NaN or infinity")
        if layer.norms is None:
            return
        delta, discrepancy = (number.item() for number in numbers[-2:])
        name, precision, dtype = type(self.model).__name__, layer.norms.precision, layer.norms.dtype
        if delta > TOLERANCE[precision]:
            raise IncompleteDecompositionError(
                f"the vectors of layer {index} do not add up to what {name} computed: relative error {delta:.1e}, "
                f"accepted {TOLERANCE[precision]:.0e} for {precision}"
            )
        if discrepancy > TOLERANCE[dtype]:
            raise IncompleteDecompositionError(
                f"the fast norms of layer {index} of {name} differ from directly computed ones by {discrepancy:.1e}, "
                f"accepted {TOLERANCE[dtype]:.0e} for {dtype}"
            )


@dataclass(frozen=True)
class _Wanted:
    """What was asked for."""

    scopes: Sequence[Scope]
    weights: bool
    per_head: bool
    head_norms: bool
    layers: Sequence[int] | None

    def has(self, index: int) -> bool:
        """Whether a layer may be among those asked for; negative indices are known only when all layers are."""
        return self.layers is None or min(self.layers, default=0) < 0 or index in self.layers

    def reducer(
        self, block: Block | None, cache: ProductCache, accumulate: torch.dtype, real: Tensor | None
    ) -> LayerReducer:
        """What reduces one layer."""
        norms = None
        if block is not None:
            dtype = torch.promote_types(accumulate, block.projection.parameter.dtype)
            norms = NormReducer(block, self.scopes, cache, dtype, per_head=self.head_norms, real=real)
        return LayerReducer(WeightReducer(per_head=self.per_head) if self.weights else None, norms)


def as_index(name: str, value: object) -> int:
    """An integer of any kind but a truth value."""
    try:
        if not isinstance(value, bool):
            return integer(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InvalidInputError(f"got {name} {value!r}; expected an integer")


def as_sequence(name: str, values: object) -> list[object]:
    """The items of anything but a text."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidInputError(f"got {name} {values!r}; expected a sequence of integers")
    return list(values)


def layer_indices(layers: Sequence[int] | None, count: int) -> list[int]:
    """Indices into ``count`` layers, negative ones from the last; all of them for None."""
    chosen = range(count) if layers is None else layers
    if not chosen:
        raise InvalidInputError(f"got an empty selection of layers; the model has {count}")
    for layer in chosen:
        if not -count <= layer < count:
            raise InvalidInputError(f"got layer {layer}; the model has {count}: 0 to {count - 1}, or -{count} to -1")
    return [layer % count for layer in chosen]


def _refuse_non_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            raise NonFiniteError(f'the weight "{name}" of {type(model).__name__} contains NaN or infinity')


def _assemble(call: ModelCall, layers: Sequence[LayerReducer], causal: bool) -> Measurements:
    weights = [layer.weights for layer in layers if layer.weights is not None]
    norms = [layer.norms for layer in layers if layer.norms is not None]
    queries = weights[0].map.shape[-1] if weights else norms[0].positions
    real = torch.ones(call.batch, queries, dtype=torch.bool) if call.real is None else call.real

    def stack(parts: Sequence[Tensor], *axes: int) -> Tensor:
        """(B, L, ...) from each layer's (B, ...), zero at padded positions along ``axes``."""
        stacked = torch.stack([part.to(parts[0].device) for part in parts], dim=1)
        for axis in axes if call.real is not None else ():
            shape = [call.batch, *[1] * (stacked.dim() - 1)]
            shape[axis] = queries
            stacked = stacked.where(real.to(stacked.device).reshape(shape), 0)
        return call.unshift(stacked, *axes)

    def maps(parts: Sequence[Tensor]) -> Tensor:
        return stack(parts, -2, -1)

    per_head = bool(norms) and norms[0].per_head
    ratios: dict[str, Tensor] = {
        scope: stack([layer.mixing_ratio[scope] for layer in norms], -1) for scope in (norms[0].scopes if norms else ())
    }
    if weights:
        ratios["weights"] = stack([layer.mixing_ratio(residual=False) for layer in weights], -1)
        ratios["weights_res"] = stack([layer.mixing_ratio(residual=True) for layer in weights], -1)
    return Measurements(
        weights=maps([layer.map for layer in weights]) if weights else None,
        norms={scope: maps([layer.maps[scope] for layer in norms]) for scope in (norms[0].scopes if norms else ())},
        head_norms=maps([layer.head_map for layer in norms]) if per_head else None,
        transformed_norms=stack([layer.transformed for layer in norms], -1) if per_head else None,
        mixing_ratio=ratios,
        convergence_delta=torch.stack([layer.delta for layer in norms], dim=1) if norms else None,
        causal=causal,
        real=call.unshift(real, -1),
        tokens=call.tokens,
    )
