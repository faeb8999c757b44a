"""Collects the edges above a threshold layer by layer, and follows them from an output position down."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from captum_norm.attr.flow_edges import BlockEdges, FeedForwardEdges
from captum_norm.attr.flow_graph import FlowEdge, FlowGraph, FlowNode, FlowPart
from captum_norm.models.stacks import Place

# A key, the head and the importance.
_Edge = tuple[int, int | None, float]
# The stack, the layer and the block behind which it runs.
_Stream = tuple[str, int, str]


@dataclass(frozen=True, eq=False)
class _Block:
    """A block's edges above the threshold.

    Attributes:
        stack: whose positions are the queries.
        layer: the layer.
        name: of the block.
        attention: indices of example, (head,) query and key, one in each row, and the importances.
        own: by part, the importances of what comes from the query's own stream, (B, Q).
        across: whether the keys are the encoder's positions.
    """

    stack: str
    layer: int
    name: str
    attention: tuple[Tensor, Tensor] | None
    own: dict[FlowPart, Tensor]
    across: bool = False


@dataclass(eq=False)
class FlowRoutes:
    """The edges of all blocks above a threshold, in the order of the forward pass.

    Each query has fewer than 1 / threshold of them in a block, so they take little memory.

    Attributes:
        threshold: what an importance must exceed.
        per_head: whether each head's vector is a part of its own; else a key has the sum of its heads' importances.
    """

    threshold: float
    per_head: bool
    _blocks: list[_Block] = field(default_factory=list)

    def add(self, place: Place, edges: BlockEdges, behind: FeedForwardEdges | None, real: Tensor | None) -> None:
        """Keep the edges of a layer's blocks; ``real`` is True at real queries, (B, Q)."""
        heads = edges.heads if self.per_head else edges.heads.sum(1)
        chosen = heads > self.threshold
        if real is not None:
            real = real.to(chosen.device)
            chosen &= real[:, None, :, None] if self.per_head else real[:, :, None]
        where = chosen.nonzero()
        own: dict[FlowPart, Tensor] = {"residual": edges.residual.cpu()}
        if edges.feed_forward is not None:
            own["feed-forward"] = edges.feed_forward.cpu()
        cross, parallel = place.role == "cross", edges.feed_forward is not None
        name = "cross-attention" if cross else "layer" if parallel else "attention"
        stack = "decoder" if cross else place.role
        kept = where.cpu(), heads[chosen].cpu()
        self._blocks.append(_Block(stack, place.index, name, kept, own, cross))
        if behind is not None:
            written: dict[FlowPart, Tensor] = {
                "residual": behind.residual.cpu(),
                "feed-forward": behind.feed_forward.cpu(),
            }
            self._blocks.append(_Block(stack, place.index, "feed-forward", None, written))

    def graph(
        self,
        example: int,
        positions: Sequence[int],
        *,
        names: dict[str, str],
        shifts: dict[str, int],
        tokens: Sequence[str] | None,
    ) -> FlowGraph:
        """Follow an example's edges from output positions down.

        Args:
            example: its index.
            positions: the positions, in the sequence that the model received.
            names: what the stacks are called.
            shifts: how far each stack's positions were shifted left.
            tokens: texts of the first stack's tokens.
        """
        before, behind, last = self._streams()

        def node(stream: _Stream, place: int) -> FlowNode:
            stack, layer, block = stream
            return FlowNode(names[stack], layer, block, place + shifts[stack])

        top = self._blocks[-1].stack
        outputs = tuple(node(last[top], position) for position in positions)
        reached: dict[str, set[int]] = {stack: set() for stack in last}
        reached[top].update(positions)
        nodes, edges = dict.fromkeys(outputs), list[FlowEdge]()
        for block, source, target in zip(reversed(self._blocks), reversed(before), reversed(behind), strict=True):
            queries, own = sorted(reached[block.stack]), set[int]()
            across = last["encoder"] if block.across else source
            keys = reached["encoder"] if block.across else own
            attended = self._attended(block, example, set(queries))
            for query in queries:
                for part, importances in block.own.items():
                    importance = float(importances[example, query])
                    if importance > self.threshold:
                        own.add(query)
                        edges.append(FlowEdge(node(source, query), node(target, query), part, None, importance))
                for key, head, importance in attended.get(query, ()):
                    keys.add(key)
                    edges.append(FlowEdge(node(across, key), node(target, query), "attention", head, importance))
            reached[block.stack] = own
        nodes |= dict.fromkeys(edge.source for edge in edges)
        return FlowGraph(tuple(nodes), tuple(edges), outputs, self.threshold, tokens)

    def _attended(self, block: _Block, example: int, queries: set[int]) -> dict[int, list[_Edge]]:
        found: dict[int, list[_Edge]] = {}
        if block.attention is None:
            return found
        where, importances = block.attention
        chosen = where[:, 0] == example
        for row, importance in zip(where[chosen].tolist(), importances[chosen].tolist(), strict=True):
            head, query, key = row[1:] if self.per_head else (None, *row[1:])
            if query in queries:
                found.setdefault(query, []).append((key, head, importance))
        return found

    def _streams(self) -> tuple[list[_Stream], list[_Stream], dict[str, _Stream]]:
        """Return the streams before and behind each block, and each stack's last one."""
        last: dict[str, _Stream] = {}
        before, behind = [], []
        for block in self._blocks:
            before.append(last.get(block.stack, (block.stack, -1, "input")))
            behind.append((block.stack, block.layer, block.name))
            last[block.stack] = behind[-1]
        return before, behind, last
