"""Measures norms, mixing ratios and weights of all layers in one forward pass."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast, get_args

import torch
from torch import Tensor, nn

from captum_norm.attr.feed_forward import feed_forward_norms
from captum_norm.attr.layer_norms import LayerResults, layer_norms
from captum_norm.attr.layer_results import assemble
from captum_norm.attr.measurements import Measurements
from captum_norm.checks import check_bool, check_count, check_entries, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.forward.checks import finite_results
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, as_layers
from captum_norm.forward.session import Session
from captum_norm.forward.stacking import stack_name
from captum_norm.functional import Baseline, own_keys, ratio
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block, check_scopes
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope, Stage
from captum_norm.models.model import encoder_of
from captum_norm.models.objects import Explainable
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.stacks import Place, StackName


class MeterOptions(TypedDict, total=False):
    """Options of how norms are computed.

    Attributes:
        tokenizer: turns a text, or a list of texts, given as inputs into the model's arguments; not needed if the model
            is a pipeline or a SentenceTransformer, which have one.
        accumulate: the least precise dtype to compute in, by default float32; use float64 if the heads' vectors nearly
            cancel.
        memory_budget: bytes that intermediate results may take at a time on each device, by default a quarter of the
            free memory; results come on top.
        baseline: start of the integrated-gradients paths through activations: ``"zero"`` (default), where biases get a
            share like every vector, or ``"bias"``, the pre-activation without any vector, where the vectors share what
            they add to it.
        differentiable: run under ``torch.enable_grad``, so that gradients flow through the results; by default False.
    """

    tokenizer: Any
    accumulate: torch.dtype
    memory_budget: int | None
    baseline: Baseline
    differentiable: bool


class NormMeter:
    """Measures norms at any number of scopes of a model's layers in one forward pass.

    Products of the model's weights are computed on first use and cached until the weights change: one (H·d)² matrix
    per layer for ``attn`` and ``attn_res``, one more for scopes beyond a norm.

    Args:
        model: a Hugging Face model, one built with torch.nn's attention, or a fairseq translation model, in any mode
            and dtype, on any device; left unchanged.
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

    def __init__(self, model: Explainable, **options: Unpack[MeterOptions]) -> None:
        refuse_unknown(type(self), options)
        self._session = Session(model, **options)
        self.model = self._session.model

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
        last: int | None = None,
    ) -> dict[StackName, Measurements]:
        """Measure the model's layers in one forward pass.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), pixel values, a tuple of tensors, a mapping such as a
                tokenizer's output, or a text or a list of texts if the tokenizer is known; for an encoder–decoder
                model, a mapping that also has ``decoder_input_ids``, and ``decoder_attention_mask`` if these are
                padded.
            additional_forward_args: the model's further positional arguments (attention mask first).
            scopes: how far to carry the vectors: any of ``attn``, ``attn_res``, ``attn_res_ln``, ``atb``, and through
                the feed-forward network ``atb_ln``, ``atb_ff``, ``atb_ff_res``, ``atb_ff_res_ln``.
            weights: also return the attention weights.
            per_head: return the attention weights of each head instead of their mean.
            head_norms: also return the norms of each head's vectors, ‖α_ij f_h(x_j)‖ (with scopes) and ‖f_h(x_j)‖.
            maps: whether to compute norms of pairs. Without them, at about half the cost, scopes return only their
                mixing ratios, and ``head_norms``, which then needs no scopes, only ‖f_h(x_j)‖.
            layers: 0-based indices of the layers to measure in each stack, negative ones from the last; all if None.
            stacks: which stacks to measure, of an encoder–decoder model or of one with towers; see
                :meth:`captum_norm.NormAttribution.maps`.
            last: measure so many last positions alone, Q of the results; see :meth:`captum_norm.NormAttribution.maps`.

        Returns:
            ``encoder`` for a bidirectional model, ``decoder`` for a causal one, both and ``cross`` for an
            encoder–decoder model, and towers by their names.

        Raises:
            InvalidInputError: if the inputs or options do not fit the model.
            UnsupportedModelError: if the model's attention blocks are not understood.
            UnsupportedScopeError: if a scope does not exist in the model's layers.
            IncompleteDecompositionError: if the vectors do not add up to what the model computed.
            NonFiniteError: if the model's weights or activations contain NaN or infinity.
        """
        if isinstance(scopes, str):
            raise InvalidInputError(f'got scopes="{scopes}"; expected a sequence, such as ["{scopes}"]')
        scopes = check_entries("scopes", scopes, "names")
        if not all(isinstance(scope, str) for scope in scopes):
            raise InvalidInputError(
                f"got scopes={quoted(scopes)}; expected names, such as {', '.join(get_args(Scope))}"
            )
        switches = {"weights": weights, "per_head": per_head, "head_norms": head_norms, "maps": maps}
        for name, switch in switches.items():
            check_bool(name, switch)
        if not scopes and ((head_norms and maps) or not (head_norms or weights)):
            raise InvalidInputError("nothing to measure norms of: got no scopes")
        if per_head and not weights:
            raise InvalidInputError("got per_head=True, which applies to attention weights, and weights=False")
        if not maps and not FEED_FORWARD_SCOPES.isdisjoint(scopes):
            raise InvalidInputError(
                f"got maps=False and the scopes {', '.join(scopes)}; scopes beyond a feed-forward network need maps"
            )
        request = Request(
            layers=as_layers(layers),
            stacks=self._session.roles(stacks),
            per_head=per_head,
            scopes=scopes,
            weights=weights,
            head_norms=head_norms,
            maps=maps,
        )
        with torch.set_grad_enabled(self._session.differentiable):
            call = self._session.bind(inputs, additional_forward_args, request.stacks)
            if last is not None:
                call = call.of_last(check_count("last", last))
        session = self._session
        return finite_results(session.model, session.explain(lambda: measure(session, call, request)))

    def count_layers(self, inputs: Inputs, additional_forward_args: Any = None) -> int:
        """Count the layers of the model, or of its largest stack, in a forward pass over the first positions.

        Args:
            inputs: as for :meth:`measure`.
            additional_forward_args: as for :meth:`measure`.

        Raises:
            CaptumNormError: see :meth:`measure`.
        """
        return count_layers(self._session, inputs, additional_forward_args)

    def stages(self, inputs: Inputs, additional_forward_args: Any = None) -> tuple[Stage, ...]:
        """Return the scopes from attention to the end of the layer, in order of computation, with their components.

        Args:
            inputs: any that the model accepts; they do not change the result.
            additional_forward_args: as for :meth:`measure`.

        Raises:
            InvalidInputError: for an encoder–decoder model, or if the layers' arrangements differ.
            UnsupportedScopeError: if a layer's feed-forward network is not understood.
        """
        require_one_stack(self._session.model)
        with torch.no_grad():
            call = self._session.bind(inputs, additional_forward_args)
            blocks = self._session.blocks(call, feed_forward=True)
        return common_stages(self._session.model, blocks.values())


