"""Finding the feed-forward block behind an attention block from the tensors that one forward pass shows.

As for attention no family is named. A network is two linear modules, the second of which received an element-wise
function of what the first returned, or such a function times another part of it; experts are a module with stacked maps
that reproduce its output. The network must have read the end of the attention block, or its norm, and what it wrote, or
its norm, added to that end must be what the layer goes on with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations, product

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.functional import Elementwise, written_by
from captum_norm.models.blocks import Block, sum_of
from captum_norm.models.feed_forward import (
    DenseReader,
    End,
    ExpertsReader,
    FeedForwardBlock,
    FeedForwardLayout,
    Gating,
    Routing,
    registered_feed_forwards,
)
from captum_norm.models.layouts import Site
from captum_norm.models.parameters import (
    NormReader,
    Projection,
    Same,
    accumulation_dtype,
    equal,
    read_norm,
    read_projection,
    reproduces,
)
from captum_norm.models.tracing import Call, Trace

KNOWN: tuple[Elementwise, ...] = (
    nn.functional.relu,
    nn.functional.gelu,
    partial(nn.functional.gelu, approximate="tanh"),
    nn.functional.silu,
    nn.functional.sigmoid,
    torch.tanh,
    lambda z: nn.functional.relu(z).square(),
    lambda z: z * torch.sigmoid(1.702 * z),
)
"""Activations that a model may apply without a module."""

HOW_TO = (
    "Declare it with captum_norm.models.register_feed_forward if it is one network whose maps are linear modules; see "
    '"Describe a new model" in the documentation. The scopes up to atb need none'
)
CROSSED = (
    "cross-attention follows, not a feed-forward network; in such a layer the feed-forward scopes are those of "
    'cross-attention: stacks=["cross"]'
)


@dataclass
class _Pending:
    """An attention block whose feed-forward block was not found yet.

    Attributes:
        block: the attention block.
        stream: what its feed-forward network reads, or reads a norm of.
        written: in a parallel layer what the network gives.
        seen: what was found so far, for the message.
    """

    block: Block
    stream: Tensor
    written: Tensor | None
    seen: str = "nothing"


@dataclass
class FeedForwardSearch:
    """Looks for the feed-forward block behind each attention block while a forward pass goes on.

    Attributes:
        found: the blocks, by attention module.
        missing: why there is none, by attention module.
    """

    found: dict[nn.Module, FeedForwardBlock] = field(default_factory=dict)
    missing: dict[nn.Module, str] = field(default_factory=dict)
    _pending: list[_Pending] = field(default_factory=list)
    _attended: list[tuple[nn.Module, bool]] = field(default_factory=list)
    _routings: dict[nn.Module, Routing] = field(default_factory=dict)

    def expect(self, block: Block, trace: Trace) -> None:
        """An attention block was found."""
        layout = block.layout
        end = layout.total if layout.final_norm is None else Site(layout.final_norm, "output")
        stream = trace.at(end if layout.minus is None else layout.residual)
        written = None if layout.minus is None else trace.at(layout.minus)
        if stream is not None:
            self._pending.append(_Pending(block, stream, written))

    def routed(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """A module with stacked parameters receives these tensors."""
        routing = routing_of(tensors)
        if routing is not None:
            self._routings[module] = routing

    def waits_for(self, module: nn.Module) -> bool:
        """Whether a block inside a module still lacks its feed-forward block."""
        inside = set(module.modules())
        return any(pending.block.attention in inside for pending in self._pending)

    @property
    def waiting(self) -> bool:
        """Whether any block still lacks its feed-forward block."""
        return bool(self._pending)

    def look(self, trace: Trace) -> None:
        """A module around some attention blocks has ended."""
        inside = set(trace.layer.modules())
        for pending in [pending for pending in self._pending if pending.block.attention in inside]:
            found = self._find(trace, pending)
            if found is not None:
                self.found[pending.block.attention] = found
                self._pending.remove(pending)

    def attention_begins(self, module: nn.Module, *, cross: bool) -> None:
        """A module calls attention; what it follows is not understood if it was not by now."""
        self._attended.append((module, cross))
        self.give_up()

    def give_up(self) -> None:
        """Say why for the blocks whose feed-forward block was not found."""
        for pending in self._pending:
            attention = pending.block.attention
            place = next(place for place, (module, _) in enumerate(self._attended) if module is attention)
            crossed = any(cross for _, cross in self._attended[place + 1 : place + 2])
            why = CROSSED if crossed else f"no feed-forward network was understood. Found: {pending.seen}. {HOW_TO}"
            self.missing[attention] = f'behind the attention block "{pending.block.name}" {why}'
        self._pending.clear()

    def _find(self, trace: Trace, pending: _Pending) -> FeedForwardBlock | None:
        declared = registered_feed_forwards().get(type(trace.layer).__name__)
        # As for attention, sums that are met to the last bit go first.
        found = (block for same in (equal, reproduces) for block in self._candidates(trace, pending, declared, same))
        block = next(found, None)
        if block is None and declared is not None:
            raise UnsupportedModelError(
                f"the feed-forward layout of {type(trace.layer).__name__} does not hold around "
                f'"{pending.block.name}": its equations do not give what the layer computed; see "Describe a new '
                'model" in the documentation'
            )
        return block

    def _candidates(
        self, trace: Trace, pending: _Pending, declared: FeedForwardLayout | None, same: Same
    ) -> Iterator[FeedForwardBlock]:
        named = _Named(trace, declared)
        for norm, read in _reads(trace, pending.stream, named):
            inner = [call for call in trace.calls_on(read) if read_projection(call.module, call.inputs, call.output)]
            if inner:
                pending.seen = f"linear maps {[trace.name(call.module) for call in inner]} of its output"
            for dense, experts, written, event in self._networks(trace, read, inner, named, same):
                if pending.written is not None and not equal(written, pending.written):
                    continue
                for branch_norm, branch in _branches(trace, written, named):
                    end = _end(trace, pending, branch, named, same)
                    if end is not None:
                        parallel = pending.written is not None
                        total, final_norm = end
                        yield FeedForwardBlock(
                            dense, experts, event, total, norm, branch_norm, final_norm, parallel, read.shape[-1]
                        )

    def _networks(
        self, trace: Trace, read: Tensor, inner: Sequence[Call], named: "_Named", same: Same
    ) -> Iterator[tuple[tuple[DenseReader, ...], ExpertsReader | None, Tensor, End]]:
        """Networks that read a tensor, what they wrote together, and where that is seen."""
        dense = list(_dense(trace, read, inner, named))
        for call in trace.calls_on(read) if named.layout is None else ():
            routing = self._routings.get(call.module)
            experts = None if routing is None else _experts(call, routing)
            if experts is None:
                continue
            for reader, shared in dense:
                for gate, output in _gated(trace, read, shared.output):
                    total = sum_of(call.output, output)
                    for other in trace.calls:
                        if same(total, other.output, call.output, output):
                            readers = (replace(reader, gate=gate),)
                            yield readers, experts, other.output, End(other.module, "output")
            yield (), experts, call.output, End(call.module, "output")
        for reader, call in dense:
            yield (reader,), None, call.output, End(call.module, "output")


@dataclass(frozen=True)
class _Named:
    """Which modules may have a part: those that a declaration names, or any."""

    trace: Trace
    layout: FeedForwardLayout | None

    def allows(self, part: str, module: nn.Module | None) -> bool:
        """Whether a module (None for none) may be a part."""
        if self.layout is None:
            return True
        name = getattr(self.layout, part)
        return name is None if module is None else self.trace.name(module) == name

    def allows_inner(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these may be the maps into the neurons."""
        return self.layout is None or {self.trace.name(module) for module in modules} == set(self.layout.inner)

    def allows_total(self, site: Site) -> bool:
        """Whether the sum may be here."""
        return self.layout is None or site == self.layout.total


