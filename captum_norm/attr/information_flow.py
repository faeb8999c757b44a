"""Follows information flow routes: how near each part of the residual stream is to the whole, block by block."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution, LayerMap, check_map, checked_map
from captum_norm.attr.flow_edges import block_edges, feed_forward_edges, feed_forward_error
from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.attr.flow_routes import FlowRoutes
from captum_norm.checks import check_bool, check_number
from captum_norm.errors import InvalidInputError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request
from captum_norm.forward.stacking import stack_name
from captum_norm.functional import own_keys
from captum_norm.models.blocks import check_scopes
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.known import refuse_mixing
from captum_norm.models.outputs import Position, positions_of_examples, read_position, real_positions
from captum_norm.models.stacks import Place, Role
from captum_norm.results.aggregation import encoder_decoder_rollout
from captum_norm.results.maps import AttributionMaps, MapUnits, SourceAndPrefix


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
        aggregation: how ``attribute`` combines the layers' maps, ``"rollout"`` or ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`; ``memory_budget`` also bounds the vectors. The attention weights
            and importances of one layer are held at a time.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> (graph,) = InformationFlow(model).graphs(torch.tensor([[7, 9, 3, 8]]), position=2, threshold=0.02)
        >>> graph.output
        FlowNode(stack='decoder', layer=1, block='feed-forward', position=2)
        >>> all(edge.importance > 0.02 and edge.query <= 2 for edge in graph.edges)
        True
    """

    name, title, units = "information-flow", "information flow", MapUnits("importance")

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
                every real position, from which :meth:`captum_norm.FlowGraph.to` chooses. None: the last of a
                causal model or of a decoder, else the one position that the head reads.
            threshold: drop parts whose importance does not exceed it; 0 keeps all that have some.
            per_head: whether each head's vector is an edge of its own; False adds up the importances of a key's heads,
                as the authors' tool does, before the threshold.

        Returns:
            a graph for each example.

        Raises:
            InvalidInputError: for a threshold outside 0 to 1, virtual tokens or cached positions, or no position if the
                head reads several.
            UnsupportedScopeError: if a layer's feed-forward block is not understood.
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        limit = check_number("threshold", threshold)
        if not 0 <= limit < 1:
            raise InvalidInputError(f"got threshold={threshold}; expected a number from 0 to 1, such as 0.04")
        apart = check_bool("per_head", per_head)
        every = isinstance(position, str) and position == "all"
        asked = Request(position=None if every else position)
        call, request = self.call_of(inputs, additional_forward_args, asked)
        refuse_mixing(self.model)
        if call.before.past or call.before.virtual:
            raise InvalidInputError(
                "got virtual tokens or cached positions, which have no streams to follow; pass the whole sequence, or "
                "take attribute() or maps()"
            )
        routes = FlowRoutes(limit, apart)
        return self.session.explain(lambda: self._graphs(call, request, routes, every=every))

    def layer_map(self, layer: Layer) -> Tensor:
        """Add up the importances of one layer by key, (B, Q, K)."""
        edges = block_edges(layer)
        importance = edges.heads.sum(1)
        if not layer.cross:
            beside = edges.residual if edges.feed_forward is None else edges.residual + edges.feed_forward
            own_keys(importance).add_(beside)
        return importance

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps requested."""
        if request.per_head:
            return super().maps_of(call, request)  # refuses
        blocks = self.session.blocks(call)
        # Behind a parallel layer, the stream holds the feed-forward output, too.
        parallel = any(block.layout.minus is not None for block in blocks.values())
        return self.reduced_maps(
            call, request, lambda layer: _checked(self.model, self.layer_map, layer), feed_forward=parallel
        )

    def chain(self, maps: AttributionMaps) -> SourceAndPrefix:
        """Roll out the importances to every decoder position."""
        if self.aggregation != "rollout":
            return super().chain(maps)
        return SourceAndPrefix(*encoder_decoder_rollout(*maps.of_three_stacks))

    def _graphs(self, call: ModelCall, request: Request, routes: FlowRoutes, *, every: bool) -> list[FlowGraph]:
        blocks = self.session.blocks(call, feed_forward=True)
        crossed = call.encoder is not None

        def reduce(layer: Layer) -> LayerMap:
            block = layer.block
            if block.feed_forward is None and not (crossed and layer.place.role == "decoder"):
                check_scopes(self.model, ["atb_ff_res"], block)

            def layer_map(one: Layer) -> Tensor:
                edges = block_edges(one)
                sequential = block.feed_forward is not None and edges.feed_forward is None
                routes.add(one.place, edges, feed_forward_edges(one) if sequential else None, one.real)
                return edges.heads.sum(1)

            return _checked(self.model, layer_map, layer)

        found = self.session.record(call, Request(weights=True), reduce, blocks, feed_forward=True)
        causal = found.causal
        for role, layers in found.layers.items():
            for number, made in layers:
                check_map(self.model, type(self).__name__, call, Place(role, number), made)
        positions = call.output_positions
        shown = positions.shift_back(real_positions(call), 1)
        if every:
            outputs = [row.nonzero().flatten().tolist() for row in shown]
        else:
            chosen = self._read(request.position, causal=causal or crossed)
            outputs = [[place] for place in positions_of_examples(chosen, shown).tolist()]
        roles: tuple[Role, ...] = ("encoder", "decoder") if crossed else ("self",)
        shifts = {role: call.positions_of(role)[0].shift for role in roles}
        names = {role: stack_name(role, causal=causal) for role in roles}
        top, texts = roles[-1], call.tokens
        graphs = []
        for example in range(call.batch):
            own = {role: 0 if shift is None else int(shift[example]) for role, shift in shifts.items()}
            places = [place - own[top] for place in outputs[example]]
            tokens = None if texts is None else texts[example]
            graphs.append(routes.graph(example, places, names=names, shifts=own, tokens=tokens))
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


def _checked(model: nn.Module, layer_map: Callable[[Layer], Tensor], layer: Layer) -> LayerMap:
    """Compute importances of a layer, and the error of the sum behind its feed-forward network if there is one."""
    if layer.block.layout.minus is not None:
        check_scopes(model, ["atb_ff_res"], layer.block)
    made = checked_map(layer_map, "InformationFlow.layer_map", layer)
    if layer.tensors.behind is None:
        return made
    delta = torch.maximum(made.delta, feed_forward_error(layer).to(made.delta))
    return made._replace(delta=delta, precision=layer.block.precision(["atb_ff_res"]))
