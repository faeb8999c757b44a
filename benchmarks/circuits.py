"""Edges between components of a residual stream, and circuits of the best of them: CPR and CMD of MIB.

An edge u → v is what component u (the input vectors, a head, a feed-forward network) writes to the stream, as v reads
it: a head's queries, keys or values, a feed-forward network, or the logits. Its score is ⟨a_u, ∂m/∂(v's input)⟩, with
the gradient through v's own branch alone; with a counterfactual ⟨a_u′ − a_u, ∂m/∂(v's input)⟩: edge attribution
patching [Syed et al. 2024], with ``steps`` EAP-IG [Hanna et al. 2024], and with a method's rules its kin. A circuit
runs the model with the best edges alone, every v with an input of its own; the areas CPR and CMD say how much of an
output the circuits keep [Mueller et al. 2025, MIB, arXiv:2504.13151]. ``EdgeScores.to_mib`` is MIB's JSON.

Example:
    >>> from captum_norm import ComponentAttribution, RelP
    >>> method = ComponentAttribution(RelP(model))
    >>> scores = edges(method, ids, target=11, counterfactual=other)
    >>> circuits(method, scores, ids, target=11, counterfactual=other).cpr
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from captum_norm import ComponentAttribution
from captum_norm.attr.components import CHANGE, PART, moved, named_outputs
from captum_norm.attr.frozen.components import ComponentNetwork, ComponentRequest, Tap
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.attr.frozen.rules import RuleSet
from captum_norm.attr.layer_maps import TOLERANCE, finite_results
from captum_norm.attr.output import RelevanceAttribution
from captum_norm.checks import check_count, check_index
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, UnsupportedModelError
from captum_norm.forward.request import Request
from captum_norm.functional import Normalization, apply_linear, inverse_scale
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block, FeedForwardBlock
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import (
    End,
    Hook,
    Received,
    first_argument,
    first_tensor,
    hooked,
    unobserved,
    with_argument,
)
from captum_norm.models.inputs import Inputs
from captum_norm.models.layouts import Scope
from captum_norm.models.outputs import OutputValues, Position, Target, chosen_target, output_scores
from captum_norm.models.precision import accumulation_dtype, least_precise
from captum_norm.models.token_inputs import with_outputs
from captum_norm.models.wrappers import class_of
from captum_norm.results.components import Component
from captum_norm.results.outputs import NamedOutput

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges at which MIB compares circuits with the model."""
MAPS: Mapping[Any, int] = {F.linear: 0, torch.addmm: 1}
"""Functions that compute linear maps, and which of their arguments is mapped, before the matrix."""
BLOCK: tuple[Scope, ...] = ("atb_ff_res",)


