"""Graphs of information flow as data: nodes and edges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from captum_norm.errors import InvalidInputError

FlowPart = Literal["residual", "attention", "feed-forward"]


class FlowNode(NamedTuple):
    """The residual stream at one position behind a block.

    Attributes:
        stack: ``"encoder"`` or ``"decoder"``.
        layer: the layer, from 0; −1 for what enters the first one.
        block: ``"attention"``, ``"cross-attention"`` or ``"feed-forward"``; ``"layer"`` in a parallel layer, whose two
            networks end together; ``"input"`` for what enters the first layer.
        position: in the inputs.
    """

    stack: str
    layer: int
    block: str
    position: int


class FlowEdge(NamedTuple):
    """One part of the residual stream behind a block.

    Attributes:
        source: the stream that the part comes from.
        target: the stream that it is a part of, of the edge's layer and block.
        part: the residual connection, attention or the feed-forward network.
        head: the head, from 0; None for other parts, and for all heads of a key together.
        importance: between 0 and 1; those of all parts of a stream, dropped ones included, add up to 1.
    """

    source: FlowNode
    target: FlowNode
    part: FlowPart
    head: int | None
    importance: float


@dataclass(frozen=True)
class FlowGraph:
    """The routes by which information flows to output positions [Ferrando & Voita 2024].

    Attributes:
        nodes: every stream on a route, from the outputs down.
        edges: every part above the threshold, in the order of their targets, from the outputs down.
        outputs: the nodes that the routes lead to.
        threshold: the importance that every edge exceeds.
        tokens: the texts of the tokens that the model's first stack reads, if they are known.

    Example:
        >>> source, target = FlowNode("decoder", -1, "input", 0), FlowNode("decoder", 0, "attention", 0)
        >>> graph = FlowGraph((target, source), (FlowEdge(source, target, "residual", None, 0.7),), (target,), 0.1)
        >>> graph.inputs(), graph.edges[0].target.block
        ({FlowNode(stack='decoder', layer=-1, block='input', position=0): 0.7}, 'attention')
    """

    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...]
    outputs: tuple[FlowNode, ...]
    threshold: float
    tokens: Sequence[str] | None = None

    def to(self, *positions: int) -> "FlowGraph":
        """Keep the routes to some of the output positions.

        Raises:
            InvalidInputError: the graph does not lead to one of them.
        """
        places = {node.position: node for node in self.outputs}
        for position in positions:
            if position not in places:
                known = ", ".join(map(str, places))
                raise InvalidInputError(f"got position {position}; the graph leads to the positions {known}")
        outputs = tuple(places[position] for position in dict.fromkeys(positions))
        nodes, edges = dict.fromkeys(outputs), list[FlowEdge]()
        for edge in self.edges:
            if edge.target in nodes:
                edges.append(edge)
                nodes[edge.source] = None
        return replace(self, nodes=tuple(nodes), edges=tuple(edges), outputs=outputs)

    def inputs(self) -> dict[FlowNode, float]:
        """Add up the products of importances along all routes from each input, by node; the mean of several outputs.

        Without a threshold these are the scores of the method's ``attribute``.
        """
        reached = dict.fromkeys(self.nodes, 0.0)
        reached |= dict.fromkeys(self.outputs, 1 / len(self.outputs))
        for edge in self.edges:
            reached[edge.source] += reached[edge.target] * edge.importance
        return {node: share for node, share in reached.items() if node.block == "input"}
