"""Circuits of the best edges of a residual stream: CPR and CMD of MIB, and its JSON.

A circuit runs the model with the edges that have the best scores of :class:`captum_norm.ComponentAttribution` alone,
every target with an input of its own; the areas CPR and CMD say how much of an output the circuits keep [Mueller et al.
2025, MIB, arXiv:2504.13151].

Example:
    >>> from captum_norm import ComponentAttribution, RelP
    >>> method = ComponentAttribution(RelP(model))
    >>> scores = method.attribute(ids, target=11, components="edges", counterfactual=other)
    >>> circuits(method, scores, ids, target=11, counterfactual=other).cpr
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from captum_norm import ComponentAttribution
from captum_norm.attr.components import CHANGE, moved
from captum_norm.attr.frozen.components import ComponentRequest, Tap
from captum_norm.attr.frozen.edges import EdgeNetwork, sources_of
from captum_norm.attr.output import RelevanceAttribution
from captum_norm.checks import check_index
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.forward.request import Request
from captum_norm.models.attention import AttentionCall
from captum_norm.models.hooks import Hook, Received, first_argument, with_argument
from captum_norm.models.inputs import Inputs
from captum_norm.models.outputs import Position, Target, chosen_target, output_scores
from captum_norm.models.wrappers import class_of
from captum_norm.results.components import ComponentScores, edge_ends

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges at which MIB compares circuits with the model."""
EDGES = ComponentRequest(("edges",))


class StreamGraph(NamedTuple):
    """The components of a residual stream, as MIB tells them, and which come before which.

    Attributes:
        n_layers: the number of layers.
        n_heads: the number of attention heads in each.
        parallel_attn_mlp: whether a layer's feed-forward network reads what its heads read.
        d_model: the width of the stream.
    """

    n_layers: int
    n_heads: int
    parallel_attn_mlp: bool
    d_model: int

    @classmethod
    def of(cls, network: EdgeNetwork) -> "StreamGraph":
        """Return the components of a model that has run."""
        heads = network.activations[Tap("edges", "self", 1)]
        return cls(len(network.blocks), heads.shape[2], network.blocks[0][1].parallel, heads.shape[3])

    @property
    def before(self) -> Tensor:
        """How many of the sources come before each target, (V,)."""
        heads, beside = self.n_heads, 0 if self.parallel_attn_mlp else self.n_heads
        starts = [1 + layer * (heads + 1) for layer in range(self.n_layers + 1)]
        return torch.tensor([n for start in starts for n in (*[start] * 3 * heads, start + beside)][: -3 * heads])

    @property
    def edges(self) -> Tensor:
        """True where a source comes before a target, (U, V)."""
        return torch.arange(1 + self.n_layers * (self.n_heads + 1))[:, None] < self.before


def graph_of(method: ComponentAttribution, inputs: Inputs, additional_forward_args: Any = None) -> StreamGraph:
    """Run a model and return the components of its stream."""
    explained = cast(RelevanceAttribution, method.method)
    call, _ = explained.call_of(inputs, additional_forward_args, Request())
    return StreamGraph.of(explained.run_plain(call, EDGES, EdgeNetwork)[0])


def support(scores: ComponentScores) -> Tensor:
    """Return what each edge adds to the output of the inputs, as MIB's sign has it, the mean over examples, (U, V)."""
    ((_, part),) = scores.parts["edges"].items()
    mean = part.detach().cpu().mean(0)
    return -mean if scores.unit == CHANGE else mean


def best_edges(scores: ComponentScores, graph: StreamGraph, count: int, *, absolute: bool = True) -> Tensor:
    """Choose the edges that add the most to the output, (U, V).

    Args:
        scores: those of the model's edges.
        graph: the model's components.
        count: how many.
        absolute: rank by the sizes of what they add, whatever the signs.

    Raises:
        InvalidInputError: there are fewer edges.
    """
    edges, added = graph.edges, support(scores)
    if not 0 <= check_index("count", count) <= edges.sum():
        raise InvalidInputError(f"got count={count}; expected 0 to {int(edges.sum())}, the number of edges")
    ranks = (added.abs() if absolute else added).masked_fill(~edges, -torch.inf).flatten()
    chosen = torch.zeros_like(edges).flatten()
    chosen[ranks.argsort(descending=True, stable=True)[:count]] = True
    return chosen.view_as(edges)