def routing_of(tensors: Sequence[Tensor]) -> Routing | None:
    """The routing among what a module receives: indices and coefficients, (N, n) each."""
    tables = [tensor for tensor in tensors if tensor.dim() == 2]
    indices = [tensor for tensor in tables if not tensor.is_floating_point() and tensor.dtype != torch.bool]
    for index in indices:
        for coefficients in tables:
            if coefficients.is_floating_point() and coefficients.shape == index.shape:
                return Routing(index, coefficients)
    return None


def _reads(trace: Trace, stream: Tensor, named: _Named) -> Iterator[tuple[NormReader | None, Tensor]]:
    """The stream and its norms."""
    if named.allows("norm", None):
        yield None, stream
    for call in trace.calls_on(stream):
        norm = read_norm(call.module, call.inputs, call.output)
        if norm is not None and named.allows("norm", call.module):
            yield norm, call.output


def _branches(trace: Trace, written: Tensor, named: _Named) -> Iterator[tuple[NormReader | None, Tensor]]:
    """The norms of what was written, which rounding may hide behind the stream, and what was written itself."""
    for call in trace.calls_on(written):
        norm = read_norm(call.module, call.inputs, call.output)
        if norm is not None and named.allows("branch_norm", call.module):
            yield norm, call.output
    if named.allows("branch_norm", None):
        yield None, written


