"""Explains attention by the norms of the vectors it adds up, and measures them at any number of scopes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.feed_forward import feed_forward_norms
from captum_norm.attr.layer_maps import LayerMap, expect_complete, finite_results, stack_name
from captum_norm.attr.layer_norms import LayerResults, layer_norms
from captum_norm.attr.measurements import Measurements, assemble
from captum_norm.checks import check_bool, check_count, check_entries, did_you_mean, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError, UnsupportedScopeError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, as_layers
from captum_norm.forward.segments import Segments
from captum_norm.forward.session import MeterOptions, Session, refuse_unknown
from captum_norm.functional import own_keys, ratio
from captum_norm.models.attention import Part
from captum_norm.models.blocks import check_scopes
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope
from captum_norm.models.model import encoder_of
from captum_norm.models.objects import Explainable
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.stacks import Place, StackName
from captum_norm.results.aggregation import residual_rollout_rows
from captum_norm.results.maps import MapUnits


class NormAttribution(AttentionMapAttribution):
    """Norms of the vectors that attention adds up [Kobayashi et al. 2020, 2021].

    Entry (i, j) of a map is the norm of what query i receives from key j, in the units of the model's hidden states:

    - ``attn``: ‖Σ_h α_ij f_h(x_j)‖, with f_h(x_j) key j's value vector through head h's slice of the output projection
      (value bias included, output bias not) [2020, section 3]; with ``per_head`` ‖α_ij f_h(x_j)‖;
    - ``attn_res``: the residual connection's x_i is added to the vector of j = i [2021];
    - ``attn_res_ln``: the result is carried through the layer normalisation, with its statistics frozen [2021].

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        scope: ``attn``; ``attn_res`` if the layer adds the attention output itself to the residual stream;
            ``attn_res_ln`` in post-norm layers.
        aggregation: see :class:`AttentionMapAttribution`. The rollout of ``attn``, whose vectors omit the residual
            connection, uses (A + I)/2 of the row-normalised maps A [Abnar & Zuidema 2020].
        options: see :class:`captum_norm.forward.session.MeterOptions`.

    Raises:
        UnsupportedScopeError: for a scope that this method, or on use the model's layers, do not have.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> method = NormAttribution(BertModel(config), scope="attn_res_ln")
        >>> scores, delta = method.attribute(torch.tensor([[2, 7, 9, 3]]), return_convergence_delta=True)
        >>> scores.shape, bool(delta < 1e-5)
        (torch.Size([1, 4]), True)
    """

    name, units = "norm", MapUnits("norm")
    scopes: ClassVar[tuple[Scope, ...]] = ("attn", "attn_res", "attn_res_ln")
    single_heads = True
    segmented = True

    def __init__(
        self,
        model: Explainable,
        scope: Literal["attn", "attn_res", "attn_res_ln"] = "attn",
        aggregation: str | None = None,
        **options: Unpack[MeterOptions],
    ) -> None:
        if str(scope) not in self.scopes:
            owner = "AttentionBlockAttribution" if str(scope).startswith("atb") else "NormAttribution"
            hint = f": take {owner}" if str(scope) in get_args(Scope) else did_you_mean(scope, self.scopes)
            raise UnsupportedScopeError(
                f'got the scope "{scope}"; {type(self).__name__} has the scopes {", ".join(self.scopes)}{hint}'
            )
        super().__init__(model, aggregation, **options)
        self.scope: Scope = scope
        self.single_heads = scope == "attn"

    def request_of(self, call: ModelCall, request: Request) -> Request:  # noqa: ARG002 - the same for all calls
        """Request the norms at the scope; those of segments up to the end of the attention block alone."""
        beyond = self.scope in FEED_FORWARD_SCOPES
        if request.segments is not None and beyond:
            raise InvalidInputError(
                f'got segments, or together=True, for the scope "{self.scope}"; the vectors of a group are added up to '
                "the end of the attention block: take the scope atb"
            )
        scopes, per_head = [self.scope], request.per_head
        return replace(request, scopes=scopes, per_head=False, head_norms=per_head, feed_forward=beyond)

    def reduce(self, layer: Layer, request: Request) -> LayerMap:
        """Compute the norms at the scope in one layer."""
        if request.segments is not None:
            check_scopes(self.model, [self.scope], layer.block)
            return super().reduce(layer, request)
        results = layer_results(self.model, layer, request)
        ((delta, precision),) = results.deltas
        norms = results.norms[self.scope] if results.head_norms is None else results.head_norms
        return LayerMap(norms, delta, precision, results.discrepancy, results.mixing_ratio[self.scope])

    def segment_map(self, layer: Layer, segments: Segments) -> Tensor:
        """Compute the norms of the segments' sums in one layer."""
        return segments.norms(layer.at(self.scope))

    def aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        """Aggregate maps over layers; the rollout of ``attn`` adds the residual connection that its vectors lack."""
        if self.scope == "attn" and self.aggregation == "rollout":
            return residual_rollout_rows(stack, rows)
        return super().aggregate(stack, rows)


