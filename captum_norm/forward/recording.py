"""Records one forward pass: hands the tensors of every attention block to a reducer as soon as they exist.

Attention weights are produced for a few query rows at a time and reduced at once, so they are never held for a whole
long sequence; the other tensors of a block live until its last one has come. The model is left as it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.parts import joined, parts_are_independent, parts_of, relative_difference, weights_again
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.factors import multiplied
from captum_norm.models.feed_forward import ExpertsReader, Routing, routing_of, routing_of_scores
from captum_norm.models.gates import Gate
from captum_norm.models.hooks import End, Hook, hooked
from captum_norm.models.layouts import Site
from captum_norm.models.precision import coarsest, step_of
from captum_norm.models.projections import within_a_pass
from captum_norm.models.stacks import ROWED, Place, Stacks


@dataclass(frozen=True)
class FeedForwardTensors:
    """The tensors of one feed-forward block in one forward pass, (B, Q, D) each but for the routing.

    Attributes:
        written: the output of its networks.
        total: its sum with the residual stream and, in a parallel layer, the attention output.
        read: the output of the norm before the networks, if there is one.
        normed: the final norm's output, if there is one.
        routing: the decision of a mixture's router, if there is one.
        attend: computes the attention weights again, part by part in the same order: (examples, H, rows, K) each.
        advance: call with the number of queries done with these.
    """

    written: Tensor
    total: Tensor
    read: Tensor | None
    normed: Tensor | None
    routing: Routing | None
    attend: Callable[[], Iterator[tuple[Part, Tensor]]]
    advance: Callable[[int], object]

    def rows(self, rows: slice, device: torch.device, dtype: torch.dtype) -> "FeedForwardTensors":
        """Slice query positions, on a device and in another dtype."""
        batch, queries = self.written.shape[:2]
        routing = self.routing
        if routing is not None:
            tables = (table.unflatten(0, (batch, queries))[:, rows].flatten(0, 1) for table in routing)
            routing = Routing(*tables)
        read, normed = (None if t is None else t[:, rows].to(device, dtype) for t in (self.read, self.normed))
        written, total = (t[:, rows].to(device, dtype) for t in (self.written, self.total))
        return FeedForwardTensors(written, total, read, normed, routing, self.attend, self.advance)


@dataclass(frozen=True)
class BlockTensors:
    """The tensors of one block in one forward pass, each (B, Q, D) but for the context.

    Attributes:
        context: attention's output, times its gate if it has one, which the projection receives, (B, Q, H·d).
        projected: the output of the output projection.
        residual: the residual stream before the block, as it enters the sum.
        total: their sum as the model computed it; without the feed-forward output in a parallel layer.
        normed: the final norm's output, if there is one.
        behind: the tensors of the feed-forward block behind it, if requested.
    """

    context: Tensor
    projected: Tensor
    residual: Tensor
    total: Tensor
    normed: Tensor | None
    behind: FeedForwardTensors | None = None

    def rows(self, rows: slice, dtype: torch.dtype) -> "BlockTensors":
        """Slice query positions; all tensors but the context in another dtype and on one device.

        Where two devices share a model, a layer receives its inputs on that of the layer before.
        """
        device = self.projected.device
        normed = None if self.normed is None else self.normed[:, rows].to(device, dtype)
        projected, residual, total = (t[:, rows].to(device, dtype) for t in (self.projected, self.residual, self.total))
        behind = None if self.behind is None else self.behind.rows(rows, device, dtype)
        return BlockTensors(self.context[:, rows], projected, residual, total, normed, behind)


class Reducer(Protocol):
    """Reduces one attention block, from its attention call on, while the forward pass goes through it."""

    def consume(self, weights: Tensor, part: Part) -> None:
        """Take the attention weights of a part, (examples, H, rows, K); every part comes once."""
        ...

    def finish(self, tensors: BlockTensors | None) -> None:
        """Finish with the block's tensors; None if blocks are not needed."""
        ...

    def check(self, model: nn.Module, place: Place) -> None:
        """Raise, after the forward pass, if results are not finite or do not add up to what the model computed."""
        ...


ReducerFactory = Callable[[Place, Block | None, AttentionCall], Sequence[Reducer]]


def no_bar(_queries: int) -> None:
    """Show no progress."""


def record(
    call: ModelCall,
    make_reducers: ReducerFactory,
    blocks: Mapping[nn.Module, Block] | None,
    advance: Callable[[int], object] = no_bar,
    *,
    feed_forward: bool = False,
) -> bool:
    """Run a model once and reduce each of its attention blocks.

    Args:
        call: the model and its inputs.
        make_reducers: called with each layer's place, in the order of the forward pass, its block and its attention
            call; returns its reducers, none for a layer that is not requested.
        blocks: the model's blocks by attention module; None if only attention weights are needed.
        advance: told how many queries have been treated since it was last called; a reducer that attends to them once
            more tells it, too.
        feed_forward: also hand on the tensors of the feed-forward blocks; each attention block is then finished when
            the one behind it is.

    Returns:
        whether the one stack of a model that is no encoder–decoder only looked back (a causal model).

    Raises:
        UnsupportedModelError: if no attention was seen, or queries and keys are different sequences where they should
            not be.
    """
    stacks = call.stacks()
    recorder = _Recorder(make_reducers, blocks, call.budget, advance, stacks, feed_forward, call.last)
    with within_a_pass(), call.attention_through(recorder.attention), hooked(recorder.hooks()):
        (call if call.last is None else call.with_few_outputs()).run()
    if not stacks.sizes:
        raise UnsupportedModelError(call.unseen)
    recorder.expect_nothing_open()
    return stacks.causal


