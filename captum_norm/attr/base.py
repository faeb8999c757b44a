"""What a method defines: the map of a layer, and whatever else it does in another way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from captum_norm.attr.interface import MapsInterface
from captum_norm.attr.layer_norms import expect_agreement
from captum_norm.attr.meter import MeterOptions, refuse_unknown
from captum_norm.attr.segments import LayerSegments
from captum_norm.checks import check_bool, check_choice, check_count, quoted
from captum_norm.errors import CaptumNormError, InvalidInputError, MethodError, NonFiniteError, UnsupportedModelError
from captum_norm.forward.checks import expect_complete, expect_finite
from captum_norm.forward.head import ObservedHead
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, Segments, as_layers, as_segments, refuse_towers
from captum_norm.forward.session import Session
from captum_norm.forward.stacking import scores_of_inputs, stacked_maps
from captum_norm.models.caches import refuse_chains
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.model import encoder_of, library_of
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import Position, position_rows
from captum_norm.models.stacks import Place
from captum_norm.results.aggregation import AGGREGATIONS, with_prefix_rows
from captum_norm.results.maps import AttributionMaps, MapUnits, Scores, SourceAndPrefix, only_layer


class LayerMap(NamedTuple):
    """A method's answer for one layer.

    Attributes:
        map: (B, [H,] Q, K).
        delta: completeness error, (B,).
        precision: the least precise dtype of the layer's own computation, which sets the error's tolerance.
        discrepancy: the difference of fast and directly computed norms, (B,), and the dtype that sets its tolerance;
            or None.
    """

    map: Tensor
    delta: Tensor
    precision: torch.dtype
    discrepancy: tuple[Tensor, torch.dtype] | None = None


class AttentionMapAttribution(MapsInterface):
    """Base class of methods that explain a Transformer by one map per layer.

    A new method derives from it and computes a layer's map in :meth:`layer_map`.

    Args:
        model: a Hugging Face model, one built with torch.nn's attention, or a fairseq translation model; a pipeline of
            transformers; or a SentenceTransformer, whose pooling is the default position. Left unchanged.
        aggregation: how ``attribute`` combines the layers' maps: ``"rollout"`` (product of the row-normalised maps),
            ``"product"`` (of the maps themselves, with the resulting row normalised) or ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`.

    Attributes:
        name: of the class: the method's name in commands and comparisons.
        title: of the class: its name in tables and figures.
        units: of the class: the units of its scores.
        target: of the class: whether it explains an output value: ``"never"``, ``"optional"`` (if one is given) or
            ``"always"`` (by default the one that the model predicts).
        decomposes: of the class: whether its maps come from vectors that add up to what the model computed, whose
            completeness error is then the convergence delta.
        one_stack: of the class: whether it refuses encoder–decoder models.
        text_alone: of the class: whether it refuses a model's towers, and text that attends to a tower's positions.
        mapped: of the class: whether it has maps; if not, it explains values of the output alone.
        single_heads: of the class: whether it has maps of single heads.
        prefix_own: of the class: what a position of a tuned prefix contributes to itself in each layer.
        segmented: of the class: whether it has maps of segments.
        any_rows: of the class: whether it computes the rows of the last positions alone.
        batch_first: of the class: whether it runs single layers on copies of an example along the first axis, which
            only Hugging Face models allow.

    Raises:
        InvalidInputError: if the model is not a module or the aggregation is unknown.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    units: ClassVar[MapUnits]
    target: ClassVar[Literal["never", "optional", "always"]] = "never"
    decomposes: ClassVar[bool] = True
    one_stack: ClassVar[bool] = False
    text_alone: ClassVar[bool] = False
    mapped: ClassVar[bool] = True
    single_heads: ClassVar[bool] = False
    prefix_own: ClassVar[float] = 1
    segmented: ClassVar[bool] = False
    any_rows: ClassVar[bool] = True
    batch_first: ClassVar[bool] = False

    def __init__(self, model: Explainable, aggregation: str = "rollout", **options: Unpack[MeterOptions]) -> None:
        """See the class."""
        refuse_unknown(type(self), options)
        self.session = Session(model, **options)
        super().__init__(self.session.model)
        self.model = self.session.model
        self.aggregation = check_choice("aggregation", aggregation, AGGREGATIONS)
        self._head = ObservedHead(self.model)

    def layer_map(self, layer: Layer) -> Tensor:  # noqa: ARG002 - of a method's own
        """Compute the map of one layer, (B, Q, K): the function that a new method defines.

        Entries must be finite, and for a rollout or product not negative; those at padding are set to 0 afterwards.
        A mistake raises :class:`captum_norm.errors.MethodError`.

        Args:
            layer: its attention weights, values and hidden states, to read only; freed when this returns.
        """
        raise MethodError(f"{type(self).__name__} defines neither layer_map nor maps_of")

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps requested, by default :meth:`layer_map` of each layer."""
        name = f"{type(self).__name__}.layer_map"
        if request.per_head:
            raise InvalidInputError(
                f"got per_head=True; {name} returns one map a layer; override maps_of for maps of single heads"
            )
        return self.reduced_maps(call, request, lambda layer: checked_map(self.layer_map, name, layer))

    def segment_map(self, layer: Layer, segments: LayerSegments) -> Tensor:  # noqa: ARG002 - of a method's own
        """Compute the map of one layer's segments, (B, Q or 1, G), for a method that is ``segmented``."""
        raise MethodError(f"{type(self).__name__} defines no segment_map")

    def segment_maps(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps of the segments requested, by default :meth:`segment_map` of each layer."""
        name, segments = f"{type(self).__name__}.segment_map", cast(Segments, request.segments)

        def reduce(layer: Layer) -> LayerMap:
            own = LayerSegments.of(segments, len(layer.call.query), layer.call.key.shape[2], layer.call.query.device)
            shape = (len(layer.call.query), 1 if own.together else layer.call.query.shape[2], own.count)
            return checked_map(lambda one: self.segment_map(one, own), name, layer, shape)

        return self.reduced_maps(call, request, reduce)

    def reduced_maps(
        self, call: ModelCall, request: Request, reduce: Callable[[Layer], LayerMap], *, feed_forward: bool = False
    ) -> AttributionMaps:
        """Compute and check the maps of the layers requested.

        Args:
            call: the model's call.
            request: which layers.
            reduce: the method's function of a layer.
            feed_forward: whether it needs the feed-forward blocks' tensors.
        """
        blocks = self.session.blocks(call, feed_forward=feed_forward)
        # One map per layer is kept, as of mean attention weights.
        found = self.session.record(call, replace(request, weights=True), reduce, blocks, feed_forward=feed_forward)
        for role, layers in found.layers.items():
            for number, made in layers:
                check_map(self.model, f"{type(self).__name__}.layer_map", call, Place(role, number), made)
        maps = {role: [(number, made.map) for number, made in layers] for role, layers in found.layers.items()}
        deltas = {role: [made.delta for _, made in layers] for role, layers in found.layers.items()}
        segmented = request.segments is not None
        return stacked_maps(call, maps, deltas if self.decomposes else {}, causal=found.causal, segmented=segmented)

    def aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        """Aggregate maps over layers: maps (B, L, Q, K), weights of the queries (B, P, Q) -> (B, P, K)."""
        return AGGREGATIONS[self.aggregation](stack, rows)

    def chain(self, maps: AttributionMaps) -> SourceAndPrefix:
        """Aggregate the maps of an encoder–decoder model: scores in every decoder position, (B, T, S) and (B, T, T).

        By default ``"mean"`` averages those of cross-attention and of the decoder's self-attention; other aggregations,
        which must know how much of its own stream a layer keeps beside cross-attention, are refused.
        """
        _, decoder, cross = maps.of_three_stacks
        if self.aggregation != "mean":
            raise InvalidInputError(
                f'got the encoder–decoder model {self.session.name} and aggregation="{self.aggregation}"; '
                f'{type(self).__name__} does not chain its three stacks: pass layer= or aggregation="mean", or use '
                'AttentionRollout or, with "rollout", ALTI, ValueZeroing or AttentionTimesGradient'
            )
        return SourceAndPrefix(cross.mean(1), decoder.mean(1))

    def scores_of(self, maps: AttributionMaps, position: Position, *, aggregate: bool) -> Scores:
        """Compute what :meth:`captum_norm.NormAttribution.scores` returns, without checks."""
        chains = aggregate and self.aggregation != "mean"
        if maps.segmented:
            raise InvalidInputError("got maps of segments, whose rows are scores: read them, or take layers' mean(1)")
        if chains:
            refuse_chains(maps.cached)
        if maps.cross is not None and maps.decoder_real is not None:
            _, decoder, cross = maps.of_three_stacks
            both = self.chain(maps) if aggregate else SourceAndPrefix(only_layer(cross), only_layer(decoder))
            rows = position_rows(position, "last", maps.decoder_real, both.source, self.model).unsqueeze(1)
            return SourceAndPrefix(*((rows @ scores).squeeze(1) for scores in both))
        stack = maps.self_attention
        queries, keys = stack.shape[-2:]
        if position is None:
            rows = position_rows(None, self._head.position(maps), maps.real, stack, self.model)
        else:
            # The user counts from the first input on, not from the first virtual token.
            virtual = queries - (keys - maps.before)
            rows = position_rows(position, None, maps.real[:, virtual:], stack, self.model)
            rows = nn.functional.pad(rows, (virtual, 0))
        if not aggregate:
            return (rows.unsqueeze(1) @ only_layer(stack)).squeeze(1)
        if chains:
            stack, rows = with_prefix_rows(stack, self.prefix_own), nn.functional.pad(rows, (keys - queries, 0))
        return self.aggregate(stack, rows.unsqueeze(1)).squeeze(1)

    def explain(self, call: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Compute the scores of the position explained, (B, S), and the completeness error, (B,)."""
        if request.layers is None and self.aggregation != "mean":
            refuse_chains(call.without_rows)
        maps = self.observed_maps(call, request)
        scores = self.scores(maps, request.position, aggregate=request.layers is None)
        delta = None if maps.convergence_delta is None else maps.convergence_delta.amax(1)
        return scores_of_inputs(call, scores), delta

    def explain_last(self, call: ModelCall, of_last: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Compute the scores of the last positions, (B, R, S), and the completeness error, (B,)."""
        chains = self.aggregation != "mean"
        if chains:
            refuse_chains(call.without_rows)
        maps = self.session.explain(lambda: self.maps_of(of_last if self.any_rows and not chains else call, request))
        with torch.set_grad_enabled(self.session.differentiable):
            scores = scores_of_inputs(call, self._scores_of_rows(maps, cast(int, of_last.last)))
        return scores, None if maps.convergence_delta is None else maps.convergence_delta.amax(1)

    def _scores_of_rows(self, maps: AttributionMaps, last: int) -> Scores:
        """Compute the scores of the last rows, of maps that may have only these: (B, R, K)."""
        if maps.cross is not None and maps.decoder_real is not None:
            return SourceAndPrefix(*(scores[:, -last:] for scores in self.chain(maps)))
        stack = maps.self_attention
        if self.aggregation != "mean":
            stack = with_prefix_rows(stack, self.prefix_own)
        rows = torch.eye(stack.shape[-2], dtype=stack.dtype, device=stack.device)[-last:]
        return self.aggregate(stack, rows.expand(len(stack), -1, -1))

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
        if not self.segmented and (segments is not None or together):
            given = "together=True" if segments is None else "segments"
            raise InvalidInputError(
                f"got {given}; {type(self).__name__} has no vectors to add before a norm is taken: add scores instead, "
                "columns or rows of its maps"
            )
        if check_bool("per_head", request.per_head) and not self.single_heads:
            raise InvalidInputError(f"got per_head=True; {type(self).__name__} has no maps of single heads")
        self._check_model()
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
        if segments is not None or together is not False:
            request = replace(request, segments=as_segments(call, request, segments, together))
        if self.text_alone and call.towers:
            refuse_towers(type(self).__name__, call)
        return call, request

    def _check_model(self) -> None:
        """Refuse models that the method does not explain."""
        if self.one_stack and encoder_of(self.model) is not None:
            raise UnsupportedModelError(
                f"got the encoder–decoder model {self.session.name}; {type(self).__name__} explains one stack of "
                "layers: pass the encoder alone, as model.get_encoder()"
            )
        if self.batch_first and library_of(self.model) is not HUGGING_FACE:
            raise UnsupportedModelError(
                f"got {self.session.name}, which is not a Hugging Face model; {type(self).__name__} supports only "
                "these, whose layers have the batch first"
            )

    def observed_maps(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps; once per model, observe where its head reads if its class does not tell."""
        maps_of = self.maps_of if request.segments is None else self.segment_maps
        maps = self.session.explain(lambda: maps_of(call, request))
        self._head.observe(call, maps)
        return maps


def checked_map(
    layer_map: Callable[[Layer], Any], name: str, layer: Layer, shape: tuple[int, ...] | None = None
) -> LayerMap:
    """Compute the map of one layer by a method's function, whose mistakes are not the model's.

    Args:
        layer_map: the function.
        name: its name, for messages.
        layer: the layer.
        shape: of the map; (B, Q, K) if None.

    Raises:
        MethodError: if the function fails, writes into the layer's tensors, or returns anything else than a tensor of
            that shape.
    """
    shape = shape or (len(layer.call.query), layer.call.query.shape[2], layer.call.key.shape[2])
    delta, before = layer.error(), _versions(layer)
    try:
        made: Any = layer_map(layer)
    except (CaptumNormError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise MethodError(f"{name} failed in {layer.place}: {type(error).__name__}: {error}") from error
    if _versions(layer) != before:
        raise MethodError(f"{name} wrote into a tensor of {layer.place}; work on a copy: clone()")
    if not isinstance(made, Tensor) or made.shape != shape:
        got = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise MethodError(
            f"{name} returned {got} for {layer.place}; expected a tensor of shape {shape}, a number for each query "
            "and key of each example"
        )
    return LayerMap(made.to(layer.dtype), delta, layer.block.precision())


def _versions(layer: Layer) -> list[int]:
    """Count the writes into a layer's tensors."""
    tensors = (layer.weights, layer.values, *(value for value in vars(layer.tensors).values()))
    return [value._version for value in tensors if isinstance(value, Tensor) and not value.is_inference()]


def check_map(model: nn.Module, method: str, call: ModelCall, place: Place, made: LayerMap) -> None:
    """Refuse a map that is not finite, or vectors that do not add up.

    Raises:
        NonFiniteError: if there is NaN or infinity.
        IncompleteDecompositionError: if the vectors are not what the model computed.
    """
    expect_finite(model, place, made.delta)
    expect_complete(model, place, made.delta, made.precision)
    if made.discrepancy is not None:
        expect_agreement(model, place, *made.discrepancy)
    found, (queries, _) = made.map.detach(), call.positions_of(place.role)
    rows = found if queries.real is None or found.shape[-2] == 1 else found[queries.real.to(found.device)]
    if not rows.isfinite().all():
        raise NonFiniteError(f"the map that {method} returned for {place} contains NaN or infinity")