def to_mib(
    scores: ComponentScores, graph: StreamGraph, count: int | None = None, *, absolute: bool = True
) -> dict[str, Any]:
    """Return the graph as MIB's and EAP-IG's JSON files hold it, to be written by :func:`json.dump`.

    Args:
        scores: those of the model's edges.
        graph: the model's components.
        count: how many edges are in the graph; None for all.
        absolute: as for :func:`best_edges`.

    Returns:
        ``cfg``, ``nodes`` and ``edges``; a node is in the graph if it has edges there on both sides.
    """
    every, added = graph.edges, support(scores)
    chosen = every if count is None else best_edges(scores, graph, count, absolute=absolute)
    sources, targets = edge_ends(*every.shape)
    inside = {name for name, some in zip(targets, chosen.any(0).tolist(), strict=True) if some}
    reads = {"input", *(name.partition("<")[0] for name in inside)}
    nodes = zip(sources, chosen.any(1).tolist(), strict=True)
    return {
        "cfg": graph._asdict(),
        "nodes": {name: {"in_graph": writes and name in reads} for name, writes in nodes}
        | {"logits": {"in_graph": True}},
        "edges": {
            f"{sources[u]}->{targets[v]}": {"score": float(added[u, v]), "in_graph": bool(chosen[u, v])}
            for u, v in every.nonzero().tolist()
        },
    }


class CircuitScores(NamedTuple):
    """How much of an output circuits keep, each of a share of the edges; the others carry what a counterfactual writes.

    Attributes:
        shares: the share of edges in each of K circuits, ascending.
        counts: their numbers of edges.
        numbers: the output of each circuit, m(C), (K, B).
        whole: that of the model, m(N), (B,).
        empty: that of no edges, which is the counterfactual's, m(∅), (B,).
    """

    shares: Sequence[float]
    counts: Sequence[int]
    numbers: Tensor
    whole: Tensor
    empty: Tensor

    @property
    def faithfulness(self) -> Tensor:
        """f(C) = (m(C) − m(∅)) / (m(N) − m(∅)), of means over examples, (K,)."""
        return (self.numbers.mean(1) - self.empty.mean()) / (self.whole.mean() - self.empty.mean())

    @property
    def cpr(self) -> float:
        """The area under f over the shares, by the trapezoidal rule [Mueller et al. 2025]: high if edges add to m."""
        return float(torch.trapezoid(self.faithfulness, torch.tensor(self.shares).to(self.numbers)))

    @property
    def cmd(self) -> float:
        """The area under the distance of f to 1: low if circuits do what the model does."""
        return float(torch.trapezoid((1 - self.faithfulness).abs(), torch.tensor(self.shares).to(self.numbers)))


