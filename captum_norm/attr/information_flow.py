"""Follows information flow routes: how near each part of the residual stream is to the whole, block by block."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, cast

import torch
from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.flow_graph import FlowEdge, FlowGraph, FlowNode, FlowPart
from captum_norm.attr.layer_maps import LayerMap, check_layers, checked_map, stack_name
from captum_norm.checks import check_bool, check_number
from captum_norm.errors import InvalidInputError
from captum_norm.forward.record import FeedForwardTensors, Layer
from captum_norm.forward.request import Request
from captum_norm.forward.session import MeterOptions
from captum_norm.functional import length, own_keys, relative_error
from captum_norm.functional.contributions import head_nearness
from captum_norm.models.blocks import FeedForwardBlock, check_scopes, multiplied
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import Position, positions_of_examples, read_position, real_positions
from captum_norm.models.stacks import Role
from captum_norm.results.maps import MapUnits


class InformationFlow(AttentionMapAttribution):
    """Information flow routes [Ferrando & Voita 2024].

    The residual stream y behind a block is a sum of parts v: the stream before it, each head's vector of each key
    (or the feed-forward network's output), and biases. The importance of a part is

        max(0, ‖y‖₁ − ‖y − v‖₁), divided by the sum over all parts of y.

    :meth:`graphs` follows the parts above a threshold from one output position down. A layer's map adds up the heads'
    importances by key, with the residual connection at the query's own; ``attribute`` rolls the maps out: the sum of
    the products of importances along all routes from a token to the position explained. Both edges of a feed-forward
    block lead to the same position and add up to 1, so they change no score.

    In a post-norm layer y is taken behind the norm, whose statistics are frozen; in a parallel layer behind both
    networks, the feed-forward output being one more part. In cross-attention the residual connection is a part of no
    key; the scores of encoder–decoder models follow as in :class:`captum_norm.ALTI`.

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        aggregation: how ``attribute`` combines the layers' maps: by default ``"rollout"``, of which the routes are, or
            ``"mean"``.
        options: see :class:`captum_norm.forward.session.MeterOptions`; ``memory_budget`` also bounds the vectors. The
            attention weights and importances of one layer are held at a time.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> (graph,) = InformationFlow(model).graphs(torch.tensor([[7, 9, 3, 8]]), position=2, threshold=0.02)
        >>> graph.outputs
        (FlowNode(stack='decoder', layer=1, block='feed-forward', position=2),)
        >>> all(edge.importance > 0.02 and edge.target.position <= 2 for edge in graph.edges)
        True
    """

    name, units = "information-flow", MapUnits("importance")
    chained = True

    def __init__(self, model: Explainable, aggregation: str = "rollout", **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, aggregation, **options)

    def graphs(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        position: Position | Literal["all"] = None,
        threshold: float = 0.04,
        per_head: bool = True,
    ) -> list[FlowGraph]:
        """Follow the routes to one output position of each example, or to all.

        Args:
            inputs: as for :meth:`~captum_norm.NormAttribution.maps`.
            additional_forward_args: as for :meth:`~captum_norm.NormAttribution.maps`.
            position: the output position: an index, one for each example, ``"first"`` or ``"last"``; ``"all"`` for
                every real position, from which :meth:`captum_norm.attr.flow_graph.FlowGraph.to` chooses. None: the last
                of a causal model or of a decoder, else the one position that the head reads.
            threshold: drop parts whose importance does not exceed it; 0 keeps all that have some.
            per_head: whether each head's vector is an edge of its own; False adds up the importances of a key's heads,
                as the authors' tool does, before the threshold.

        Raises:
            InvalidInputError: for a threshold outside 0 to 1, virtual tokens or cached positions, or no position if the
                head reads several.
            UnsupportedScopeError: if a layer's feed-forward block is not understood.
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        limit = check_number("threshold", threshold)
        if not 0 <= limit < 1:
            raise InvalidInputError(f"got threshold={threshold}; expected a number from 0 to 1, such as 0.04")
        check_bool("per_head", per_head)
        call, _ = self.call_of(inputs, additional_forward_args, Request())
        self.session.refuse_mixing(call)
        if call.prefix.past or call.prefix.virtual:
            raise InvalidInputError(
                "got virtual tokens or cached positions, which have no streams to follow; pass the whole sequence, or "
                "take attribute() or maps()"
            )
        return self.session.explain(partial(self._graphs, call, position, limit, per_head=per_head))

    def layer_map(self, layer: Layer) -> Tensor:
        """Add up the importances of one layer by key, (B, Q, K)."""
        heads, others = block_importances(layer)
        importance = heads.sum(1)
        if not layer.cross:
            own_keys(importance).add_(sum(others.values()))
        return importance

    def request_of(self, call: ModelCall, request: Request) -> Request:
        """Request the feed-forward blocks of parallel layers, whose output the stream holds, too."""
        parallel = any(block.layout.minus is not None for block in self.session.blocks(call).values())
        return replace(super().request_of(call, request), feed_forward=parallel)

    def reduce(self, layer: Layer, request: Request) -> LayerMap:  # noqa: ARG002 - the same for all requests
        """Compute the importances of a layer and the error of its sums."""
        return self._checked(self.layer_map, layer)

    def _checked(self, layer_map: Callable[[Layer], Tensor], layer: Layer) -> LayerMap:
        """Compute importances of a layer, and the error of the sum behind its feed-forward network if there is one."""
        if layer.block.layout.minus is not None:
            check_scopes(self.model, ["atb_ff_res"], layer.block)
        made = checked_map(layer_map, "InformationFlow.layer_map", layer)
        if layer.tensors.behind is None or made.delta is None:
            return made
        delta = torch.maximum(made.delta, feed_forward_error(layer).to(made.delta))
        return made._replace(delta=delta, precision=layer.block.precision(["atb_ff_res"]))

    def _graphs(
        self, call: ModelCall, position: Position | Literal["all"], threshold: float, *, per_head: bool
    ) -> list[FlowGraph]:
        crossed = call.encoder is not None
        streams: list[_Stream] = []

        def reduce(layer: Layer) -> LayerMap:
            behind = layer.block.feed_forward
            if behind is None and not (crossed and layer.place.role == "decoder"):
                check_scopes(self.model, ["atb_ff_res"], layer.block)

            def layer_map(layer: Layer) -> Tensor:
                heads, others = block_importances(layer)
                streams.append(_stream_behind_block(layer, heads, others, threshold, per_head=per_head))
                if behind is not None and "feed-forward" not in others:
                    stack: Role = "decoder" if layer.place.role == "cross" else layer.place.role
                    written = {part: values.cpu() for part, values in feed_forward_importances(layer).items()}
                    streams.append(_Stream(stack, layer.place.index, "feed-forward", written))
                return heads.sum(1)

            return self._checked(layer_map, layer)

        layers, causal = self.session.record(call, Request(weights=True, feed_forward=True), reduce)
        check_layers(self.model, layers)
        real = call.output_positions.shift_back(real_positions(call), 1)
        if isinstance(position, str) and position == "all":
            outputs = [row.nonzero().flatten().tolist() for row in real]
        else:
            position = self._read(position, causal=causal or crossed)
            outputs = [[place] for place in positions_of_examples(position, real).tolist()]
        roles: tuple[Role, ...] = ("encoder", "decoder") if crossed else ("self",)
        names = {role: stack_name(role, causal=causal) for role in roles}
        shifts = {role: call.positions_of(role)[0].shift for role in roles}
        texts, graphs = call.positions.texts, []
        for example, places in enumerate(outputs):
            shift = {role: 0 if by is None else int(by[example]) for role, by in shifts.items()}

            def node(stream: _Stream, place: int, shift: dict[Role, int] = shift) -> FlowNode:
                return FlowNode(names[stream.stack], stream.layer, stream.block, place + shift[stream.stack])

            tokens = None if texts is None else texts[example]
            positions = [place - shift[roles[-1]] for place in places]
            graphs.append(_followed(streams, example, positions, threshold, node, tokens, per_head=per_head))
        return graphs

    def _read(self, position: Position, *, causal: bool) -> Any:
        """Return the position explained, or the one that the head reads."""
        chosen: Any = position
        if chosen is None:
            chosen = "last" if causal else read_position(self.model, causal=False)
        if chosen is None or chosen == "mean" or (isinstance(chosen, str) and chosen not in ("first", "last")):
            raise InvalidInputError(
                f'got position={position!r}; a graph leads to one position: pass its index, "first" or "last", or "all"'
            )
        return chosen


def block_importances(layer: Layer) -> tuple[Tensor, dict[FlowPart, Tensor]]:
    """Compute the importances of the parts behind an attention block, in a parallel layer behind the whole layer."""
    whole = layer.output
    vectors: dict[FlowPart, Tensor] = {"residual": layer.stream}
    if layer.block.layout.minus is not None:
        behind, block = _network_of(layer)
        carry, whole = block.carry("atb_ff_res", whole.dtype), behind.total
        vectors["feed-forward"] = carry.vector(behind.written, None, carry.scales(behind.written, whole))
    most = layer.options.budget.piece_elements(whole)
    near = torch.stack(
        [
            head_nearness(y, alphas, values, layer.projection, most, channels=layer.channels)
            for y, alphas, values in zip(whole, layer.scaled_weights, layer.values, strict=True)
        ]
    )
    others = {part: _near(whole, vector) for part, vector in vectors.items()}
    share = _reciprocal(sum(others.values(), near.sum((1, 3))))
    return near * share[:, None, :, None], {part: values * share for part, values in others.items()}


def feed_forward_importances(layer: Layer) -> dict[FlowPart, Tensor]:
    """Compute the importances of the parts behind the feed-forward block that follows attention, (B, Q) each."""
    behind, block = _network_of(layer)
    carry, whole = block.carry("atb_ff_res_ln", layer.output.dtype), _end(behind)
    scales = carry.scales(behind.written, behind.total)
    residual = carry.linear_final(multiplied(block.residual_factor, layer.output))
    residual = residual if scales.final is None else residual * scales.final
    near = _near(whole, residual), _near(whole, carry.vector(behind.written, None, scales))
    share = _reciprocal(near[0] + near[1])
    return {"residual": near[0] * share, "feed-forward": near[1] * share}


def feed_forward_error(layer: Layer) -> Tensor:
    """Compute the relative error of residual stream and feed-forward output as what the model computed, (B,)."""
    behind, block = _network_of(layer)
    carry, whole = block.carry("atb_ff_res_ln", layer.output.dtype), _end(behind)
    stream = multiplied(block.residual_factor, layer.output)
    error = carry.constant(behind.written, stream, carry.scales(behind.written, behind.total)) - whole
    return relative_error(length(error), length(whole), layer.real)


def _network_of(layer: Layer) -> tuple[FeedForwardTensors, FeedForwardBlock]:
    return cast(FeedForwardTensors, layer.tensors.behind), cast(FeedForwardBlock, layer.block.feed_forward)


def _end(behind: FeedForwardTensors) -> Tensor:
    return behind.total if behind.normed is None else behind.normed


def _near(whole: Tensor, part: Tensor) -> Tensor:
    """Compute max(0, ‖y‖₁ − ‖y − v‖₁), (B, Q, D) -> (B, Q)."""
    return (whole.abs() - (whole - part).abs()).sum(-1).clamp(min=0)


def _reciprocal(total: Tensor) -> Tensor:
    return torch.where(total > 0, 1 / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(total))


class _Stream(NamedTuple):
    """The residual stream behind a block, with its parts; each query has fewer than 1 / threshold of a key's."""

    stack: Role
    layer: int
    block: str
    others: dict[FlowPart, Tensor]  # importances of parts from the query's own position, (B, Q)
    attention: tuple[Tensor, Tensor] | None = None  # example, head, query and key in each row, and importances
    across: bool = False  # whether the keys are the encoder's positions


def _stream_behind_block(
    layer: Layer, heads: Tensor, others: dict[FlowPart, Tensor], threshold: float, *, per_head: bool
) -> _Stream:
    heads = heads if per_head else heads.sum(1, keepdim=True)
    chosen = heads > threshold
    if layer.real is not None:
        chosen &= layer.real.to(chosen.device)[:, None, :, None]
    role, cross = layer.place.role, layer.place.role == "cross"
    name = "cross-attention" if cross else "layer" if "feed-forward" in others else "attention"
    attention = chosen.nonzero().cpu(), heads[chosen].cpu()
    importances = {part: values.cpu() for part, values in others.items()}
    return _Stream("decoder" if cross else role, layer.place.index, name, importances, attention, cross)


def _followed(
    streams: Sequence[_Stream],
    example: int,
    positions: Sequence[int],
    threshold: float,
    node: Callable[[_Stream, int], FlowNode],
    tokens: Sequence[str] | None,
    *,
    per_head: bool,
) -> FlowGraph:
    """Follow the parts above a threshold from positions of one example down, as in the sequence the model received."""
    last: dict[Role, _Stream] = {}
    steps: list[tuple[_Stream, _Stream]] = []
    for stream in streams:
        steps.append((stream, last.get(stream.stack, _Stream(stream.stack, -1, "input", {}))))
        last[stream.stack] = stream
    top = streams[-1]
    outputs = tuple(node(top, position) for position in positions)
    reached: dict[Role, set[int]] = {stack: set() for stack in last} | {top.stack: set(positions)}
    nodes, edges = dict.fromkeys(outputs), list[FlowEdge]()
    for stream, before in reversed(steps):
        queries, own = sorted(reached[stream.stack]), set[int]()
        source, keys = (last["encoder"], reached["encoder"]) if stream.across else (before, own)
        attended: dict[int, list[tuple[int, int, float]]] = {query: [] for query in queries}
        if stream.attention is not None:
            where, importances = stream.attention
            here = where[:, 0] == example
            for (_, head, query, key), importance in zip(where[here].tolist(), importances[here].tolist(), strict=True):
                if query in attended:
                    attended[query].append((head, key, importance))
        for query in queries:
            target = node(stream, query)
            for part, values in stream.others.items():
                importance = float(values[example, query])
                if importance > threshold:
                    own.add(query)
                    edges.append(FlowEdge(node(before, query), target, part, None, importance))
            for head, key, importance in attended[query]:
                keys.add(key)
                named = head if per_head else None
                edges.append(FlowEdge(node(source, key), target, "attention", named, importance))
        reached[stream.stack] = own
    nodes |= dict.fromkeys(edge.source for edge in edges)
    return FlowGraph(tuple(nodes), tuple(edges), outputs, threshold, tokens)
