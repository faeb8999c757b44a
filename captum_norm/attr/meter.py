"""Measures norms, mixing ratios and weights of all layers in one forward pass."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from captum_norm.arguments import as_truth, entries, shown
from captum_norm.attr.feed_forward_reducer import FeedForwardReducer
from captum_norm.attr.measurements import LayerResults, Measurements, assemble
from captum_norm.attr.norm_reducer import NormReducer
from captum_norm.errors import InvalidInputError
from captum_norm.forward.checks import expect_finite, finite_results
from captum_norm.forward.recording import BlockTensors
from captum_norm.forward.request import Request, as_layers, as_stacks
from captum_norm.forward.session import LayerTask, Session
from captum_norm.forward.stacking import stack_name
from captum_norm.functional import Baseline, ratio
from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.blocks import Block, check_scopes
from captum_norm.models.inputs import Inputs, ModelCall
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope, Stage
from captum_norm.models.projections import accumulation_dtype
from captum_norm.models.stacks import Place, StackName, encoder_of


class MeterOptions(TypedDict, total=False):
    """How the norms of a model are computed.

    Attributes:
        accumulate: the least precise dtype to compute in, float32 if not given; float64 where the vectors of the heads
            nearly cancel.
        memory_budget: how many bytes the pieces of a computation may take at a time, of each device; a quarter of what
            is free if not given. The results come on top of it.
        baseline: where the paths of the integrated gradients through an activation start: ``"zero"`` (if not given), so
            that biases get a share like every vector, or ``"bias"``, what the pre-activation is without any vector, so
            that the vectors share what they add to it.
        differentiable: run under ``torch.enable_grad``, so that gradients flow through the results; False if not given.
    """

    accumulate: torch.dtype
    memory_budget: int | None
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

    def __init__(self, model: nn.Module, **options: Unpack[MeterOptions]) -> None:
        refuse_unknown(type(self), options)
        self.model = model
        self._session = Session(model, **options)

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
        request = Request(
            layers=as_layers(layers),
            stacks=as_stacks(self._session.model, stacks),
            per_head=per_head,
            scopes=scopes,
            weights=weights,
            head_norms=head_norms,
            maps=maps,
        )
        with torch.set_grad_enabled(self._session.differentiable):
            call = self._session.bind(inputs, additional_forward_args)
        return finite_results(self._session.model, measure(self._session, call, request))

    def count_layers(self, inputs: Inputs, additional_forward_args: Any = None) -> int:
        """How many layers the model, or its largest stack, has: seen in a forward pass over the first positions.

        Args:
            inputs: as for :meth:`measure`.
            additional_forward_args: as for :meth:`measure`.

        Raises:
            CaptumNormError: see :meth:`measure`.
        """
        return count_layers(self._session, inputs, additional_forward_args)

    def stages(self, inputs: Inputs, additional_forward_args: Any = None) -> tuple[Stage, ...]:
        """The scopes from attention to the end of the layer in the order of the computation, with their components.

        Args:
            inputs: as for :meth:`measure`; any that the model accepts, since they do not change the answer.
            additional_forward_args: as there.

        Raises:
            InvalidInputError: for an encoder–decoder model, or layers that are not all arranged alike.
            UnsupportedScopeError: if a layer's feed-forward network is not understood.
        """
        require_one_stack(self._session.model)
        with torch.no_grad():
            call = self._session.bind(inputs, additional_forward_args)
            blocks = self._session.blocks(call, feed_forward=True)
        return common_stages(self._session.model, blocks.values())


def measure(session: Session, call: ModelCall, request: Request) -> dict[StackName, Measurements]:
    """Run a model once and measure what is requested.

    Raises:
        CaptumNormError: see :meth:`NormMeter.measure`.
    """
    return session.explain(lambda: _measure(session, call, request))


def _measure(session: Session, call: ModelCall, request: Request) -> dict[StackName, Measurements]:
    feed_forward = not FEED_FORWARD_SCOPES.isdisjoint(request.scopes)
    if feed_forward and request.reach:
        # Vectors of layers that nobody asked for would take far longer than counting the layers.
        request = request.counted(session.sizes(call))
    blocks = session.blocks(call, feed_forward=feed_forward) if request.scopes or request.head_norms else {}
    formed = {block: [scope for scope in request.scopes if block.forms_vectors(scope)] for block in blocks.values()}

    def make(task: LayerTask | None) -> _MeasuredLayer:
        if task is None:
            return _MeasuredLayer(task, request, [])
        check_scopes(session.model, request.scopes, task.block)
        return _MeasuredLayer(task, request, formed[task.block])

    reduced = session.reduce(call, request, make, blocks or None, feed_forward=feed_forward, twice=any(formed.values()))
    measured: dict[StackName, Measurements] = {}
    for role, layers in reduced.stacks.items():
        indices = reduced.indices[role]
        results = {
            index: layer.checked(session.model, Place(role, index))
            for index, layer in zip(indices, layers, strict=True)
        }
        baseline = session.baseline if feed_forward else None
        measured[stack_name(role, causal=reduced.causal)] = assemble(call, role, results, indices, baseline)
    return measured


class _MeasuredLayer:
    """Measures what is requested of one layer.

    Args:
        task: the layer's block; None for attention weights alone.
        request: what is requested.
        formed: the scopes whose vectors must be formed, behind a feed-forward network.
    """

    def __init__(self, task: LayerTask | None, request: Request, formed: Sequence[Scope]) -> None:
        self._results = LayerResults(None if task is None else task.block)
        self._reducers: list[_WeightReducer | NormReducer | FeedForwardReducer] = []
        if task is not None:
            scopes = [scope for scope in request.scopes if scope not in formed]
            if scopes or request.head_norms:
                self._reducers.append(
                    NormReducer(task, scopes, self._results, per_head=request.head_norms, with_maps=request.maps)
                )
            if formed:
                self._reducers.append(FeedForwardReducer(task, formed, self._results))
        if request.weights:
            self._reducers.append(_WeightReducer(self._results, per_head=request.per_head))

    def begin(self, call: AttentionCall) -> None:
        self._results.queries = call.query.shape[2]
        for reducer in self._reducers:
            reducer.begin(call)

    def consume(self, weights: Tensor, part: Part) -> None:
        for reducer in self._reducers:
            reducer.consume(weights, part)

    def finish(self, tensors: BlockTensors | None) -> None:
        for reducer in self._reducers:
            reducer.finish(tensors)

    def checked(self, model: nn.Module, place: Place) -> LayerResults:
        """The results, which are finite, and what the model computed."""
        for reducer in self._reducers:
            reducer.check(model, place)
            if not isinstance(reducer, _WeightReducer):
                self._results.deltas.append(reducer.delta)
        return self._results


class _WeightReducer:
    """Attention weights of one layer: per head or their mean over heads, and the mixing ratios of that mean."""

    def __init__(self, results: LayerResults, *, per_head: bool) -> None:
        self._results, self._per_head = results, per_head
        self._cross = False
        self._map: Tensor

    def begin(self, call: AttentionCall) -> None:
        self._cross = call.cross
        shape = [*call.query.shape[:3], call.key.shape[2]]
        if not self._per_head:
            del shape[1]
        self._map = call.value.new_empty(shape, dtype=accumulation_dtype(call.value.dtype))

    def consume(self, weights: Tensor, part: Part) -> None:
        self._map[part.examples, ..., part.rows, :] = (
            weights if self._per_head else weights.mean(1, dtype=self._map.dtype)
        )

    def finish(self, _: BlockTensors | None) -> None:
        self._results.weights = self._map
        mean = self._map.mean(1) if self._per_head else self._map
        # In cross-attention no weight is the query's own.
        own = mean.new_zeros(mean.shape[:2]) if self._cross else mean.diagonal(dim1=-2, dim2=-1)
        others = (mean.sum(-1) - own).clamp(min=0)
        self._results.mixing_ratio |= {"weights": ratio(others, own), "weights_res": ratio(others, own + 1)}

    def check(self, model: nn.Module, place: Place) -> None:
        """Refuse weights that are not finite."""
        expect_finite(model, place, self._map.detach().sum())


def count_layers(session: Session, inputs: Inputs, additional_forward_args: Any = None) -> int:
    """How many layers a model, or its largest stack, has: see :meth:`NormMeter.count_layers`."""
    sizes = session.sizes(session.bind(inputs, additional_forward_args))
    return max(size.layers for size in sizes.values())


def refuse_unknown(method: type, options: Mapping[str, Any]) -> None:
    """Refuse options that there are not, in the name of the class that was called.

    Raises:
        TypeError: for the first one, as Python raises it.
    """
    for name in options:
        if name not in MeterOptions.__annotations__:
            raise TypeError(f"{method.__name__}() got an unexpected keyword argument {name!r}")


def require_one_stack(model: nn.Module) -> None:
    """Refuse encoder–decoder models.

    Raises:
        InvalidInputError: for one.
    """
    if encoder_of(model) is not None:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}, whose stacks are arranged in several ways; "
            "expected a model with one stack, such as the encoder alone: model.get_encoder()"
        )


def common_stages(model: nn.Module, blocks: Iterable[Block]) -> tuple[Stage, ...]:
    """The stages that all blocks of a model have.

    Raises:
        InvalidInputError: if they differ.
        UnsupportedScopeError: if a feed-forward network was not understood.
    """
    found = set()
    for block in blocks:
        check_scopes(model, ["atb_ff_res"], block)
        found.add(block.stages)
    if len(found) != 1:
        raise InvalidInputError(f"the layers of {type(model).__name__} are arranged in {len(found)} ways; expected one")
    return found.pop()
