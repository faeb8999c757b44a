"""Several norm analyses from one forward pass; what the attribution methods stand on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, TypeVar, get_args

import torch
from torch import Tensor, nn

from captum_norm.arguments import as_index, as_truth, entries, one_of, shown
from captum_norm.attr._assembly import Measurements, assemble, stack_name
from captum_norm.attr._feed_forward import VECTOR_BYTES, FeedForwardReducer
from captum_norm.attr._outline import (
    PROBE_LENGTH,
    Outline,
    expect_room,
    may_be_large,
    outline,
    total_queries,
)
from captum_norm.attr._products import ProductCache
from captum_norm.attr._reducers import LayerReducer, NormReducer, WeightReducer
from captum_norm.attr._scopes import check_scopes, common_stages, require_one_stack
from captum_norm.attr._tolerance import (
    TOLERANCE,
    expect_complete,
    expect_finite,
    finite_results,
    refuse_autocast,
    refuse_non_finite_weights,
)
from captum_norm.attr._wanted import Wanted, as_layers, as_stacks, check_seen, layer_indices
from captum_norm.bars import bar, is_asked
from captum_norm.errors import (
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    UnsupportedModelError,
    UnsupportedScopeError,
)
from captum_norm.functional import Baseline
from captum_norm.memory import MemoryBudget
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import Inputs, ModelCall, bind_inputs
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope, Stage
from captum_norm.models.search.attention_blocks import resolve
from captum_norm.models.stacks import Place, Role, StackName
from captum_norm.models.verification import verify
from captum_norm.recording import ReducerFactory, record

Result = TypeVar("Result")


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
    memory_budget: int | None
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
        sizes = {"memory_budget": memory_budget, "chunk_bytes": chunk_bytes, "vector_bytes": vector_bytes}
        for name, size in sizes.items():
            if size is not None and as_index(name, size) < 1:
                raise InvalidInputError(f"got {name}={size}; expected a positive number of bytes")
        self.model = model
        self.differentiable = as_truth("differentiable", differentiable)
        self._accumulate = one_of("accumulate", accumulate, (torch.float32, torch.float64))
        self._memory_budget = memory_budget
        self._chunk_bytes = chunk_bytes
        self._vector_bytes = vector_bytes
        self._baseline: Baseline = one_of("baseline", baseline, get_args(Baseline))
        self._cache = ProductCache()
        self._blocks: dict[nn.Module, Block] | None = None
        self._outline: tuple[list[nn.Module], Outline] | None = None

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
        scopes = entries("scopes", scopes, "names")
        if not all(isinstance(scope, str) for scope in scopes):
            raise InvalidInputError(f"got scopes={shown(scopes)}; expected names, such as {', '.join(get_args(Scope))}")
        switches = {"weights": weights, "per_head": per_head, "head_norms": head_norms, "maps": maps}
        for name, switch in switches.items():
            as_truth(name, switch)
        if not scopes and ((head_norms and maps) or not (head_norms or weights)):
            raise InvalidInputError("nothing to measure norms of: got no scopes")
        if per_head and not weights:
            raise InvalidInputError("got per_head=True, which is about attention weights, and weights=False")
        if not maps and not FEED_FORWARD_SCOPES.isdisjoint(scopes):
            raise InvalidInputError(
                f"got maps=False and the scopes {', '.join(scopes)}; scopes behind a feed-forward network are measured "
                "with their maps"
            )
        wanted = Wanted(
            scopes, weights, per_head, head_norms, as_layers(layers), as_stacks(self.model, stacks), maps=maps
        )
        return finite_results(self.model, self._measured(inputs, additional_forward_args, wanted))

    def _measured(self, inputs: Inputs, additional_forward_args: Any, wanted: Wanted) -> dict[StackName, Measurements]:
        with torch.set_grad_enabled(self.differentiable):
            call = bind_inputs(self.model, inputs, additional_forward_args)
            self._verify(call)
            return self._attempt(lambda: self._measure(call, wanted))

    def _with_blocks(
        self, call: ModelCall, work: Callable[[Mapping[nn.Module, Block]], Result], *, feed_forward: bool = False
    ) -> Result:
        """What ``work`` makes of the model's blocks; a second time if those known before do not hold."""
        self._verify(call)
        return self._attempt(lambda: work(self._understand(call, feed_forward=feed_forward)))

    def _verify(self, call: ModelCall) -> None:
        """Once for each model: see :func:`captum_norm.models.verification.verify`."""
        verify(call, PROBE_LENGTH)

    def _attempt(self, work: Callable[[], Result]) -> Result:
        known = self._blocks is not None
        try:
            return work()
        except (NonFiniteError, UnsupportedScopeError):
            # With NaN or infinity in its weights nothing of a network is understood.
            refuse_non_finite_weights(self.model)
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
        modules = list(self.model.modules())
        if self._outline is None or self._outline[0] != modules:
            self._outline = modules, outline(call)
        return self._outline[1]

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
        refuse_autocast(self.model)
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
                refuse_non_finite_weights(self.model)
                raise
            self._blocks = known
        return known

    def _measure(self, call: ModelCall, wanted: Wanted) -> dict[StackName, Measurements]:
        feed_forward = not FEED_FORWARD_SCOPES.isdisjoint(wanted.scopes)
        if feed_forward and wanted.reach:
            # Vectors of layers that nobody asked for would take far longer than counting the layers.
            wanted = wanted.counted(self._stacks(call))
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

        forming = any(block.forms_vectors(scope) for block in (blocks or {}).values() for scope in wanted.scopes)
        twice = wanted.has if forming else None
        causal = self._record(call, make, blocks, budget, twice, feed_forward=feed_forward)
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

    def _expect_room(self, call: ModelCall, wanted: Wanted) -> None:
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
        twice: Callable[[Place], bool] | None = None,
        *,
        feed_forward: bool = False,
        watching: AbstractContextManager[object] | None = None,
    ) -> bool:
        """Record by this meter's options, with a bar; see :func:`captum_norm.recording.record`.

        ``twice`` says in which layers every query is attended to once more, None that in none. ``watching`` is open
        during this forward pass alone, not during the one over an excerpt that a bar may need.
        """
        total = total_queries(call, self._stacks(call), twice) if is_asked() else None
        with bar(type(self.model).__name__, total, "queries") as shown, watching or nullcontext():
            return record(call, make, blocks, budget, self._chunk_bytes, shown.update, feed_forward=feed_forward)

    def _norm_reducer(
        self,
        wanted: Wanted,
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
        results = [reducer.delta for reducer in layer.measuring]
        if layer.norms is not None:
            results.append(layer.norms.discrepancy)
        if layer.weights is not None:
            results.append(layer.weights.map.detach().sum())
        expect_finite(self.model, place, *results)
        for reducer in layer.measuring:
            expect_complete(self.model, place, reducer.delta, reducer.precision)
        if layer.norms is None:
            return
        discrepancy, dtype = layer.norms.discrepancy.max().item(), layer.norms.dtype
        if not discrepancy <= TOLERANCE[dtype]:
            raise IncompleteDecompositionError(
                f"the fast norms of {place} of {type(self.model).__name__} differ from directly computed ones by "
                f"{discrepancy:.1e}, accepted {TOLERANCE[dtype]:.0e} for {dtype}"
            )