@dataclass
class _OpenBlock:
    """What the forward pass has shown of a block so far.

    Attributes:
        queries: Q.
        first: the first query that has a row; tensors are kept from there on.
    """

    tensors: dict[Site[nn.Module], Tensor] = field(default_factory=dict)
    routing: Routing | None = None
    attend: Callable[[], Iterator[tuple[Part, Tensor]]] | None = None
    gated: tuple[Place, AttentionCall] | None = None
    reducers: Sequence[Reducer] = ()
    context: Tensor | None = None
    batch: int = 0
    queries: int = 0
    first: int = 0


@dataclass(eq=False)
class _Recorder:
    make_reducers: ReducerFactory
    blocks: Mapping[nn.Module, Block] | None
    budget: MemoryBudget
    advance: Callable[[int], object]
    stacks: Stacks
    feed_forward: bool
    last: int | None = None

    def __post_init__(self) -> None:
        self._open = {module: _OpenBlock() for module in self.blocks or ()}

    def hooks(self) -> list[tuple[nn.Module, End, Hook]]:
        """Hooks that note the tensors of all blocks, and the routing of mixtures of experts."""
        found: list[tuple[nn.Module, End, Hook]] = []
        for module, block in (self.blocks or {}).items():
            behind = block.feed_forward if self.feed_forward else None
            sites = block.sites if behind is None else block.sites | behind.sites
            found += [(site.module, site.end, partial(self._arrive, block, site, len(sites))) for site in sites]
            if behind is not None and behind.experts is not None:
                found.append(self._routing(module, behind.experts))
        return found

    def _routing(self, attention: nn.Module, experts: ExpertsReader) -> tuple[nn.Module, End, Hook]:
        def note(routing: Routing | None) -> None:
            self._open[attention].routing = routing

        if experts.scorer is None:
            return experts.module, "arguments", lambda _, received: note(routing_of(received))
        return experts.scorer, "output", lambda _, scores: note(routing_of_scores(scores))

    def attention(self, call: AttentionCall) -> Tensor:
        """Compute attention in place of the model's own function."""
        block, module, queries = self._block_of(call.module), call.module, call.query.shape[2]
        gated = block is not None and block.gated
        with self.stacks.attending(call) as place:
            first = 0 if self.last is None or place.role not in ROWED else queries - self.last
            # Before anything is kept of this layer.
            others = self._others(call, first) if first else None
            call = call.part(Part(slice(None), slice(first, queries))) if first else call
            reducers = () if gated else self.make_reducers(place, block, call)
            # Heads are strided views, which the product of every part would copy.
            heads = {name: getattr(call, name).contiguous() for name in ("query", "key", "value")}
            call = replace(call, **heads)
            outputs: list[Tensor] = []
            parts = list(parts_of(call, self.budget))
            for part in parts:
                output, weights = call.part(part).run()
                if first == 0 and part.rows.start == 0:
                    self.stacks.look(weights)
                for reducer in reducers:
                    reducer.consume(weights, part)
                outputs.append(output)
                self.advance(output.shape[0] * output.shape[1])
            rows = joined(outputs, len(call.query))
            context = rows if others is None else _behind(others, rows, first, call.module)
        if block is not None:
            opened = self._open[module]
            opened.reducers, opened.batch, opened.queries, opened.first = reducers, len(call.query), queries, first
            opened.context = rows.flatten(2) if reducers or gated else None
            opened.gated = (place, call) if gated else None
            if self.feed_forward and reducers:
                opened.attend = partial(weights_again, call, parts)
            opened.tensors = {site: _kept(block, opened, tensor) for site, tensor in opened.tensors.items()}
        else:
            for reducer in reducers:
                reducer.finish(None)
        return context

    def _others(self, call: AttentionCall, first: int) -> Tensor:
        """Compute the output of the queries before ``first``, whose weights are not kept: (B, first or Q, H, d).

        The model's own function computes that of all queries if it makes no weights; else they are made in parts.

        Raises:
            UnsupportedModelError: if the attention of a query depends on which others come with it.
        """
        _, weights = call.part(Part(slice(None), slice(0, 1))).run()
        self.stacks.look(weights)
        if call.own is not None:
            return call.own.output()
        if not parts_are_independent(call):
            raise UnsupportedModelError(
                f"the attention of a query in {type(call.module).__name__} depends on which other queries come with "
                "it; ask for all rows, without last="
            )
        others = call.part(Part(slice(None), slice(0, first)))
        outputs = [others.part(part).run()[0] for part in parts_of(others, self.budget)]
        return joined(outputs, len(call.query))

    def _block_of(self, module: nn.Module) -> Block | None:
        if self.blocks is None:
            return None
        if module not in self.blocks:
            raise UnsupportedModelError(f"{type(module).__name__} was not seen when the model's structure was read")
        return self.blocks[module]

    def expect_nothing_open(self) -> None:
        """Refuse blocks whose tensors have not all been seen."""
        for module, opened in self._open.items():
            if opened.reducers:
                raise UnsupportedModelError(
                    f"the attention block of {type(module).__name__} was not seen to its end: some of its modules did "
                    "not run in this forward pass"
                )

    def _reduce_gated(self, block: Block, opened: _OpenBlock, place: Place, call: AttentionCall) -> None:
        """Compute the weights of a block once more, now that the tensors behind attention show its gate."""
        received = _shaped(block, opened, opened.tensors[block.received])
        gate = Gate(call, cast(Tensor, opened.context), received)
        opened.reducers, opened.context = self.make_reducers(place, block, gate.call), received
        if not opened.reducers:
            return
        parts = list(parts_of(call, self.budget, gate.call.query.shape[1]))
        for part, weights in weights_again(call, parts):
            gated = gate.weights(weights, part)
            for reducer in opened.reducers:
                reducer.consume(weights if getattr(reducer, "ungated", False) else gated, part)
        opened.attend = lambda: ((part, gate.weights(found, part)) for part, found in weights_again(call, parts))

    def _arrive(
        self, block: Block, site: Site[nn.Module], sites: int, _module: nn.Module, tensor: Tensor | None
    ) -> None:
        opened, behind = self._open[block.attention], block.feed_forward
        if tensor is not None:
            overwritten = site in block.overwritten or (behind is not None and site in behind.overwritten)
            tensor = tensor.clone() if overwritten else tensor
            # Before attention is called, the number of queries is unknown.
            opened.tensors[site] = _kept(block, opened, tensor) if opened.batch else tensor
        if len(opened.tensors) == sites:
            self._open[block.attention] = _OpenBlock()
            if opened.gated is not None:
                self._reduce_gated(block, opened, *opened.gated)
            tensors = _block_tensors(block, opened, self.advance) if opened.reducers else None
            for reducer in opened.reducers:
                reducer.finish(tensors)