def measure(session: Session, call: ModelCall, request: Request) -> dict[StackName, Measurements]:
    """Measure what is requested in one forward pass.

    Raises:
        CaptumNormError: see :meth:`NormMeter.measure`.
    """
    feed_forward = not FEED_FORWARD_SCOPES.isdisjoint(request.scopes)
    blocks = session.blocks(call, feed_forward=feed_forward) if request.scopes or request.head_norms else None
    formed = {scope for block in (blocks or {}).values() for scope in request.scopes if scope in block.vector_scopes}
    weighed = request.weights or request.head_norms or not formed.issuperset(request.scopes)
    recording = session.record(
        call,
        request,
        lambda layer: layer_results(session.model, layer, request, with_block=blocks is not None),
        blocks,
        feed_forward=feed_forward,
        passes=weighed + bool(formed),
    )
    baseline = session.options.baseline if feed_forward else None
    measured: dict[StackName, Measurements] = {}
    for role, layers in recording.layers.items():
        for number, results in layers:
            results.check(session.model, Place(role, number))
        measured[stack_name(role, causal=recording.causal)] = assemble(call, role, layers, request.scopes, baseline)
    return measured


def layer_results(model: nn.Module, layer: Layer, request: Request, *, with_block: bool) -> LayerResults:
    """Compute what is requested of one layer.

    Args:
        model: the model, for messages.
        layer: the layer.
        request: what is requested.
        with_block: whether anything but attention weights is.
    """
    results = LayerResults(queries=layer.call.query.shape[2])
    collect = _collecting(layer, results, per_head=request.per_head) if request.weights else None
    formed: list[Scope] = []
    if with_block:
        block = results.block = layer.block
        check_scopes(model, request.scopes, block)
        formed = [scope for scope in request.scopes if scope in block.vector_scopes]
        carries = {scope: block.carry(scope, layer.dtype) for scope in request.scopes if scope not in formed}
        if request.head_norms and layer.channels > 1:
            raise UnsupportedModelError(
                f"a gate multiplies each channel of attention's output in {type(model).__name__}; norms of single "
                "heads are not available, ask for those of all heads"
            )
        if carries or request.head_norms:
            per_head, with_maps = request.head_norms, request.maps
            layer_norms(layer, carries, results, per_head=per_head, with_maps=with_maps, consume=collect)
            collect = None
    if formed:
        norms, ratios, delta = feed_forward_norms(layer, formed)
        results.norms |= norms
        results.mixing_ratio |= ratios
        results.deltas.append((delta, layer.block.precision(formed)))
    if collect is not None:
        for part, weights in layer.parts():
            collect(part, weights)
    if request.weights:
        _measure_weights(layer, results, per_head=request.per_head)
    return results