class StreamGraph(NamedTuple):
    """The components of a residual stream, as MIB names and orders them, and which come before which.

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

    @property
    def sources(self) -> list[str]:
        """The U components that write to the stream: ``"input"``, heads ``"a0.h1"`` and networks ``"m0"``."""
        heads = range(self.n_heads)
        return ["input", *(name for i in range(self.n_layers) for name in (*(f"a{i}.h{h}" for h in heads), f"m{i}"))]

    @property
    def targets(self) -> list[str]:
        """The V inputs that read it: ``"a0.h1<q>"``, ``"a0.h1<k>"``, ``"a0.h1<v>"``, ``"m0"`` and ``"logits"``."""
        inputs = [f"h{h}<{letter}>" for letter in "qkv" for h in range(self.n_heads)]
        return [*(name for i in range(self.n_layers) for name in (*(f"a{i}.{h}" for h in inputs), f"m{i}")), "logits"]

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


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """Scores of the edges between components of a residual stream, for one output of each example.

    Attributes:
        scores: those of U sources and V targets, (B, U, V); 0 where there is no edge.
        graph: the components.
        outputs: the output explained of each example.
        model: the model's class.
        method: the method's name.
        unit: what a score is.
    """

    scores: Tensor
    graph: StreamGraph
    outputs: Sequence[NamedOutput]
    model: str
    method: str
    unit: str

    def __repr__(self) -> str:
        best = ", ".join(f"{row['edge']} {row['score']:.3g}" for row in self.top(3))
        return f"EdgeScores({self.method}, {self.model}: {best})"

    @property
    def support(self) -> Tensor:
        """What each edge adds to the output of the inputs, as MIB's sign has it, the mean over examples, (U, V)."""
        mean = self.scores.detach().cpu().mean(0)
        return -mean if self.unit == CHANGE else mean

    def circuit(self, count: int, *, absolute: bool = True) -> Tensor:
        """Choose the edges that add the most to the output, (U, V).

        Args:
            count: how many.
            absolute: rank by the sizes of what they add, whatever the signs.

        Raises:
            InvalidInputError: there are fewer edges.
        """
        edges, added = self.graph.edges, self.support
        if not 0 <= check_index("count", count) <= edges.sum():
            raise InvalidInputError(f"got count={count}; expected 0 to {int(edges.sum())}, the number of edges")
        ranks = (added.abs() if absolute else added).masked_fill(~edges, -torch.inf).flatten()
        chosen = torch.zeros_like(edges).flatten()
        chosen[ranks.argsort(descending=True, stable=True)[:count]] = True
        return chosen.view_as(edges)

    def top(self, count: int = 10) -> list[dict[str, Any]]:
        """Return the edges whose mean scores over examples are the farthest from 0, as records.

        Args:
            count: how many.
        """
        return sorted(self.records(), key=lambda row: -abs(row["score"]))[: check_count("count", count)]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each edge: its name, source, target, and mean score over examples."""
        sources, targets = self.graph.sources, self.graph.targets
        mean: list[list[float]] = self.scores.detach().cpu().mean(0).tolist()
        return [
            {"edge": f"{sources[u]}->{targets[v]}", "source": sources[u], "target": targets[v], "score": mean[u][v]}
            for u, v in self.graph.edges.nonzero().tolist()
        ]

    def to_mib(self, count: int | None = None, *, absolute: bool = True) -> dict[str, Any]:
        """Return the graph as MIB's and EAP-IG's JSON files hold it, to be written by :func:`json.dump`.

        Args:
            count: how many edges are in the graph; None for all.
            absolute: as for :meth:`circuit`.

        Returns:
            ``cfg``, ``nodes`` and ``edges``; a node is in the graph if it has edges there on both sides.
        """
        chosen = self.graph.edges if count is None else self.circuit(count, absolute=absolute)
        inside = {name for name, some in zip(self.graph.targets, chosen.any(0).tolist(), strict=True) if some}
        reads = {"input", *(name.partition("<")[0] for name in inside)}
        sources = zip(self.graph.sources, chosen.any(1).tolist(), strict=True)
        every = self.graph.edges
        edges = zip(self.records(), self.support[every].tolist(), chosen[every].tolist(), strict=True)
        return {
            "cfg": self.graph._asdict(),
            "nodes": {name: {"in_graph": writes and name in reads} for name, writes in sources}
            | {"logits": {"in_graph": True}},
            "edges": {row["edge"]: {"score": score, "in_graph": kept} for row, score, kept in edges},
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


class StreamLayer(NamedTuple):
    """The parts of a layer that reads and writes one residual stream."""

    block: Block
    behind: FeedForwardBlock
    norm: nn.Module  # before the feed-forward network
    maps: Sequence[nn.Module]  # of the network, which read what the norm returns


def stream_layers(modules: HookedModules, name: str) -> dict[nn.Module, StreamLayer]:
    """Return the parts of a model's layers; refuse a model that has another structure than one residual stream."""
    layers = {}
    for attention, block in modules.blocks.items():
        behind = block.feed_forward
        norm = None if behind is None else behind.norm
        problems: dict[str, Any] = {
            "has two sequences": modules.has_encoder or block.cross,
            f"is {block.layout.style}": block.layout.style not in ("pre-norm", "sandwich", "parallel"),
            "is a mixture of experts": behind is not None and behind.experts is not None,
            "has no feed-forward network behind a norm": norm is None,
            "multiplies the residual stream": block.residual_factor or (behind and behind.residual_factor),
            "has positions before examples": block.queries_first,
        }
        problem = next((text for text, holds in problems.items() if holds), None)
        if problem is not None or behind is None or norm is None:
            raise UnsupportedModelError(
                f'got edges of {name}, of which "{block.name}" {problem}; edges are those of one residual stream that '
                "attention and dense feed-forward networks read through norms (pre-norm, sandwich, or parallel)"
            )
        maps = [step.module for reader in behind.dense for step in reader.inner]
        layers[modules.layer_of[attention]] = StreamLayer(block, behind, norm.module, maps)
    return layers