def _behind(others: Tensor, rows: Tensor, first: int, module: nn.Module) -> Tensor:
    """Put the output of the last queries behind that of the others, which may hold theirs, too: (B, Q, H, d).

    Raises:
        UnsupportedModelError: if what it holds of them is something else.
    """
    if others.shape[1] > first:
        error = relative_difference(others[:, first:], rows)
        if error > step_of(coarsest(torch.float32, rows.dtype)) ** 0.5:
            raise UnsupportedModelError(
                f"the attention function of {type(module).__name__} computes something else than its weights do: "
                f"relative difference {error:.1e}; to explain the weights, run the model with them, too"
            )
        if not torch.is_grad_enabled():
            others[:, first:] = rows
            return others
    return torch.cat([others[:, :first], rows], dim=1)


def _block_tensors(block: Block, opened: _OpenBlock, advance: Callable[[int], object]) -> BlockTensors:
    shaped = partial(_shaped, block, opened)

    def at(site: Site[nn.Module]) -> Tensor:
        return shaped(opened.tensors[site])

    factor, output = block.factor(block.layout.residual_factor), block.projection.output
    normed = None if block.final_norm is None else at(block.final_norm.output)
    total, projected = at(block.total), at(output)
    if block.minus is not None:
        total = total - at(block.minus).to(total.device)
    residual = multiplied(factor, at(block.residual))
    behind, parts = None, block.feed_forward
    if opened.attend is not None and parts is not None:
        read, behind_normed = (None if norm is None else at(norm.output) for norm in (parts.norm, parts.final_norm))
        tables = (_rows(block, opened, table).flatten(0, 1) for table in opened.routing or ())
        routing = opened.routing and Routing(*tables)
        behind = FeedForwardTensors(
            at(parts.written), at(parts.total), read, behind_normed, routing, opened.attend, advance
        )
    context = cast(Tensor, opened.context)  # wherever there is a reducer
    return BlockTensors(context, projected, residual, total, normed, behind)


def _shaped(block: Block, opened: _OpenBlock, tensor: Tensor) -> Tensor:
    """Reshape to (B, Q, D) what may have its first two axes merged or exchanged; what was cut has this shape."""
    return tensor if opened.first else _rows(block, opened, tensor)


def _kept(block: Block, opened: _OpenBlock, tensor: Tensor) -> Tensor:
    """Cut a tensor to the queries that have rows, in memory of its own; return it unchanged if all have."""
    return _rows(block, opened, tensor).clone() if opened.first else tensor


def _rows(block: Block, opened: _OpenBlock, tensor: Tensor) -> Tensor:
    if block.queries_first:
        shaped = tensor.reshape(opened.queries, opened.batch, -1).transpose(0, 1)
    else:
        shaped = tensor.reshape(opened.batch, opened.queries, -1)
    return shaped[:, opened.first :]