class NormMeter:
    """Measures norms at any number of scopes of a model's layers in one forward pass.

    Products of the model's weights are computed on first use and cached until the weights change: one (H·d)² matrix
    per layer for ``attn`` and ``attn_res``, one more for scopes beyond a norm.

    Args:
        model: a Hugging Face model, one built with torch.nn's attention, or a fairseq translation model, in any mode
            and dtype, on any device; left unchanged.
        accumulate, memory_budget, baseline, differentiable: see
            :class:`captum_norm.forward.session.MeterOptions`.

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

    def __repr__(self) -> str:
        return self._session.shown(self)

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
            inputs: as for :meth:`captum_norm.NormAttribution.maps`; of an encoder–decoder model, a mapping that has
                ``decoder_input_ids``, too, and ``decoder_attention_mask`` if these are padded.
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
            raise InvalidInputError('nothing to measure norms of: got no scopes; pass some, such as scopes=["attn"]')
        if per_head and not weights:
            raise InvalidInputError(
                "got per_head=True, which applies to attention weights, and weights=False; pass weights=True, or "
                "head_norms=True for norms of single heads"
            )
        if not maps and not FEED_FORWARD_SCOPES.isdisjoint(scopes):
            raise InvalidInputError(
                f"got maps=False and the scopes {', '.join(scopes)}; scopes beyond a feed-forward network need maps: "
                "leave maps= out"
            )
        request = Request(
            layers=as_layers(layers),
            stacks=self._session.roles(stacks),
            per_head=per_head,
            scopes=scopes,
            weights=weights,
            head_norms=head_norms,
            maps=maps,
            feed_forward=not FEED_FORWARD_SCOPES.isdisjoint(scopes),
            blocks=bool(scopes) or head_norms,
        )
        with torch.set_grad_enabled(self._session.differentiable):
            call = self._session.bind(inputs, additional_forward_args, request.stacks, chained=False)
            if last is not None:
                call = call.of_last(check_count("last", last))
        return finite_results(self.model, self._session.explain(self._measure, call, request))

    def _measure(self, call: ModelCall, request: Request) -> dict[StackName, Measurements]:
        session, formed = self._session, set[Scope]()
        if request.blocks:
            blocks = session.blocks(call, feed_forward=request.feed_forward).values()
            formed = {scope for block in blocks for scope in request.scopes if scope in block.vector_scopes}
        weighed = request.weights or request.head_norms or not formed.issuperset(request.scopes)
        reduce = partial(layer_results, self.model, request=request)
        by_role, causal = session.record(call, request, reduce, passes=weighed + bool(formed))
        baseline = session.options.baseline if request.feed_forward else None
        measured: dict[StackName, Measurements] = {}
        for role, layers in by_role.items():
            for number, results in layers:
                for delta, precision in results.deltas:
                    expect_complete(self.model, Place(role, number), delta, precision, results.discrepancy)
            measured[stack_name(role, causal=causal)] = assemble(call, role, layers, request.scopes, baseline)
        return measured

    def stages(self, inputs: Inputs, additional_forward_args: Any = None) -> dict[Scope, str]:
        """Return the scopes from attention to the end of the layer, and the component just before each.

        In order of computation: ``ATTN``, ``RES``, ``LN``, ``FF``, or ``LN, RES`` if a branch is normalised before
        it is added.

        Args:
            inputs: any that the model accepts; they do not change the result.
            additional_forward_args: as for :meth:`measure`.

        Raises:
            InvalidInputError: for an encoder–decoder model, or if the layers' arrangements differ.
            UnsupportedScopeError: if a layer's feed-forward network is not understood.
        """
        name = type(self.model).__name__
        if encoder_of(self.model) is not None:
            raise InvalidInputError(
                f"got the encoder–decoder model {name}, whose stacks are arranged in several ways; expected a model "
                "with one stack, such as the encoder alone: model.get_encoder()"
            )
        with torch.no_grad():
            call = self._session.bind(inputs, additional_forward_args)
            blocks = self._session.blocks(call, feed_forward=True).values()
        for block in blocks:
            check_scopes(self.model, ["atb_ff_res"], block)
        arrangements = {tuple(block.stages.items()) for block in blocks}
        if len(arrangements) != 1:
            raise InvalidInputError(f"the layers of {name} are arranged in {len(arrangements)} ways; expected one")
        return dict(arrangements.pop())


def layer_results(model: nn.Module, layer: Layer, request: Request) -> LayerResults:
    """Compute what is requested of one layer."""
    results = LayerResults(queries=layer.call.query.shape[2])
    collect = _collecting(layer, results, per_head=request.per_head) if request.weights else None
    formed: list[Scope] = []
    if request.scopes or request.head_norms:
        block = results.block = layer.block
        if not set(request.scopes).issubset(block.scopes):
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
        for part, weights, _ in layer.parts():
            collect(part, weights)
    if results.weights is not None:
        mean = results.weights.mean(1) if request.per_head else results.weights
        # In cross-attention no weight is the query's own.
        own = mean.new_zeros(mean.shape[:2]) if layer.cross else own_keys(mean)
        others = (mean.sum(-1) - own).clamp(min=0)
        results.mixing_ratio |= {"weights": ratio(others, own), "weights_res": ratio(others, own + 1)}
    return results


def _collecting(layer: Layer, results: LayerResults, *, per_head: bool) -> Callable[[Part, Tensor], None]:
    """Return a function that keeps the attention weights of each part: per head or averaged over heads."""
    own = layer.attention
    shape = [*own.query.shape[:3], own.key.shape[2]]
    if not per_head:
        del shape[1]
    kept = results.weights = own.value.new_zeros(shape, dtype=accumulation_dtype(own.value.dtype))

    def collect(part: Part, weights: Tensor) -> None:
        kept[part.examples, ..., part.rows, part.keys] = weights if per_head else weights.mean(1, dtype=kept.dtype)

    return collect