class Attending(Exception):  # noqa: N818 - no error
    """Ends the run of a layer whose queries, keys and values are known."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__()
        self.call = call


class Circuit(NamedTuple):
    """Edges that carry what sources write in a run; the others carry what they write in a counterfactual."""

    graph: StreamGraph
    kept: Tensor  # (U, V)
    others: Tensor  # (B, S, U, D)


class StreamRun:
    """A run of a model as it is, or of a circuit in it, in which the components' writing to the stream is noted."""

    def __init__(
        self, call: ModelCall, layers: Mapping[nn.Module, StreamLayer], circuit: Circuit | None = None
    ) -> None:
        self.call, self.layers, self.circuit = call, layers, circuit
        # The input; each layer's heads and network: (B, S, 1 or H, D), by their order in the graph.
        self._written: dict[int, Tensor] = {}
        self._layer, self._probing = -1, False

    def run(self) -> Any:
        """Run the model without gradients and return its output."""
        hooks: list[tuple[nn.Module, End, Hook]] = []
        for layer, (block, behind, norm, _) in self.layers.items():
            hooks += [(layer, "arguments", self._enter), (block.projection.module, "output", self._project)]
            hooks += [(norm, "arguments", self._read), (behind.written.module, "output", self._write)]
            hooks += [(layer, "result", self._leave)]
        with torch.no_grad(), self.call.attention_through(self._attend), hooked(hooks):
            return self.call.run()

    @property
    def sources(self) -> Tensor:
        """What each component has written so far, (B, S, U, D)."""
        return torch.cat([part for _, part in sorted(self._written.items())], 2)

    @property
    def graph(self) -> StreamGraph:
        """The components of a model that has run."""
        behind = next(iter(self.layers.values())).behind
        heads = {part.shape[2] for place, part in self._written.items() if place % 2}
        if len(heads) != 1:
            raise UnsupportedModelError(
                f"got edges of a model whose layers have {heads} heads; expected as many in each"
            )
        return StreamGraph(len(self.layers), heads.pop(), behind.parallel, self._written[0].shape[-1])

    def _moves(self, circuit: Circuit, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Compute what the edges left out change in inputs, (N, B, S, D), and which of these each target gets."""
        graph, kept, others = circuit
        before = int(graph.before[first])
        left_out, which = (~kept[:before, first : first + count]).unique(dim=1, return_inverse=True)
        changes = others[:, :, :before] - self.sources[:, :, :before]
        return torch.einsum("bsud,un->nbsd", changes, left_out.to(changes)), which

    def _enter(self, layer: nn.Module, received: Received) -> None:
        self._layer, self._now, self._stream = (
            self._layer + 1,
            self.layers[layer],
            cast(Tensor, first_argument(*received)),
        )
        self._dtype = accumulation_dtype(self._stream.dtype)
        if self._layer == 0:
            self._written[0] = self._stream.to(self._dtype).unsqueeze(2)
        if self.circuit is not None:
            heads = self.circuit.graph.n_heads
            moves, which = self._moves(self.circuit, self._layer * (3 * heads + 1), 3 * heads)
            calls = [self._probe(layer, received, self._stream + move.to(self._stream)) for move in moves]
            chosen = [[calls[which[letter * heads + h]] for h in range(heads)] for letter in range(3)]
            self._heads = [
                torch.stack([tensor[:, h * tensor.shape[1] // heads] for h, tensor in enumerate(tensors)], 1)
                for tensors in (
                    [call.query for call in chosen[0]],
                    [call.key for call in chosen[1]],
                    [call.value for call in chosen[2]],
                )
            ]

    def _probe(self, layer: nn.Module, received: Received, stream: Tensor) -> AttentionCall:
        """Run a layer on a stream as far as its attention."""
        args, kwargs = with_argument(*received, self._stream, stream)
        # A cache would keep what is not the model's.
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        self._probing = True
        try:
            with unobserved():
                layer(*args, **kwargs)
        except Attending as attending:
            return attending.call
        finally:
            self._probing = False
        raise UnsupportedModelError(f"{type(layer).__name__} did not attend when it was run alone")

    def _attend(self, call: AttentionCall) -> Tensor:
        if self._probing:
            raise Attending(call)
        if call.key is call.value:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} computes attention by its own products, in which queries and keys are "
                "not seen; edges need a model that calls an attention function"
            )
        if self.circuit is None:
            self._output = call.output()
        else:
            (query, key, value), shared = self._heads, call.query.shape[1] // call.key.shape[1]
            whole = call.whole()
            # Heads that share keys in the model have their own here, so the model's function runs once for each.
            runs = [
                replace(whole, query=query, key=key[:, i::shared], value=value[:, i::shared]).run()[0]
                for i in range(shared)
            ]
            self._output = torch.stack([runs[h % shared][:, :, h] for h in range(query.shape[1])], 2)
        return self._output

    def _project(self, _: nn.Module, projected: Tensor) -> None:
        block, output = self._now.block, self._output.to(self._dtype)
        weight, bias = block.projection.weight(self._dtype), block.projection.bias(self._dtype)
        heads = torch.einsum("bshd,hde->bshe", output, weight.unflatten(0, (output.shape[2], -1)))
        constant = torch.zeros_like(heads[:, :, :1]) + (0 if bias is None else bias)
        parts = self._through(block.carry("attn_res", self._dtype).branch, torch.cat([heads, constant], 2), projected)
        self._written[2 * self._layer + 1], self._constant = parts[:, :, :-1], parts[:, :, -1]

    def _write(self, _: nn.Module, written: Tensor) -> None:
        network = written.reshape(*self._stream.shape[:2], 1, -1).to(self._dtype)
        norm = self._now.behind.carry("atb_ff_res", self._dtype).branch
        self._written[2 * self._layer + 2] = self._through(norm, network, written)

    def _through(self, norm: Normalization | None, parts: Tensor, whole: Tensor) -> Tensor:
        """Carry parts, of which the last gets its bias, through a frozen norm between a block and the stream."""
        if norm is None:
            return parts
        parts = apply_linear(norm, parts) * inverse_scale(norm, whole.reshape(*parts.shape[:2], 1, -1).to(self._dtype))
        return parts if norm.bias is None else torch.cat([parts[:, :, :-1], parts[:, :, -1:] + norm.bias], 2)

    def _read(self, _: nn.Module, received: Received) -> Received | None:
        if self.circuit is None:
            return None
        heads = self.circuit.graph.n_heads
        return self._moved(*received, 3 * heads + self._layer * (3 * heads + 1))

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: int) -> Received:
        """Replace the stream among arguments by a target's input."""
        stream, circuit = cast(Tensor, first_argument(args, kwargs)), cast(Circuit, self.circuit)
        (move,), _ = self._moves(circuit, target, 1)
        return with_argument(args, kwargs, stream, stream + move.reshape(stream.shape).to(stream))

    def _leave(self, _: nn.Module, output: Any) -> Any:
        stream = cast(Tensor, first_tensor(output))
        if self.circuit is None:
            heads, network = (self._written[2 * self._layer + half] for half in (1, 2))
            summed = self._stream + self._constant + heads.sum(2) + network[:, :, 0]
            precision = least_precise(stream.dtype, self._now.block.precision(BLOCK))
            expect_equal(
                summed, stream, precision, f"what the components of layer {self._layer} write does not add up", stream
            )
        elif self._layer + 1 == len(self.layers):
            moved = self._moved((stream,), {}, self.circuit.kept.shape[1] - 1)[0][0]
            return moved if output is stream else type(output)(moved if part is stream else part for part in output)
        return None


def expect_equal(found: Tensor, expected: Tensor, precision: torch.dtype, problem: str, sizes: Tensor) -> None:
    """Refuse what differs from what it is to be by more than the rounding of summands of these sizes."""
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(sizes).clamp(min=1e-30)
    if not error <= TOLERANCE[precision]:
        raise IncompleteDecompositionError(
            f"{problem}: relative error {float(error):.1e}, accepted {TOLERANCE[precision]:.0e} for {precision}"
        )


@dataclass(frozen=True, kw_only=True)
class EdgeRequest(ComponentRequest):
    """Which edges to score.

    Attributes:
        kinds: feed-forward networks, which have to be found.
        graph: the components.
        sources: what gradients are multiplied by, (B, S, U, D).
        found: to which the scores of a pass are appended, (B, U, V).
    """

    kinds: tuple[Component, ...] = ("feed_forward",)
    graph: StreamGraph
    sources: Tensor
    found: list[Tensor] = field(default_factory=list)

    def network(self, modules: HookedModules, call: ModelCall, rules: RuleSet | None) -> ComponentNetwork:
        """Make the network that reads them."""
        return EdgeNetwork(modules, call, rules, self)


class EdgeNetwork(ComponentNetwork):
    """The frozen network, or the model with its own gradients, read at the inputs of its components."""

    def __init__(self, modules: HookedModules, call: ModelCall, rules: RuleSet | None, request: EdgeRequest) -> None:
        super().__init__(modules, call, rules, request)
        self._edges, self._structure = request, stream_layers(modules, type(call.model).__name__)
        # What layers, norms and maps of networks read; outputs of attention with queries, keys and values; and the
        # gradients of all these, as only the modules that received them see them.
        self._received: dict[nn.Module, Tensor] = {}
        self._attentions: dict[nn.Module, tuple[Tensor, Sequence[Tensor]]] = {}
        self._gradients: dict[nn.Module, Tensor] = {}
        self._end: Tensor | None = None

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """Return the functions to call before and after modules, in the order of their calls."""
        parts = self._structure.values()
        readers = [*self._structure, *(part.norm for part in parts), *(step for part in parts for step in part.maps)]
        return [*super().hooks(), ("before", readers, self._note_read), ("after", self._structure, self._note_end)]

    def tap(
        self,
        tap: Tap,  # noqa: ARG002 - no component is read
        tensor: Tensor,
        rows: Tensor | None = None,  # noqa: ARG002
        value: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Leave an activation as it is: edges are read where components read the stream."""
        return tensor

    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection, and note it."""
        output = super().attention(call)
        self._attentions[call.module] = output, (call.query, call.key, call.value)
        return self._watched(call.module, output)

    def _note_read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Received:
        self._received[module] = read = cast(Tensor, first_argument(args, kwargs))
        return with_argument(args, kwargs, read, self._watched(module, read))

    def _note_end(self, _module: nn.Module, *seen: Any) -> None:
        self._end = first_tensor(seen[-1])

    def _watched(self, module: nn.Module, tensor: Tensor) -> Tensor:
        view, network = tensor.view_as(tensor), proxy(self)
        view.register_hook(lambda gradient: network._gradients.__setitem__(module, gradient))
        return view

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the output of a torch function that the model's code calls."""
        if func in MAPS and self._entered and not self._replacing and len(args) == 3 and not kwargs:
            inputs, matrix = args[MAPS[func]], args[MAPS[func] + 1]
            if type(matrix) in (Tensor, nn.Parameter) and inputs.requires_grad:
                func = partial(SparseMap.apply, func)
        return super().__torch_function__(func, types, args, kwargs)

    def _relevances(self, value: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - always again
        relevance, bias = super()._relevances(value, again=True)
        graph, sources = self._edges.graph, self._edges.sources
        scores = sources.new_zeros(len(sources), *graph.edges.shape)
        total, first = torch.zeros_like(sources[:, :, 0]), 0
        for gradients in self._gradients_of_targets(value):
            before, last = int(graph.before[first]), first + gradients.shape[2]
            scores[:, :before, first:last] = torch.einsum("bsud,bsvd->buv", sources[:, :, :before], gradients)
            total, first = total + gradients.sum(2), last
        products = total * self.streams[0].detach()
        precision = least_precise(value.dtype, *(part.block.precision(BLOCK) for part in self._structure.values()))
        problem = "what the edges of the input contribute is not what the input does"
        expect_equal(products.sum(-1), relevance.to(total), precision, problem, products.abs().sum(-1))
        self._edges.found.append(scores)
        return relevance, bias

    def _gradients_of_targets(self, value: Tensor) -> Iterator[Tensor]:
        """Yield gradients of the inputs of some targets after the other, (B, S, N, D)."""
        like = self._edges.sources[:, :, :1]
        for layer in [module for module in self._received if module in self._structure]:
            part = self._structure[layer]
            yield self._gradients_of_heads(part.block.attention, self._received[layer]).to(like)
            read, passed = ([tensors[step] for step in part.maps] for tensors in (self._received, self._gradients))
            (gradient,) = torch.autograd.grad(read, self._received[part.norm], passed, retain_graph=True)
            yield gradient.reshape(like.shape).to(like)
        (gradient,) = torch.autograd.grad(value, cast(Tensor, self._end), retain_graph=True)
        yield gradient.reshape(like.shape).to(like)

    def _gradients_of_heads(self, attention: nn.Module, stream: Tensor) -> Tensor:
        output, inputs = self._attentions[attention]
        heads, shared = output.shape[2], output.shape[2] // inputs[1].shape[1]
        found = stream.new_zeros(*output.shape[:2], 3, heads, stream.shape[-1])
        for member in range(shared):  # of the heads with the same keys, each of which has its own gradient of these
            gradient = torch.zeros_like(output)
            gradient[:, :, member::shared] = self._gradients[attention][:, :, member::shared]
            # Constant attention weights pass nothing to queries and keys.
            passed = torch.autograd.grad(output, inputs, gradient, retain_graph=True, materialize_grads=True)
            for i, (tensor, whole) in enumerate(zip(inputs, passed, strict=True)):
                for head in range(member, heads, shared):
                    place = head * tensor.shape[1] // heads
                    alone = torch.zeros_like(whole)
                    alone[:, place] = whole[:, place]
                    (found[:, :, i, head],) = torch.autograd.grad(tensor, stream, alone, retain_graph=True)
        return found.flatten(2, 3)


class SparseMap(torch.autograd.Function):
    """A linear map whose gradient is computed of the outputs that have one: for a single head, those of its columns."""

    @staticmethod
    def forward(ctx: Any, func: Callable[..., Tensor], *args: Tensor) -> Tensor:  # noqa: D102
        ctx.place = MAPS[func]
        ctx.save_for_backward(args[1] if func is F.linear else args[2].T)
        return func(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        ((rows,), (gradient,)) = ctx.saved_tensors, gradients
        some = gradient.flatten(0, -2).any(0)
        passed = gradient[..., some] @ rows[some].to(gradient.dtype)
        return (None, passed, None, None) if ctx.place == 0 else (None, None, passed, None)


def edges(
    method: ComponentAttribution,
    inputs: Inputs,
    target: Target = None,
    additional_forward_args: Any = None,
    *,
    position: Position = None,
    counterfactual: Inputs | None = None,
    alignment: Tensor | None = None,
    steps: int | None = None,
) -> EdgeScores:
    """Attribute one output of each example to the edges of a model, with arguments as ``method.attribute`` has them.

    Raises:
        UnsupportedModelError: the model has another structure than one residual stream that attention and dense
            feed-forward networks read through norms.
        IncompleteDecompositionError: edges do not add up to what the components contribute.
    """
    if counterfactual is None and not (alignment is None and steps is None):
        raise InvalidInputError("got alignment or steps without a counterfactual; pass counterfactual=")
    if steps is not None:
        check_count("steps", steps)
    explained, call, values, other = _bound(
        method, "edges", inputs, target, additional_forward_args, position, counterfactual
    )
    work = partial(_scored, explained, call, values, other, alignment, steps)
    named = partial(named_outputs, explained, target, position, explained.session.tokenizer)
    (scores, graph), outputs = with_outputs(work, named, explained.model, inputs)
    unit = PART if counterfactual is None else CHANGE
    return EdgeScores(scores, graph, outputs, class_of(call.model).__name__, explained.name, unit)


def circuits(
    method: ComponentAttribution,
    scores: EdgeScores,
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
    explained, call, values, other = _bound(
        method, "circuits", inputs, target, additional_forward_args, position, counterfactual
    )
    counts = tuple(int(share * int(scores.graph.edges.sum())) for share in shares)
    chosen = [scores.circuit(count, absolute=absolute) for count in counts]
    here, whole, values = _observed(explained, call, values)
    if here.graph != scores.graph:
        raise InvalidInputError(
            f"got edges of {scores.graph} for a model with {here.graph}; pass scores of its own edges"
        )
    there = _observed(explained, cast(ModelCall, other), values)[0].sources
    others = moved(call, cast(ModelCall, other), alignment, there, here.sources)
    empty, *numbers = (
        _observed(explained, call, values, Circuit(here.graph, kept, others))[1]
        for kept in (torch.zeros_like(here.graph.edges), *chosen)
    )
    return CircuitScores(tuple(shares), counts, torch.stack(numbers), whole, empty)


def _bound(
    method: ComponentAttribution,
    what: str,
    inputs: Inputs,
    target: Target,
    arguments: Any,
    position: Position,
    counterfactual: Inputs | None,
) -> tuple[RelevanceAttribution, ModelCall, OutputValues, ModelCall | None]:
    """Bind inputs and a counterfactual; return what has the gradients, both calls, and the values to explain."""
    explained = method.method
    if not isinstance(explained, RelevanceAttribution):
        raise InvalidInputError(
            f"got {what} for {type(explained).__name__}, which has no gradients of components; expected a method such "
            "as RelP, or the model itself"
        )
    call, asked = explained.call_of(inputs, arguments, Request(target=target, position=position))
    other = None if counterfactual is None else explained.call_of(counterfactual, arguments, asked)[0]
    return explained, call, explained.values(call, asked), other


def _scored(
    method: RelevanceAttribution,
    call: ModelCall,
    values: OutputValues,
    counterfactual: ModelCall | None,
    alignment: Tensor | None,
    steps: int | None,
) -> tuple[Tensor, StreamGraph]:
    """Score the edges of the model in a call, (B, U, V), and say which these are."""
    here, _, values = _observed(method, call, values)
    request = EdgeRequest(moves={}, graph=here.graph, sources=here.sources)
    if counterfactual is None:
        requests = [request]
    else:
        there = _observed(method, counterfactual, values)[0].sources
        there = moved(call, counterfactual, alignment, there, request.sources)
        request = replace(request, sources=there - request.sources)
        shares = [] if steps is None else [(step + 0.5) / steps for step in range(steps)]
        requests = [replace(request, path=([there[:, :, 0]], share), found=[]) for share in shares] or [request]
    for each in requests:
        method.decomposition(call, values, components=each)
    return finite_results(method.model, torch.stack([each.found[0] for each in requests]).mean(0)), here.graph


def _observed(
    method: RelevanceAttribution, call: ModelCall, values: OutputValues, circuit: Circuit | None = None
) -> tuple[StreamRun, Tensor, OutputValues]:
    """Run the model, or a circuit in it; return the run, the values of its output, (B,), and what they are of."""
    call = method._prepared(call)
    modules = method._hooked_modules(call, feed_forward=True)
    run = StreamRun(call, stream_layers(modules, type(method.model).__name__), circuit)
    output = run.run()
    if circuit is None:
        call.note(output)
    if values.target is None:  # what is predicted here stays the target of all runs
        scores = output_scores(call, output, values.position, values.readout)
        values = replace(values, target=chosen_target(None, scores))
    return run, values.read(call, output)[0][:, 0].detach(), values
