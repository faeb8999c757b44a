"""Several norm analyses from one forward pass; what the attribution methods stand on."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, get_args

import torch
from torch import Tensor, nn

from captum_norm.attr._assembly import Measurements, assemble, stack_name
from captum_norm.attr._feed_forward import VECTOR_BYTES, FeedForwardReducer
from captum_norm.attr._outline import (
    PROBE_LENGTH,
    Kept,
    Outline,
    expect_room,
    may_be_large,
    outline,
    total_queries,
)
from captum_norm.attr._products import ProductCache
from captum_norm.attr._reducers import LayerReducer, NormReducer, WeightReducer
from captum_norm.attr._scopes import check_scopes, common_stages, require_one_stack
from captum_norm.bars import bar, is_asked
from captum_norm.errors import (
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    UnsupportedModelError,
)
from captum_norm.functional import Baseline
from captum_norm.memory import MemoryBudget
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import Inputs, ModelCall, as_index, bind_inputs
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope, Stage
from captum_norm.models.parameters import present
from captum_norm.models.resolver import resolve
from captum_norm.models.stacks import Place, Role, StackName, encoder_of
from captum_norm.recording import Reducer, ReducerFactory, record

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
)
"""The largest relative completeness error accepted, by the model's dtype.

Vectors are added up in float32 or better, so the error of half-precision models is that of the model's own rounding: a
few units in the last place (2⁻¹¹ and 2⁻⁸ of the value) of the attention weights, values and hidden states.
"""

Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Reducer)


class MeterOptions(TypedDict, total=False):
    """How the norms of a model are computed.

    Attributes:
        accumulate: the least precise dtype to compute in, float32 if not given; float64 where the vectors of the heads
            nearly cancel.
        memory_budget: how many bytes the pieces of a computation may take at a time, of each device; a quarter of what
            is free if not given. The results come on top of it.
        chunk_bytes: how many bytes of attention weights are made at a time for speed, within the budget; if not given,
            on a CPU what stays in its cache, elsewhere as much as the budget allows.
        vector_bytes: how much memory the vectors of the scopes behind a feed-forward network, and what they pass
            through, may take at a time, within the budget; 256 MiB if not given.
        baseline: where the paths of the integrated gradients through an activation start: ``"zero"`` (if not given), so
            that biases get a share like every vector, or ``"bias"``, what the pre-activation is without any vector, so
            that the vectors share what they add to it.
        differentiable: run under ``torch.enable_grad``, so that gradients flow through the results; False if not given.
    """

    accumulate: torch.dtype
    memory_budget: int
    chunk_bytes: int
    vector_bytes: int
    baseline: Baseline
    differentiable: bool


class NormMeter:
    """Measures the norms of a model's attention blocks, any number of them in one forward pass.

    Products of the model's weights are computed on first use and kept as long as the weights do not change: one (H·d)²
    matrix a layer for ``attn`` and ``attn_res``, one more for scopes behind a norm.

    Args:
        model: a model of Hugging Face, one built with torch.nn's attention, or a translation model of fairseq, in any
            mode and dtype, on any device; left as it is.
        accumulate: see :class:`MeterOptions`.
        memory_budget: see :class:`MeterOptions`.
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
        memory_budget: int | None = None,
        chunk_bytes: int | None = None,
        vector_bytes: int = VECTOR_BYTES,
        baseline: Baseline = "zero",
        differentiable: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"got a model of type {type(model).__name__}; expected a torch.nn.Module")
        if accumulate not in (torch.float32, torch.float64):
            raise InvalidInputError(f"got accumulate={accumulate!r}; expected torch.float32 or torch.float64")
        sizes = {"memory_budget": memory_budget, "chunk_bytes": chunk_bytes, "vector_bytes": vector_bytes}
        for name, size in sizes.items():
            if size is not None and as_index(name, size) < 1:
                raise InvalidInputError(f"got {name}={size}; expected a positive number of bytes")
        if baseline not in get_args(Baseline):
            raise InvalidInputError(f"got baseline={baseline!r}; expected one of {', '.join(get_args(Baseline))}")
        self.model = model
        self.differentiable = differentiable
        self._accumulate = accumulate
        self._memory_budget = memory_budget
        self._chunk_bytes = chunk_bytes
        self._vector_bytes = vector_bytes
        self._baseline: Baseline = baseline
        self._cache = ProductCache()
        self._blocks: dict[nn.Module, Block] | None = None
        self._outline: Outline | None = None

    def measure(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        scopes: Sequence[Scope] = (),
        weights: bool = False,
        per_head: bool = False,
        head_norms: bool = False,
        maps: bool = True,
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
            maps: whether to compute norms of pairs. Without them, at about half the cost, the scopes give their mixing
                ratios and ``head_norms``, with scopes or without, gives ‖f_h(x_j)‖; weights are returned as ever.
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
        if not scopes and ((head_norms and maps) or not (head_norms or weights)):
            raise InvalidInputError("nothing to measure norms of: got no scopes")
        if per_head and not weights:
            raise InvalidInputError("got per_head=True, which is about attention weights, and weights=False")
        if not maps and not FEED_FORWARD_SCOPES.isdisjoint(scopes):
            raise InvalidInputError(
                f"got maps=False and the scopes {', '.join(scopes)}; scopes behind a feed-forward network are measured "
                "with their maps"
            )
        layers = as_layers(layers)
        with torch.set_grad_enabled(self.differentiable):
            call = bind_inputs(self.model, inputs, additional_forward_args)
            check_stacks(self.model, stacks)
            wanted = Wanted(scopes, weights, per_head, head_norms, layers, stacks, maps)
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
            self._blocks = self._outline = None
            return work()

    def count_layers(self, inputs: Inputs, additional_forward_args: Any = None) -> int:
        """How many layers the model, or its largest stack, has: seen in a forward pass over the first positions.

        Args:
            inputs: as for :meth:`measure`.
            additional_forward_args: as for :meth:`measure`.

        Raises:
            CaptumNormError: see :meth:`measure`.
        """
        stacks = self._stacks(bind_inputs(self.model, inputs, additional_forward_args))
        return max(stack.layers for stack in stacks.values())

    def _stacks(self, call: ModelCall) -> Outline:
        if self._outline is None:
            self._outline = outline(call)
        return self._outline

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

    def _measure(self, call: ModelCall, wanted: "Wanted") -> dict[StackName, Measurements]:
        feed_forward = not FEED_FORWARD_SCOPES.isdisjoint(wanted.scopes)
        blocks = self._understand(call, feed_forward=feed_forward) if wanted.scopes or wanted.head_norms else None
        self._expect_room(call, wanted)
        budget = MemoryBudget(self._memory_budget)
        reducers: dict[Role, list[LayerReducer | None]] = {}

        def make(place: Place, block: Block | None) -> LayerReducer | None:
            reducer = None
            if wanted.has(place):
                queries, _ = call.positions_of(place.role)
                weights = WeightReducer(per_head=wanted.per_head) if wanted.weights else None
                if block is not None:
                    check_scopes(type(self.model).__name__, wanted.scopes, block)
                    reducer = self._norm_reducer(wanted, block, weights, budget, queries.real)
                else:
                    reducer = LayerReducer(weights, None)
            wanted.note(place, reducer, reducers)
            return reducer

        causal = self._record(call, make, blocks, budget, feed_forward=feed_forward)
        check_seen(self.model, reducers, wanted)
        measured: dict[StackName, Measurements] = {}
        for role, found in reducers.items():
            if not wanted.has_stack(role):
                continue
            indices = layer_indices(wanted.layers, len(found))
            layers = {index: layer for index in indices if (layer := found[index]) is not None}
            for index, layer in layers.items():
                self._check(Place(role, index), layer)
            baseline = self._baseline if feed_forward else None
            measured[stack_name(role, causal=causal)] = assemble(call, role, layers, indices, wanted.scopes, baseline)
        return measured

    def _expect_room(self, call: ModelCall, wanted: "Wanted") -> None:
        """Refuse what cannot fit; see :func:`captum_norm.attr._outline.expect_room`."""
        if may_be_large(call):
            stacks = self._stacks(call)
            kept = {role: wanted.kept(stack.layers, stack.heads) for role, stack in stacks.items()}
            chosen = {role: what for role, what in kept.items() if wanted.has_stack(role)}
            expect_room(call, stacks, chosen, self._accumulate)

    def _record(
        self,
        call: ModelCall,
        make: ReducerFactory,
        blocks: Mapping[nn.Module, Block] | None,
        budget: MemoryBudget,
        *,
        feed_forward: bool = False,
    ) -> bool:
        """Record by this meter's options, with a bar; see :func:`captum_norm.recording.record`."""
        total = total_queries(call, self._stacks(call)) if is_asked() else None
        with bar(type(self.model).__name__, total, "queries") as shown:
            return record(call, make, blocks, budget, self._chunk_bytes, shown.update, feed_forward=feed_forward)

    def _norm_reducer(
        self,
        wanted: "Wanted",
        block: Block,
        weights: WeightReducer | None,
        budget: MemoryBudget,
        real: Tensor | None,
    ) -> LayerReducer:
        dtype = torch.promote_types(self._accumulate, block.projection.parameter.dtype)
        formed = [scope for scope in wanted.scopes if block.forms_vectors(scope)]
        fast = [scope for scope in wanted.scopes if scope not in formed]
        norms = vectors = None
        if fast or wanted.head_norms:
            norms = NormReducer(
                block,
                fast,
                self._cache,
                dtype,
                budget,
                self._baseline,
                per_head=wanted.head_norms,
                with_maps=wanted.maps,
                real=real,
            )
        if formed:
            vectors = FeedForwardReducer(block, formed, dtype, budget, self._vector_bytes, self._baseline, real=real)
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
class Wanted:
    """What was asked for: which maps of which layers and stacks."""

    scopes: Sequence[Scope] = ()
    weights: bool = False
    per_head: bool = False
    head_norms: bool = False
    layers: Sequence[int] | None = None
    stacks: Collection[StackName] | None = None
    maps: bool = True

    def has_stack(self, role: Role) -> bool:
        """Whether a stack is among those asked for."""
        return self.stacks is None or role in self.stacks

    def has(self, place: Place) -> bool:
        """Whether a layer may be among those asked for; negative indices are known only when all layers are."""
        some = self.layers is None or self.reach > 0 or place.index in self.layers
        return some and self.has_stack(place.role)

    @property
    def reach(self) -> int:
        """How far back from the last layer the negative indices go."""
        return max(0, -min(self.layers or (), default=0))

    def note(self, place: Place, reducer: Kind | None, found: dict[Role, list[Kind | None]]) -> None:
        """Add a layer's reducer to those found; drop that of an unwanted layer too far back for negative indices."""
        stack, last = found.setdefault(place.role, []), place.index - self.reach
        stack.append(reducer)
        if self.layers is not None and self.reach > 0 and last >= 0 and last not in self.layers:
            stack[last] = None

    def kept(self, layers: int, heads: int) -> Kept:
        """What is kept of a stack of so many layers and heads."""
        maps = self.weights * (heads if self.per_head else 1)
        if self.maps:
            maps += len(self.scopes) + self.head_norms * heads
        return Kept(layers if self.layers is None else len(self.layers), maps)


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


def check_seen(model: nn.Module, seen: Collection[Role], wanted: Wanted) -> None:
    """A stack whose attention has another form than the others' must not be left out in silence."""
    encoder = encoder_of(model)
    if encoder is None:
        return
    # A decoder's layer by itself is given what an encoder computed, and has none.
    stacks = [name for name in get_args(StackName) if name != "encoder" or any(True for _ in encoder.parameters())]
    missing = [name for name in stacks if wanted.has_stack(name) and name not in seen]
    if missing:
        raise UnsupportedModelError(
            f"no attention of the stack {' or '.join(missing)} was seen in {type(model).__name__}; choose others with "
            f"stacks={[name for name in get_args(StackName) if name in seen]}"
        )


def _refuse_non_finite(model: nn.Module) -> None:
    for path, module in model.named_modules():
        with present(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if not parameter.detach().isfinite().all():
                    raise NonFiniteError(f'the weight "{name}" of {type(model).__name__} contains NaN or infinity')
