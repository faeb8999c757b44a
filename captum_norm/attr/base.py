"""Base class of the methods: what users call, the same for all, and what a method defines, the map of a layer."""

from abc import ABC
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Unpack

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr import layer_maps
from captum_norm.checks import check_bool, check_choice, check_count, quoted
from captum_norm.errors import InvalidInputError, MethodError
from captum_norm.forward.head import SeenPosition, seen_position
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, as_layers, as_segments, refuse_towers
from captum_norm.forward.segments import Segments
from captum_norm.forward.session import MeterOptions, Session, refuse_unknown
from captum_norm.models.caches import refuse_chains
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.layers import see_at_length
from captum_norm.models.model import refuse_mixing, understand
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import HeadPosition, Position, position_rows, read_position
from captum_norm.models.stacks import StackName
from captum_norm.results.aggregation import AGGREGATIONS, encoder_decoder_rollout, with_prefix_rows
from captum_norm.results.maps import AttributionMaps, MapUnits, Scores, SourceAndPrefix, only_layer


class AttentionMapAttribution(Attribution, ABC):
    """Base class of methods that explain a Transformer by one map per layer.

    A new method derives from it and computes a layer's map in :meth:`layer_map`.

    Args:
        model: a Hugging Face model, one built with torch.nn's attention, or a fairseq translation model; a pipeline of
            transformers; or a SentenceTransformer, whose pooling is the default position. Left unchanged.
        aggregation: how ``attribute`` combines the layers' maps: ``"rollout"`` (product of the row-normalised maps),
            ``"product"`` (of the maps themselves, with the resulting row normalised) or ``"mean"``. None: the mean in a
            causal model, where a rollout leads to the first tokens, and in an encoder–decoder model unless the method
            chains its three stacks; else the rollout. Known from the first call on.
        options: see :class:`captum_norm.forward.session.MeterOptions`.

    Attributes:
        name: of the class: the method's name in commands and comparisons.
        units: of the class: the units of its scores.
        target: of the class: whether it explains an output value: ``"never"``, ``"optional"`` (unless a layer is
            asked for, or the model has no head) or ``"always"``, by default the one that the model predicts.
        decomposes: of the class: whether its maps come from vectors that add up to what the model computed, whose
            completeness error is then the convergence delta.
        text_alone: of the class: whether it refuses a model's towers, and text that attends to a tower's positions.
        mapped: of the class: whether it has maps; if not, it explains values of the output alone.
        single_heads: whether it has maps of single heads.
        prefix_own: of the class: what a position of a tuned prefix contributes to itself in each layer.
        segmented: of the class: whether it has maps of segments.
        chained: of the class: whether rows of its cross-attention leave the share of the decoder's own stream, so that
            its rollout chains three stacks.
        any_rows: of the class: whether it computes the rows of the last positions alone.

    Raises:
        InvalidInputError: if the model is not a module or the aggregation is unknown.
    """

    name: ClassVar[str]
    units: ClassVar[MapUnits]
    target: ClassVar[Literal["never", "optional", "always"]] = "never"
    decomposes: ClassVar[bool] = True
    text_alone: ClassVar[bool] = False
    mapped: ClassVar[bool] = True
    single_heads: bool = False
    prefix_own: ClassVar[float] = 1
    segmented: ClassVar[bool] = False
    chained: ClassVar[bool] = False
    any_rows: ClassVar[bool] = True
    _cumulative: ClassVar[bool] = False  # whether the map of a layer includes those before it

    def __init__(self, model: Explainable, aggregation: str | None = None, **options: Unpack[MeterOptions]) -> None:
        refuse_unknown(type(self), options)
        self.session = Session(model, **options)
        super().__init__(self.session.model)
        self.model: nn.Module = self.session.model
        self.aggregation: Any = None if aggregation is None else check_choice("aggregation", aggregation, AGGREGATIONS)
        # Where heads read as the model's class told last, for bidirectional and for causal maps.
        self._told: dict[bool, HeadPosition | None] = {}
        # If it tells nothing: the modules of the model that was seen, and where its head reads.
        self._seen: tuple[list[nn.Module], SeenPosition | None] | None = None

    def __repr__(self) -> str:
        return self.session.shown(self)

    @property
    def called(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def maps(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
        stacks: Collection[StackName] | None = None,
        last: int | None = None,
        segments: Tensor | None = None,
        together: bool = False,
        target: Any = None,
        position: Position = None,
    ) -> AttributionMaps:
        """Compute the map of every layer.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), pixel values, a tuple of tensors, a mapping such as a
                tokenizer's output, or a text or a list of texts if the tokenizer is known. Examples of a
                left-padded batch are shifted to start at position 0, so each is explained as it would be alone; this
                matters if positions are absolute (GPT-2, BERT).
            additional_forward_args: the model's further positional arguments (attention mask first).
            layers: 0-based indices of the layers, negative ones from the last; all if None.
            per_head: compute one map per head instead of one per layer.
            stacks: which stacks to explain: of an encoder–decoder model ``encoder``, ``decoder`` and ``cross``, all if
                None; of a model with towers ``text``, ``cross`` if its layers attend to a tower's positions, and the
                towers by name, such as ``vision``; those that read the tokens if None.
            last: compute the rows of so many last positions alone, such as those that predict a generated answer, in
                memory of this number times the number of keys; in an encoder–decoder model, the decoder's. All if None.
            segments: groups of keys, such as sentences or passages, whose vectors are added before a norm or distance
                is taken: the segment of each key, (B, K) integers from 0 on, or −1 for none. Columns are the segments.
            together: add the vectors of all queries, each divided by its own σ, before a norm or distance is taken:
                one row for a span of positions.
            target: the output to explain, as for :meth:`attribute`, by a method whose maps depend on one.
            position: where that output is read, if there are outputs at each position.

        Returns:
            the maps, with mixing ratios and completeness errors where the method defines them.

        Raises:
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        if self.target != "always" and (target is not None or position is not None):
            raise InvalidInputError(
                f"got target= or position=; the maps of {type(self).__name__} depend on no output: leave them out, or "
                "take AttentionTimesGradient"
            )
        request = Request(layers, stacks, per_head, target, position, last=last)
        call, request = self.call_of(inputs, additional_forward_args, request, segments, together=together)
        maps = self.session.explain(self.maps_of, call, request)
        self._see_head(call, maps)
        return layer_maps.finite_results(self.model, maps)

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        layer: int | None = None,
        return_convergence_delta: bool = False,
    ) -> Any:
        """Compute how much each input position contributes to one output position.

        Args:
            inputs: as for :meth:`maps`.
            target: the output to explain, as everywhere in Captum; ignored by methods whose maps do not depend on an
                output.
            additional_forward_args: the model's further positional arguments (attention mask first).
            position: the output position to explain: an index (negative from the end), one index per example,
                ``"first"`` or ``"last"`` real position, or ``"mean"`` of the real positions, all among the inputs'.
                None: what the model's head reads, a virtual token or not; for a model with an output at every position,
                the last if it is causal, else the mean. In an encoder–decoder model a position of the decoder, by
                default the last.
            layer: explain this layer alone, in the units of its map (0-based, negative from the last); None
                aggregates all layers.
            return_convergence_delta: also return the largest completeness error over layers, (B,).

        Returns:
            (B, S), one non-negative score per input position, 0 at padding. Rows of a rollout or product sum to 1,
            with the scores of virtual tokens, which only :meth:`scores` returns. A 1-tuple if ``inputs`` is a tuple, as
            everywhere in Captum. For an encoder–decoder model, which has two inputs, the tuple
            :class:`captum_norm.results.maps.SourceAndPrefix` of their scores, (B, S) and (B, T).

        Raises:
            InvalidInputError: for a position outside the sequence or in padding, no position if the head reads neither
                one position nor the mean, an unknown layer, or ``return_convergence_delta`` for a method without one.
            CaptumNormError: see :meth:`maps`.
        """
        with_delta = return_convergence_delta is not False and check_bool(
            "return_convergence_delta", return_convergence_delta
        )
        if with_delta and not self.decomposes:
            raise InvalidInputError(
                f"{type(self).__name__} decomposes nothing, so it has no convergence delta; leave "
                "return_convergence_delta out"
            )
        if self.target == "never" and isinstance(target, Tensor) and target.dim() > 1:
            raise InvalidInputError(
                f"got a target of shape {tuple(target.shape)}, which {type(self).__name__} has no use for; pass an "
                "attention mask by additional_forward_args="
            )
        layers = None if layer is None else [layer]
        call, request = self.call_of(inputs, additional_forward_args, Request(layers, target=target, position=position))
        scores, delta = self.explain(call, request)
        layer_maps.finite_results(self.model, (scores, delta))
        # As everywhere in Captum, a tuple in gives a tuple out.
        attributions = (scores,) if isinstance(inputs, tuple) and isinstance(scores, Tensor) else scores
        if delta is None or not with_delta:
            return attributions
        return attributions, delta

    def scores(self, maps: AttributionMaps, position: Position = None, *, aggregate: bool = True) -> Any:
        """Compute the scores of :meth:`attribute` from existing maps: of long inputs, or for several positions.

        (Not those of :class:`captum_norm.DecompX` with a target, which come from no map.)

        Args:
            maps: returned by :meth:`maps`, of all layers or of one.
            position: the output position to explain, as for :meth:`attribute`.
            aggregate: combine all layers; False explains the only layer in ``maps``.

        Returns:
            (B, K): those of :meth:`attribute`, and before them those of virtual tokens or cached positions, if any; a
            :class:`captum_norm.results.maps.SourceAndPrefix` for maps of an encoder–decoder model.

        Raises:
            InvalidInputError: for a position outside the sequence or in padding, no position if the head reads neither
                one position nor the mean, several layers without ``aggregate``, a product of maps over a cache, or maps
                of an encoder–decoder model that the aggregation cannot combine.
            UnsupportedModelError: if layers are aggregated of a model that mixes positions outside attention, too.
        """
        if not isinstance(maps, AttributionMaps):
            raise InvalidInputError(f"got maps {quoted(maps)}; expected what {type(self).__name__}.maps() returns")
        if aggregate:
            refuse_mixing(self.model)
        with torch.set_grad_enabled(self.session.differentiable):
            return layer_maps.finite_results(self.model, self.scores_of(maps, position, aggregate=aggregate))

    def scores_of_last(
        self, inputs: Inputs, last: int, additional_forward_args: Any = None
    ) -> tuple[Scores, Tensor | None]:
        """Compute the scores of each of the last positions in one forward pass, such as those of a generated answer.

        Args:
            inputs: as for :meth:`maps`.
            last: R, the number of positions. With the aggregation ``"mean"`` only their rows are computed; other
                aggregations need the rows of all positions.
            additional_forward_args: as for :meth:`maps`.

        Returns:
            (B, R, S): row r is what :meth:`attribute` returns for position S − R + r; for an encoder–decoder model a
            :class:`captum_norm.results.maps.SourceAndPrefix` of (B, R, S) and (B, R, T), of decoder positions. And the
            largest completeness error over layers, (B,), or None for a method without one.

        Raises:
            InvalidInputError: if the sequence has fewer positions, or padding.
            CaptumNormError: see :meth:`attribute`.
        """
        call, request = self.call_of(inputs, additional_forward_args, Request())
        self.session.refuse_mixing(call)
        rows, chains = call.of_last(check_count("last", last)), self.aggregation != "mean"
        if chains:
            refuse_chains(call.without_rows)
        maps = self.session.explain(self.maps_of, rows if self.any_rows and not chains else call, request)
        with torch.set_grad_enabled(self.session.differentiable):
            if maps.cross is not None and maps.decoder_real is not None:
                scores: Scores = SourceAndPrefix(*(half[:, -last:] for half in self.chain(maps)))
            else:
                stack = with_prefix_rows(maps.self_attention, self.prefix_own) if chains else maps.self_attention
                some = torch.eye(stack.shape[-2], dtype=stack.dtype, device=stack.device)[-last:]
                scores = self.aggregate(stack, some.expand(len(stack), -1, -1))
            scores = layer_maps.scores_of_inputs(call, scores)
        delta = None if maps.convergence_delta is None else maps.convergence_delta.amax(1)
        return layer_maps.finite_results(self.model, (scores, delta))

    def compute_convergence_delta(
        self,
        attributions: Tensor | tuple[Tensor, ...],  # noqa: ARG002 - as everywhere in Captum
        inputs: Inputs,
        additional_forward_args: Any = None,
    ) -> Tensor:
        """Compute the largest completeness error over layers.

        Args:
            attributions: what :meth:`attribute` returned for these inputs; the error is one of the maps behind it.
            inputs: as for :meth:`maps`.
            additional_forward_args: as for :meth:`maps`.

        Returns:
            (B,): max over layers of ‖Σ_j v_ij + bias − what the model computed‖ relative to the latter.

        Raises:
            InvalidInputError: if the method has no convergence delta.
        """
        delta = self.maps(inputs, additional_forward_args).convergence_delta
        if delta is None:
            raise InvalidInputError(f"{type(self).__name__} decomposes nothing, so it has no convergence delta")
        return delta.amax(1)

    def has_convergence_delta(self) -> bool:
        """Return whether the method's vectors must add up to what the model computed."""
        return self.decomposes

    def layer_map(self, layer: Layer) -> Tensor:  # noqa: ARG002 - of a method's own
        """Compute the map of one layer, (B, Q, K): the function that a new method defines.

        Entries must be finite, and for a rollout or product not negative; those at padding are set to 0 afterwards.
        A mistake raises :class:`captum_norm.errors.MethodError`.

        Args:
            layer: its attention weights, values and hidden states, to read only; freed when this returns.
        """
        raise MethodError(f"{type(self).__name__} defines neither layer_map nor maps_of")

    def segment_map(self, layer: Layer, segments: Segments) -> Tensor:  # noqa: ARG002 - of a method's own
        """Compute the map of one layer's segments, (B, [H,] Q or 1, G), for a method that is ``segmented``."""
        raise MethodError(f"{type(self).__name__} defines no segment_map")

    def reduce(self, layer: Layer, request: Request) -> layer_maps.LayerMap:
        """Compute a layer's map, mixing ratio and error, by default :meth:`layer_map` and that of the vectors."""
        name = type(self).__name__
        if request.segments is None:
            return layer_maps.checked_map(self.layer_map, f"{name}.layer_map", layer)
        examples, _, queries, _ = layer.call.query.shape
        segments = request.segments.among(examples, layer.call.key.shape[2], layer.call.query.device)
        heads = [layer.attention.query.shape[1]] if segments.per_head else []
        shape = (examples, *heads, 1 if segments.together else queries, segments.count)
        return layer_maps.checked_map(partial(self.segment_map, segments=segments), f"{name}.segment_map", layer, shape)

    def request_of(self, call: ModelCall, request: Request) -> Request:  # noqa: ARG002 - of a method's own
        """Complete a request by what the method needs of every layer."""
        if request.per_head:
            raise InvalidInputError(
                f"got per_head=True; {type(self).__name__}.layer_map returns one map a layer; override maps_of for "
                "maps of single heads"
            )
        # One map per layer is kept, as of mean attention weights.
        return replace(request, weights=True)

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute and check the maps requested, by default by :meth:`reduce` of each layer in one forward pass."""
        request = self.request_of(call, request)
        layers, causal = self.session.record(call, request, partial(self.reduce, request=request))
        layer_maps.check_layers(self.model, layers)
        maps = layer_maps.stacked_maps(call, layers, causal=causal, segmented=request.segments is not None)
        if maps.convergence_delta is not None and not self.decomposes:
            return replace(maps, convergence_delta=None)
        return maps

    def aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        """Aggregate maps over layers: maps (B, L, Q, K), weights of the queries (B, P, Q) -> (B, P, K)."""
        return rows @ stack[:, -1] if self._cumulative else AGGREGATIONS[self.aggregation](stack, rows)

    def chain(self, maps: AttributionMaps) -> SourceAndPrefix:
        """Aggregate the maps of an encoder–decoder model: scores in every decoder position, (B, T, S) and (B, T, T)."""
        encoder, decoder, cross = maps.of_three_stacks
        if self._cumulative:
            return SourceAndPrefix(cross[:, -1], decoder[:, -1])
        self._settle_aggregation(causal=False)
        if self.chained and self.aggregation == "rollout":
            return SourceAndPrefix(*encoder_decoder_rollout(encoder, decoder, cross))
        if self.aggregation != "mean":
            raise InvalidInputError(
                f'got the encoder–decoder model {self.session.name} and aggregation="{self.aggregation}"; '
                f'{type(self).__name__} does not chain its three stacks: pass layer= or aggregation="mean", or use '
                'AttentionRollout or, with "rollout", ALTI, ValueZeroing or AttentionTimesGradient'
            )
        return SourceAndPrefix(cross.mean(1), decoder.mean(1))

    def scores_of(self, maps: AttributionMaps, position: Position, *, aggregate: bool) -> Scores:
        """Compute what :meth:`captum_norm.NormAttribution.scores` returns, without checks."""
        self._settle_aggregation(causal=maps.encoder is None and maps.decoder is not None)
        chains = aggregate and self.aggregation != "mean"
        if maps.segmented:
            raise InvalidInputError("got maps of segments, whose rows are scores: read them, or take layers' mean(1)")
        if chains and maps.cached:
            refuse_chains(maps.cached)
        if maps.cross is not None and maps.decoder_real is not None:
            _, decoder, cross = maps.of_three_stacks
            both = self.chain(maps) if aggregate else SourceAndPrefix(only_layer(cross), only_layer(decoder))
            rows = position_rows(position, "last", maps.decoder_real, both.source, self.model).unsqueeze(1)
            return SourceAndPrefix(*((rows @ scores).squeeze(1) for scores in both))
        stack = maps.self_attention
        queries, keys = stack.shape[-2:]
        if position is None:
            read = self._told.get(maps.decoder is not None) or self._head_position(maps)
            rows = position_rows(None, read, maps.real, stack, self.model)
        else:
            # The user counts from the first input on, not from the first virtual token.
            virtual = queries - (keys - maps.virtual - maps.cached)
            rows = position_rows(position, None, maps.real[:, virtual:], stack, self.model)
            rows = nn.functional.pad(rows, (virtual, 0))
        if not aggregate:
            return (rows.unsqueeze(1) @ only_layer(stack)).squeeze(1)
        if chains and keys > queries:
            stack, rows = with_prefix_rows(stack, self.prefix_own), nn.functional.pad(rows, (keys - queries, 0))
        return self.aggregate(stack, rows.unsqueeze(1)).squeeze(1)

    def _see_head(self, call: ModelCall, maps: AttributionMaps) -> None:
        """See where the head reads, unless the model's class tells, and whether layers mix positions otherwise."""
        if max(call.positions.length or 0, call.decoder.length or 0) > call.facts.excerpt.longest:
            see_at_length(call)
        if maps.cross is None:
            causal = maps.decoder is not None
            told = self._told[causal] = read_position(self.model, causal=causal)
            if told is None and _several(maps):
                modules = list(self.model.modules())
                if self._seen is None or self._seen[0] != modules:
                    self._seen = modules, seen_position(call)

    def _head_position(self, maps: AttributionMaps) -> HeadPosition:
        """Return the position that the head of any model reads."""
        causal = maps.decoder is not None
        known = read_position(self.model, causal=causal)
        if known is None and self._seen is not None:
            _, seen = self._seen
            known = ("last" if causal else "mean") if seen == "each" else seen
        if known is None and _several(maps):
            raise InvalidInputError(
                f"got no position, and the head of {type(self.model).__name__} reads neither the first, nor the last, "
                'nor the mean of all, or cannot be seen through; pass position=, an index, "first", "last" or "mean"'
            )
        return known or "mean"

    def explain(self, call: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Compute the scores of the position explained, (B, S), and the completeness error, (B,)."""
        aggregate = request.layers is None
        if aggregate and self.aggregation != "mean" and call.prefix.cache is not None:
            refuse_chains(call.without_rows)
        maps = self.session.explain(self.maps_of, call, request)
        self._see_head(call, maps)
        if aggregate and call.facts.excerpt.mixing is not None:
            refuse_mixing(self.model)
        with torch.set_grad_enabled(self.session.differentiable):
            scores = self.scores_of(maps, request.position, aggregate=aggregate)
        if call.prefix.virtual or call.prefix.past:
            scores = layer_maps.scores_of_inputs(call, scores)
        return scores, None if maps.convergence_delta is None else maps.convergence_delta.amax(1)

    def call_of(
        self,
        inputs: Inputs,
        additional_forward_args: Any,
        request: Request,
        segments: Tensor | None = None,
        *,
        together: bool = False,
    ) -> tuple[ModelCall, Request]:
        """Bind the inputs to the model and check that the method supports the request."""
        if not self.segmented and (
            segments is not None or (together is not False and check_bool("together", together))
        ):
            given = "together=True" if segments is None else "segments"
            raise InvalidInputError(
                f"got {given}; {type(self).__name__} has no vectors to add before a norm is taken: add scores instead, "
                "columns or rows of its maps"
            )
        if request.per_head is not False and check_bool("per_head", request.per_head) and not self.single_heads:
            hint = '; only the scope "attn" splits into heads' if type(self).single_heads else ""
            raise InvalidInputError(f"got per_head=True; {type(self).__name__} has no maps of single heads{hint}")
        if request.last is not None and self.mapped and not self.any_rows:
            raise InvalidInputError(
                f"got last={quoted(request.last)}; {type(self).__name__} carries what every position receives through "
                "all layers, so its maps have all rows: leave last= out"
            )
        if request.layers is not None:
            request = replace(request, layers=as_layers(request.layers))
        if request.stacks is not None:
            request = replace(request, stacks=self.session.roles(request.stacks))
        with torch.set_grad_enabled(self.session.differentiable):
            call = self.session.bind(inputs, additional_forward_args, request.stacks)
            if request.last is not None:
                call = call.of_last(check_count("last", request.last))
            if self.aggregation is None and request.stacks is None:
                causal = call.facts.excerpt.causal
                causal = bool(self.session.seen(call).causal if causal is None else causal)
                self._settle_aggregation(causal=causal)
        if segments is not None or together is not False:
            request = replace(request, segments=as_segments(call, request, segments, together))
        self.check_model(call)
        return call, request

    def _settle_aggregation(self, *, causal: bool) -> None:
        """Choose how layers are combined, unless the user said, by the model alone, so that no call decides others."""
        if self.aggregation is None:
            chains = self.chained or type(self).chain is not AttentionMapAttribution.chain
            three_stacks = understand(self.model).encoder is not None
            self.aggregation = "rollout" if (chains if three_stacks else not causal) else "mean"

    def check_model(self, call: ModelCall) -> None:
        """Refuse models that the method does not explain."""
        if self.text_alone and call.facts.towers:
            refuse_towers(self.called, call)


def _several(maps: AttributionMaps) -> bool:
    """Whether some example has several positions."""
    return bool(maps.real.sum(1).max() > 1)
