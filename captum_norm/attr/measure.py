"""Several norm analyses from one forward pass; what the attribution methods stand on."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as integer
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, get_args

import torch
from torch import Tensor, nn

from captum_norm.attr._feed_forward import VECTOR_BYTES, FeedForwardReducer
from captum_norm.attr._products import ProductCache
from captum_norm.attr._reducers import LayerReducer, NormReducer, WeightReducer
from captum_norm.attr._scopes import check_scopes, common_stages, require_one_stack
from captum_norm.errors import (
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    UnsupportedModelError,
)
from captum_norm.functional import Baseline
from captum_norm.models.blocks import Block, Stage
from captum_norm.models.inputs import Inputs, ModelCall, Positions, bind_inputs
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope
from captum_norm.models.resolver import resolve
from captum_norm.models.stacks import Place, Role, StackName, encoder_of
from captum_norm.recording import CHUNK_BYTES, record

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
)
"""The largest relative completeness error accepted, by the model's dtype.

Vectors are added up in float32 or better, so the error of half-precision models is that of the model's own rounding: a
few units in the last place (2⁻¹¹ and 2⁻⁸ of the value) of the attention weights, values and hidden states.
"""

PROBE_LENGTH = 16

Result = TypeVar("Result")


class MeterOptions(TypedDict, total=False):
    """How the norms of a model are computed.

    Attributes:
        accumulate: the least precise dtype to compute in, float32 if not given; float64 where the vectors of the heads
            nearly cancel.
        chunk_bytes: how much memory the attention weights may take at a time, 4 MiB if not given.
        vector_bytes: how much memory the vectors of the scopes behind a feed-forward network, and what they pass
            through, may take at a time, 256 MiB if not given.
        baseline: where the paths of the integrated gradients through an activation start: ``"zero"`` (if not given), so
            that biases get a share like every vector, or ``"bias"``, what the pre-activation is without any vector, so
            that the vectors share what they add to it.
        differentiable: run under ``torch.enable_grad``, so that gradients flow through the results; False if not given.
    """

    accumulate: torch.dtype
    chunk_bytes: int
    vector_bytes: int
    baseline: Baseline
    differentiable: bool


@dataclass(frozen=True)
class Measurements:
    """What one forward pass gave of one stack of layers; every entry at a padded position is exactly 0.

    In cross-attention keys are the encoder's positions, queries the decoder's. There the residual stream belongs to no
    key: norms at ``attn_res`` are those at ``attn``, and a mixing ratio sets all that attention adds against it.

    Attributes:
        weights: attention weights, (B, L, Q, K) averaged over heads or (B, L, H, Q, K) per head; None if not asked for.
        norms: for each scope the norms ‖v_ij‖ of the vectors summed over heads, (B, L, Q, K).
        head_norms: ‖α_ij f_h(x_j)‖, (B, L, H, Q, K); None if not asked for.
        transformed_norms: ‖f_h(x_j)‖, (B, L, H, K); None if not asked for.
        mixing_ratio: (B, L, Q) for each scope, and for ``"weights"`` and ``"weights_res"`` (of A and of (A + I)/2) if
            weights were asked for.
        convergence_delta: relative completeness error, (B, L); None without scopes.
        real: True at real query positions, (B, Q).
        tokens: the tokens' texts, if the inputs brought them.
        baseline: where the paths of the integrated gradients started; None without scopes through a feed-forward
            network.
    """

    weights: Tensor | None
    norms: Mapping[Scope, Tensor]
    head_norms: Tensor | None
    transformed_norms: Tensor | None
    mixing_ratio: Mapping[str, Tensor]
    convergence_delta: Tensor | None
    real: Tensor
    tokens: Sequence[Sequence[str]] | None
    baseline: Baseline | None = None


class NormMeter:
    """Measures the norms of a model's attention blocks, any number of them in one forward pass.

    Products of the model's weights are computed on first use and kept as long as the weights do not change: one (H·d)²
    matrix a layer for ``attn`` and ``attn_res``, one more for scopes behind a norm.

    Args:
        model: a model of Hugging Face, or a translation model of fairseq, in any mode and dtype, on any device; left
            as it is.
        accumulate: see :class:`MeterOptions`.
        chunk_bytes: see :class:`MeterOptions`.
        vector_bytes: see :class:`MeterOptions`.
        baseline: see :class:`MeterOptions`.
        differentiable: see :class:`MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> meter = NormMeter(BertModel(config))
        >>> ids = torch.tensor([[2, 7, 9, 3]])
        >>> measured = meter.measure(ids, scopes=("attn", "attn_res_ln"), weights=True)["encoder"]
        >>> measured.norms["attn_res_ln"].shape, measured.mixing_ratio["weights"].shape
        (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        accumulate: torch.dtype = torch.float32,
        chunk_bytes: int = CHUNK_BYTES,
        vector_bytes: int = VECTOR_BYTES,
        baseline: Baseline = "zero",
        differentiable: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"got a model of type {type(model).__name__}; expected a torch.nn.Module")
        if accumulate not in (torch.float32, torch.float64):
            raise InvalidInputError(f"got accumulate={accumulate!r}; expected torch.float32 or torch.float64")
        for name, size in (("chunk_bytes", chunk_bytes), ("vector_bytes", vector_bytes)):
            if as_index(name, size) < 1:
                raise InvalidInputError(f"got {name}={size}; expected a positive number of bytes")
        if baseline not in get_args(Baseline):
            raise InvalidInputError(f"got baseline={baseline!r}; expected one of {', '.join(get_args(Baseline))}")
        self.model = model
        self.differentiable = differentiable
        self._accumulate = accumulate
        self._chunk_bytes = chunk_bytes
        self._vector_bytes = vector_bytes
        self._baseline: Baseline = baseline
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
        stacks: Collection[StackName] | None = None,
    ) -> dict[StackName, Measurements]:
        """Run the model once and measure.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), pixel values, a tuple of tensors, or a mapping such as a
                tokenizer's output; for an encoder–decoder model a mapping with ``decoder_input_ids``, too, and
                ``decoder_attention_mask`` where they are padded.
            additional_forward_args: the model's further positional arguments (attention mask first).
            scopes: how far to carry the vectors: any of ``attn``, ``attn_res``, ``attn_res_ln``, ``atb``, and through
                the feed-forward network ``atb_ln``, ``atb_ff``, ``atb_ff_res``, ``atb_ff_res_ln``.
            weights: also return the attention weights.
            per_head: return the attention weights of each head rather than their mean.
            head_norms: with scopes, also return the norms of each head's vectors, ‖α_ij f_h(x_j)‖ and ‖f_h(x_j)‖.
            layers: 0-based indices of the layers to measure, of each stack, negative ones from the last; all if None.
            stacks: which stacks of an encoder–decoder model to measure; all if None.

        Returns:
            ``encoder`` for a model that looks both ways, ``decoder`` for a causal one, and for an encoder–decoder
            model these two and ``cross``.

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
        layers = as_layers(layers)
        with torch.set_grad_enabled(self.differentiable):
            call = bind_inputs(self.model, inputs, additional_forward_args)
            check_stacks(self.model, stacks)
            wanted = _Wanted(scopes, weights, per_head, head_norms, layers, stacks)
            return self._attempt(lambda: self._measure(call, wanted))

    def _with_blocks(
        self, call: ModelCall, work: Callable[[Mapping[nn.Module, Block]], Result], *, feed_forward: bool = False
    ) -> Result:
        """What ``work`` makes of the model's blocks; a second time if those known before do not hold."""
        return self._attempt(lambda: work(self._understand(call, feed_forward=feed_forward)))

    def _attempt(self, work: Callable[[], Result]) -> Result:
        known = self._blocks is not None
        try:
            return work()
        except NonFiniteError:
            _refuse_non_finite(self.model)
            raise
        except (IncompleteDecompositionError, UnsupportedModelError):
            # A weight written through .data changes without a trace, and so does a module that was exchanged.
            if not known:
                raise
            self._cache.clear()
            self._blocks = None
            return work()

    def stages(self, inputs: Inputs, additional_forward_args: Any = None) -> tuple[Stage, ...]:
        """The scopes from attention to the end of the layer in the order of the computation, with their components.

        Args:
            inputs: as for :meth:`measure`; any that the model accepts, since they do not change the answer.
            additional_forward_args: as there.

        Raises:
            InvalidInputError: for an encoder–decoder model, or layers that are not all arranged alike.
            UnsupportedScopeError: if a layer's feed-forward network is not understood.
        """
        require_one_stack(self.model)
        with torch.no_grad():
            blocks = self._understand(bind_inputs(self.model, inputs, additional_forward_args), feed_forward=True)
        return common_stages(type(self.model).__name__, blocks.values())

    def _understand(self, call: ModelCall, *, feed_forward: bool) -> dict[nn.Module, Block]:
        known = self._blocks
        if known is None or any(
            block.projection.parameter.dtype != block.dtype or (feed_forward and not block.searched)
            for block in known.values()
        ):
            try:
                known = resolve(call.excerpt(PROBE_LENGTH), feed_forward=feed_forward)
            except InvalidInputError:
                # Some argument does not fit an excerpt.
                known = resolve(call, feed_forward=feed_forward)
            except UnsupportedModelError:
                _refuse_non_finite(self.model)
                raise
            self._blocks = known
        return known

    def _measure(self, call: ModelCall, wanted: "_Wanted") -> dict[StackName, Measurements]:
        feed_forward = not FEED_FORWARD_SCOPES.isdisjoint(wanted.scopes)
        blocks = self._understand(call, feed_forward=feed_forward) if wanted.scopes else None
        reducers: dict[Role, list[LayerReducer | None]] = {}

        def make(place: Place, block: Block | None) -> LayerReducer | None:
            reducer = None
            if wanted.has(place):
                queries, _ = call.positions_of(place.role)
                weights = WeightReducer(per_head=wanted.per_head) if wanted.weights else None
                if block is not None:
                    check_scopes(type(self.model).__name__, wanted.scopes, block)
                    reducer = self._norm_reducer(wanted, block, weights, queries.real)
                else:
                    reducer = LayerReducer(weights, None)
            reducers.setdefault(place.role, []).append(reducer)
            return reducer

        causal = record(call, make, blocks, self._chunk_bytes, feed_forward=feed_forward)
        measured: dict[StackName, Measurements] = {}
        for role, found in reducers.items():
            if not wanted.has_stack(role):
                continue
            layers = []
            for index in layer_indices(wanted.layers, len(found)):
                layer = found[index]
                if layer is not None:
                    self._check(Place(role, index), layer)
                    layers.append(layer)
            name: StackName = role if role != "self" else "decoder" if causal else "encoder"
            measured[name] = _assemble(call, role, layers, wanted.scopes, self._baseline if feed_forward else None)
        return measured

    def _norm_reducer(
        self, wanted: "_Wanted", block: Block, weights: WeightReducer | None, real: Tensor | None
    ) -> LayerReducer:
        dtype = torch.promote_types(self._accumulate, block.projection.parameter.dtype)
        formed = [scope for scope in wanted.scopes if block.forms_vectors(scope)]
        fast = [scope for scope in wanted.scopes if scope not in formed]
        norms = vectors = None
        if fast or wanted.head_norms:
            norms = NormReducer(block, fast, self._cache, dtype, self._baseline, per_head=wanted.head_norms, real=real)
        if formed:
            vectors = FeedForwardReducer(block, formed, dtype, self._vector_bytes, self._baseline, real=real)
        return LayerReducer(weights, norms, vectors)

    def _check(self, place: Place, layer: LayerReducer) -> None:
        numbers = [reducer.delta.max() for reducer in layer.measuring]
        if layer.norms is not None:
            numbers.append(layer.norms.discrepancy.max())
        if layer.weights is not None:
            numbers.append(layer.weights.map.detach().sum())
        if not all(number.isfinite() for number in numbers):
            _refuse_non_finite(self.model)
            raise NonFiniteError(f"what {type(self.model).__name__} computes in {place} contains NaN or infinity")
        name = type(self.model).__name__
        for reducer in layer.measuring:
            delta, precision = reducer.delta.max().item(), reducer.precision
            if delta > TOLERANCE[precision]:
                raise IncompleteDecompositionError(
                    f"the vectors of {place} do not add up to what {name} computed: relative error {delta:.1e}, "
                    f"accepted {TOLERANCE[precision]:.0e} for {precision}"
                )
        if layer.norms is None:
            return
        discrepancy, dtype = layer.norms.discrepancy.max().item(), layer.norms.dtype
        if discrepancy > TOLERANCE[dtype]:
            raise IncompleteDecompositionError(
                f"the fast norms of {place} of {name} differ from directly computed ones by {discrepancy:.1e}, "
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
    stacks: Collection[StackName] | None

    def has_stack(self, role: Role) -> bool:
        """Whether a stack is among those asked for."""
        return self.stacks is None or role in self.stacks

    def has(self, place: Place) -> bool:
        """Whether a layer may be among those asked for; negative indices are known only when all layers are."""
        some = self.layers is None or min(self.layers, default=0) < 0 or place.index in self.layers
        return some and self.has_stack(place.role)


def as_index(name: str, value: object) -> int:
    """An integer of any kind but a truth value."""
    try:
        if not isinstance(value, bool):
            return integer(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InvalidInputError(f"got {name} {value!r}; expected an integer")


def as_layers(layers: object) -> list[int] | None:
    """Indices of layers from any sequence of integers; None stays None."""
    if layers is None:
        return None
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InvalidInputError(f"got layers {layers!r}; expected a sequence of integers")
    return [as_index("layer", layer) for layer in layers]


def layer_indices(layers: Sequence[int] | None, count: int) -> list[int]:
    """Indices into ``count`` layers, negative ones from the last; all of them for None."""
    chosen = range(count) if layers is None else layers
    if not chosen:
        raise InvalidInputError(f"got an empty selection of layers; the model has {count}")
    for layer in chosen:
        if not -count <= layer < count:
            raise InvalidInputError(f"got layer {layer}; the model has {count}: 0 to {count - 1}, or -{count} to -1")
    return [layer % count for layer in chosen]


def check_stacks(model: nn.Module, stacks: Collection[str] | None) -> None:
    """Refuse stacks that are not some of an encoder–decoder model's."""
    if stacks is None:
        return
    if isinstance(stacks, str) or not stacks or not set(stacks) <= set(get_args(StackName)):
        raise InvalidInputError(f"got stacks={stacks!r}; expected some of {', '.join(get_args(StackName))} in a list")
    if encoder_of(model) is None:
        raise InvalidInputError(f"got stacks={stacks!r}, but {type(model).__name__} is no encoder–decoder model")


def _refuse_non_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            raise NonFiniteError(f'the weight "{name}" of {type(model).__name__} contains NaN or infinity')


def _assemble(
    call: ModelCall, role: Role, layers: Sequence[LayerReducer], scopes: Sequence[Scope], baseline: Baseline | None
) -> Measurements:
    weights = [layer.weights for layer in layers if layer.weights is not None]
    norms = [layer.norms for layer in layers if layer.norms is not None]
    queries, keys = call.positions_of(role)
    count = weights[0].map.shape[-2] if weights else layers[0].map(scopes[0]).shape[-2]
    real = torch.ones(call.batch, count, dtype=torch.bool) if queries.real is None else queries.real

    def stack(parts: Sequence[Tensor], axes: Mapping[int, Positions]) -> Tensor:
        """(B, L, ...) from each layer's (B, ...), its axes as the user's inputs were, zero at padded positions."""
        stacked = torch.stack([part.to(parts[0].device) for part in parts], dim=1)
        for axis, positions in axes.items():
            stacked = positions.restored(stacked, axis)
        return stacked

    def maps(parts: Sequence[Tensor]) -> Tensor:
        return stack(parts, {-2: queries, -1: keys})

    per_head = bool(norms) and norms[0].per_head
    ratios: dict[str, Tensor] = {
        scope: stack([layer.mixing_ratio(scope) for layer in layers], {-1: queries}) for scope in scopes
    }
    if weights:
        ratios["weights"] = stack([layer.mixing_ratio(residual=False) for layer in weights], {-1: queries})
        ratios["weights_res"] = stack([layer.mixing_ratio(residual=True) for layer in weights], {-1: queries})
    return Measurements(
        weights=maps([layer.map for layer in weights]) if weights else None,
        norms={scope: maps([layer.map(scope) for layer in layers]) for scope in scopes},
        head_norms=maps([layer.head_map for layer in norms]) if per_head else None,
        transformed_norms=stack([layer.transformed for layer in norms], {-1: keys}) if per_head else None,
        mixing_ratio=ratios,
        convergence_delta=torch.stack([layer.delta for layer in layers], dim=1) if scopes else None,
        real=queries.unshift(real, -1),
        tokens=call.tokens,
        baseline=baseline,
    )
