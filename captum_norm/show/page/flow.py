"""Turns a graph of information flow into what a page draws."""

from collections.abc import Mapping
from types import MappingProxyType

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.show.page.document import Graph

_NOWHERE: Mapping[str, int] = MappingProxyType({})


def flow_graph(
    graph: FlowGraph, method: str = "information-flow", *, starts: Mapping[str, int] = _NOWHERE, first: int = 0
) -> Graph:
    """Put a graph of :meth:`captum_norm.InformationFlow.graphs` on a page.

    Args:
        graph: the graph.
        method: the method's name.
        starts: where each stack's positions begin among the example's inputs, if not at 0.
        first: the output position of the example's first row.

    Example:
        >>> from captum_norm.attr.flow_graph import FlowEdge, FlowNode
        >>> source, target = FlowNode("decoder", -1, "input", 0), FlowNode("decoder", 0, "attention", 0)
        >>> edge = FlowEdge(source, target, "residual", None, 0.7)
        >>> shown = flow_graph(FlowGraph((target, source), (edge,), (target,), 0.1))
        >>> shown.edges, shown.outputs
        ([(1, 0, 'residual', None, 0.7)], [(0, 0)])
    """
    index = {node: place for place, node in enumerate(graph.nodes)}
    return Graph(
        [(*node[:3], node.position + starts.get(node.stack, 0)) for node in graph.nodes],
        [
            (index[edge.source], index[edge.target], edge.part, edge.head, float(f"{edge.importance:.6g}"))
            for edge in graph.edges
        ],
        [(node.position - first, index[node]) for node in graph.outputs],
        graph.threshold,
        method,
    )