def _end(
    trace: Trace, pending: _Pending, branch: Tensor, named: _Named, same: Same
) -> tuple[End, NormReader | None] | None:
    """Where the sum with the stream is seen and the norm on it, if the layer goes on with them."""
    if pending.written is not None:
        block = pending.block
        return End(block.layer.get_submodule(block.layout.total.module), block.layout.total.end), None
    output, total = trace.at(Site("", "output")), sum_of(pending.stream, branch)
    if output is None:
        return None
    for event in trace.events:
        summed = event.tensor
        if not trace.is_unique(event) or not same(total, summed, pending.stream, branch):
            continue
        if not named.allows_total(trace.site(event)):
            continue
        if equal(summed, output) and named.allows("final_norm", None):
            return End(event.module, event.end), None
        for call in trace.calls_on(summed):
            if equal(call.output, output) and named.allows("final_norm", call.module):
                norm = read_norm(call.module, call.inputs, call.output)
                if norm is not None:
                    return End(event.module, event.end), norm
    return None


def _dense(trace: Trace, read: Tensor, inner: Sequence[Call], named: _Named) -> Iterator[tuple[DenseReader, Call]]:
    """Networks that read a tensor."""
    for outer in trace.calls:
        if outer.output.numel() != read.numel() or outer in inner or not named.allows("outer", outer.module):
            continue
        for chosen, gating in _gatings(trace, inner, outer.inputs, named):
            projections = [read_projection(call.module, call.inputs, call.output) for call in (*chosen, outer)]
            *into, out = [projection for projection in projections if projection is not None]
            if len(into) == len(chosen) and named.allows_inner([call.module for call in chosen]):
                yield DenseReader(tuple(into), out, gating), outer


def _gatings(
    trace: Trace, inner: Sequence[Call], hidden: Tensor, named: _Named
) -> Iterator[tuple[tuple[Call, ...], Gating]]:
    """How the neurons' output follows from one or two of the inner maps."""
    width = hidden.shape[-1]
    for count in (1, 2):
        for chosen in permutations(inner, count):
            outputs = [call.output for call in chosen]
            for cuts in _cuts(outputs[0].shape[-1], width) if count == 1 else ((),):
                factors = [outputs[0][..., cut] for cut in cuts] or outputs
                if all(factor.shape[-1] == width and factor.numel() == hidden.numel() for factor in factors):
                    functions = _functions(trace, factors[0], named)
                    matching = next((g for g in functions if _gives(g, None, factors, hidden)), None)
                    if matching is not None:
                        yield chosen, Gating(matching, cuts=cuts)


def _cuts(outputs: int, width: int) -> list[tuple[slice, ...]]:
    """The ways in which the outputs of one map may be those of one factor or two, the gate's first."""
    if outputs == width:
        return [()]
    if outputs != 2 * width:
        return []
    halves = slice(0, width), slice(width, None)
    interleaved = slice(0, None, 2), slice(1, None, 2)
    return [order for pair in (halves, interleaved) for order in (pair, pair[::-1])]