def _collecting(layer: Layer, results: LayerResults, *, per_head: bool) -> Callable[[Part, Tensor], None]:
    """Return a function that keeps the attention weights of each part: per head or averaged over heads."""
    own = layer.attention
    shape = [*own.query.shape[:3], own.key.shape[2]]
    if not per_head:
        del shape[1]
    kept = results.weights = own.value.new_empty(shape, dtype=accumulation_dtype(own.value.dtype))

    def collect(part: Part, weights: Tensor) -> None:
        kept[part.examples, ..., part.rows, :] = weights if per_head else weights.mean(1, dtype=kept.dtype)

    return collect


def _measure_weights(layer: Layer, results: LayerResults, *, per_head: bool) -> None:
    """Add the mixing ratios of the mean attention weights, without and with the residual connection."""
    weights = cast(Tensor, results.weights)
    mean = weights.mean(1) if per_head else weights
    # In cross-attention no weight is the query's own.
    own = mean.new_zeros(mean.shape[:2]) if layer.cross else own_keys(mean)
    others = (mean.sum(-1) - own).clamp(min=0)
    results.mixing_ratio |= {"weights": ratio(others, own), "weights_res": ratio(others, own + 1)}


def count_layers(session: Session, inputs: Inputs, additional_forward_args: Any = None) -> int:
    """Count the layers of a model, or of its largest stack: see :meth:`NormMeter.count_layers`."""
    sizes = session.sizes(session.bind(inputs, additional_forward_args))
    return max(size.layers for size in sizes.values())


def refuse_unknown(
    method: type, options: Mapping[str, Any], known: Collection[str] = tuple(MeterOptions.__annotations__)
) -> None:
    """Raise for unknown options in the name of the class that was called.

    Raises:
        TypeError: for the first one, worded as by Python.
    """
    for name in options:
        if name not in known:
            raise TypeError(f"{method.__name__}() got an unexpected keyword argument {name!r}")


def require_one_stack(model: nn.Module) -> None:
    """Refuse encoder–decoder models.

    Raises:
        InvalidInputError: if the model is one.
    """
    if encoder_of(model) is not None:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}, whose stacks are arranged in several ways; "
            "expected a model with one stack, such as the encoder alone: model.get_encoder()"
        )


def common_stages(model: nn.Module, blocks: Iterable[Block]) -> tuple[Stage, ...]:
    """Return the stages that all blocks of a model share.

    Raises:
        InvalidInputError: if they differ.
        UnsupportedScopeError: if a feed-forward network is not understood.
    """
    found = set()
    for block in blocks:
        check_scopes(model, ["atb_ff_res"], block)
        found.add(block.stages)
    if len(found) != 1:
        raise InvalidInputError(f"the layers of {type(model).__name__} are arranged in {len(found)} ways; expected one")
    return found.pop()
