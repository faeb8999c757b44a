"""Turns a graph of information flow into what a page draws."""

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.visualization.page.document import Graph


def flow_graph(graph: FlowGraph, method: str = "information-flow") -> Graph:
    """Put a graph of :meth:`captum_norm.InformationFlow.graphs` on a page.

    Example:
        >>> from captum_norm.attr.flow_graph import FlowEdge, FlowNode
        >>> source, target = FlowNode("decoder", -1, "input", 0), FlowNode("decoder", 0, "attention", 0)
        >>> edge = FlowEdge(source, target, "residual", None, 0.7)
        >>> flow_graph(FlowGraph((target, source), (edge,), target, 0.1)).edges
        [(1, 0, 'residual', None, 0.7)]
    """
    index = {node: place for place, node in enumerate(graph.nodes)}
    return Graph(
        graph.nodes,
        [
            (index[edge.source], index[edge.target], edge.part, edge.head, float(f"{edge.importance:.6g}"))
            for edge in graph.edges
        ],
        index[graph.output],
        graph.threshold,
        method,
    )