def _functions(trace: Trace, point: Tensor, named: _Named) -> Iterator[Elementwise]:
    """The modules that were called on a tensor, and the functions that a model may use instead."""
    for call in trace.calls_on(point):
        if call.output.shape == call.inputs.shape and named.allows("activation", call.module):
            yield call.module.forward
    if named.allows("activation", None):
        yield from KNOWN


def _gives(activation: Elementwise, factor: Elementwise | None, factors: Sequence[Tensor], hidden: Tensor) -> bool:
    """Whether g(u), or g(u) h(w), is what the neurons gave, and g element-wise."""
    with torch.no_grad():
        computed = activation(factors[0])
        for other in factors[1:]:
            computed = computed * (other if factor is None else factor(other))
        return reproduces(computed, hidden) and _is_elementwise(activation, factors[0])


def _is_elementwise(function: Elementwise, point: Tensor) -> bool:
    """Whether a neuron's output does not depend on the others: half of them are changed and the rest must stay."""
    changed = point.clone()
    changed[..., ::2] = 1 - changed[..., ::2]
    before, after = function(point), function(changed)
    return before.shape == point.shape and reproduces(after[..., 1::2], before[..., 1::2])


def _gated(trace: Trace, read: Tensor, output: Tensor) -> Iterator[tuple[Projection | None, Tensor]]:
    """A shared expert's output, by itself and times the sigmoid of a number for each position."""
    yield None, output
    for call in trace.calls_on(read):
        if call.output.shape[-1] == 1:
            gate = read_projection(call.module, call.inputs, call.output)
            if gate is not None:
                yield gate, output * call.output.reshape(*output.shape[:-1], 1).sigmoid()


def _experts(call: Call, routing: Routing) -> ExpertsReader | None:
    """The experts of a module with stacked maps, if they reproduce its output."""
    module, width = call.module, call.inputs.shape[-1]
    own = dict(module.named_parameters(recurse=False))
    stacked = [name for name, parameter in own.items() if parameter.dim() == 3]
    biases = [name for name, parameter in own.items() if parameter.dim() == 2]
    for (inner, outer), transposed in product(permutations(stacked, 2), (True, False)):
        into, out = (own[name].mT if transposed else own[name] for name in (inner, outer))
        if into.shape[1] != width or out.shape[2] != width:
            continue
        inner_bias = next((name for name in biases if own[name].shape[1] == into.shape[2]), None)
        outer_bias = next((name for name in biases if own[name].shape[1] == width and name != inner_bias), None)
        for cuts in _cuts(into.shape[2], out.shape[1]):
            for activation, factor in _expert_functions(module):
                gating = Gating(activation, factor, cuts)
                reader = ExpertsReader(module, inner, outer, inner_bias, outer_bias, transposed, gating)
                if _reproduces_experts(reader, routing, call):
                    return reader
    return None


def _expert_functions(module: nn.Module) -> Iterator[tuple[Elementwise, Elementwise | None]]:
    """What may be between experts' maps: modules inside, clamped factors as in GPT-OSS, known functions."""
    for child in module.children():
        yield child.forward, None
    limit, sharpness = getattr(module, "limit", None), getattr(module, "alpha", None)
    if isinstance(limit, (int, float)) and isinstance(sharpness, (int, float)):
        yield partial(_clamped_gate, limit=limit, sharpness=sharpness), partial(_clamped_factor, limit=limit)
    for function in KNOWN:
        yield function, None


def _clamped_gate(gate: Tensor, limit: float, sharpness: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(sharpness * gate)


def _clamped_factor(other: Tensor, limit: float) -> Tensor:
    return other.clamp(-limit, limit) + 1


def _reproduces_experts(reader: ExpertsReader, routing: Routing, call: Call) -> bool:
    inputs = call.inputs.reshape(-1, call.inputs.shape[-1]).to(accumulation_dtype(call.inputs.dtype))
    with torch.no_grad():
        uses = list(reader.uses(routing, inputs.dtype))
        computed = written_by(uses, inputs)
    return reproduces(computed, call.output, computed) and all(
        _is_elementwise(use.network.activation, use.network.inner[0].whole(inputs)) for use in uses[:1]
    )