class Attending(Exception):  # noqa: N818 - no error
    """Ends the run of a layer whose queries, keys and values are known."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__()
        self.call = call


class CircuitNetwork(EdgeNetwork):
    """The model in which some edges carry what sources write; the others carry what they write in a counterfactual."""

    def __init__(
        self,
        *args: Any,
        graph: StreamGraph,
        kept: Tensor,  # (U, V)
        others: Tensor,  # (B, S, U, D)
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._graph, self._kept, self._others = graph, kept, others
        self._probing = False

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """Return the functions to call before and after modules, in the order of their calls."""
        return [*super().hooks(), ("before", self.modules.layers, self._probe_heads)]

    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection."""
        if self._probing:
            raise Attending(call)
        self._call = call
        return super().attention(call)

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace what the norm before a feed-forward network reads."""
        super().read(module, args, kwargs)
        if self._probing:
            return None
        stream = cast(Tensor, first_argument(args, kwargs))
        return with_argument(args, kwargs, stream, self._moved(stream, 3 * self._graph.n_heads + self._first))

    def tap(self, tap: Tap, tensor: Tensor, rows: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Note what components write; replace the output of attention, and what goes on to the logits."""
        if self._probing:
            return tensor
        passed = super().tap(tap, self._mixed() if tap.kind == "heads" else tensor, rows, value)
        last = tap.kind == "residual" and tap.layer == self._graph.n_layers
        return self._moved(passed, self._kept.shape[1] - 1) if last else passed

    @property
    def _first(self) -> int:
        return self._layer * (3 * self._graph.n_heads + 1)

    def _moves(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Compute what the edges left out change in inputs, (N, B, S, D), and which of these each target gets."""
        before = int(self._graph.before[first])
        left_out, which = (~self._kept[:before, first : first + count]).unique(dim=1, return_inverse=True)
        changes = self._others[:, :, :before] - sources_of(self.activations)[:, :, :before]
        return torch.einsum("bsud,un->nbsd", changes, left_out.to(changes)), which

    def _moved(self, stream: Tensor, target: int) -> Tensor:
        (move,), _ = self._moves(target, 1)
        moved_stream: Tensor = stream + move.reshape(stream.shape).to(stream)
        return moved_stream

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self._probing else super()._begin(module, args, kwargs)

    def _probe_heads(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._probing:
            return
        heads, stream = self._graph.n_heads, cast(Tensor, first_argument(args, kwargs))
        moves, which = self._moves(self._first, 3 * heads)
        inputs = (stream + move.to(stream) for move in moves)
        calls = [self._probe(layer, with_argument(args, kwargs, stream, each)) for each in inputs]
        chosen = [[calls[which[letter * heads + h]] for h in range(heads)] for letter in range(3)]
        self._heads = [
            torch.stack([tensor[:, h * tensor.shape[1] // heads] for h, tensor in enumerate(tensors)], 1)
            for tensors in (
                [call.query for call in chosen[0]],
                [call.key for call in chosen[1]],
                [call.value for call in chosen[2]],
            )
        ]

    def _probe(self, layer: nn.Module, received: Received) -> AttentionCall:
        """Run a layer on another stream as far as its attention."""
        args, kwargs = received
        # A cache would keep what is not the model's.
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        self._probing, self._replacing = True, False
        try:
            layer(*args, **kwargs)
        except Attending as attending:
            return attending.call
        finally:
            self._probing, self._replacing = False, True
        raise UnsupportedModelError(f"{type(layer).__name__} did not attend when it was run alone")

    def _mixed(self) -> Tensor:
        """Attend with queries, keys and values of inputs of their own."""
        (query, key, value), call = self._heads, self._call
        whole, shared = call.whole(), call.query.shape[1] // call.key.shape[1]
        # Heads that share keys in the model have their own here, so the model's function runs once for each.
        runs = [
            replace(whole, query=query, key=key[:, i::shared], value=value[:, i::shared]).run()[0]
            for i in range(shared)
        ]
        return torch.stack([runs[h % shared][:, :, h] for h in range(query.shape[1])], 2)


def circuits(
    method: ComponentAttribution,
    scores: ComponentScores,
    inputs: Inputs,
    target: Target = None,
    additional_forward_args: Any = None,
    *,
    counterfactual: Inputs,
    position: Position = None,
    alignment: Tensor | None = None,
    shares: Sequence[float] = SHARES,
    absolute: bool = True,
) -> CircuitScores:
    """Run the model with its best edges alone: all others carry what their sources write in a counterfactual.

    Args:
        method: of the model, with arguments as ``method.attribute`` has them where they are not below.
        scores: of this model's edges, on these or other inputs.
        inputs: those of the model.
        target: the output.
        additional_forward_args: further arguments of the model.
        counterfactual: the other inputs.
        position: where the output is read.
        alignment: the counterfactual's positions.
        shares: the shares of the edges to keep, ascending; by default those of MIB.
        absolute: keep edges of large scores, whatever their signs.
    """
    explained = cast(RelevanceAttribution, method.method)
    call, asked = explained.call_of(inputs, additional_forward_args, Request(target=target, position=position))
    other, _ = explained.call_of(counterfactual, additional_forward_args, asked)
    values = explained.values(call, asked)
    here, output = explained.run_plain(call, EDGES, EdgeNetwork)
    graph, known = StreamGraph.of(here), support(scores).shape
    if (scores.model, known) != (class_of(method.model).__name__, graph.edges.shape):
        raise InvalidInputError(
            f"got edges of {scores.model}, {tuple(known)}, for {class_of(method.model).__name__}, which has {graph}; "
            "pass scores of its own edges"
        )
    if values.target is None:  # what is predicted here stays the target of all runs
        target = chosen_target(None, output_scores(call, output, values.position, values.readout))
        values = replace(values, target=target)
    sources = sources_of(here.activations)
    there = sources_of(explained.run_plain(other, EDGES, EdgeNetwork)[0].activations)
    others = moved(call, other, alignment, there, sources)

    def number(result: Any) -> Tensor:
        return values.read(call, result)[0][:, 0].detach()

    counts = tuple(int(share * int(graph.edges.sum())) for share in shares)
    kept = [torch.zeros_like(graph.edges), *(best_edges(scores, graph, count, absolute=absolute) for count in counts)]
    kinds = (partial(CircuitNetwork, graph=graph, kept=each, others=others) for each in kept)
    empty, *numbers = (number(explained.run_plain(call, EDGES, kind)[1]) for kind in kinds)
    return CircuitScores(tuple(shares), counts, torch.stack(numbers), number(output), empty)
