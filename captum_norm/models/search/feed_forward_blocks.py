"""Finds the feed-forward block behind an attention block from the tensors of one forward pass.

A network is two linear modules of which the second receives an element-wise function of the first's output, possibly
gated; experts are a module whose stacked maps reproduce its output. It must read the attention block's output, or its
norm. What it writes, or the norm of that, is added to the block's output, and the layer must continue with the sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from operator import itemgetter

import torch
from torch import Tensor, nn

from captum_norm.functional.feed_forward import Elementwise, neuron_outputs
from captum_norm.models import networks
from captum_norm.models.blocks import Block, FeedForwardBlock, multiplied
from captum_norm.models.hooks import Received
from captum_norm.models.layouts import Site
from captum_norm.models.projections import NormReader, Projection, Same, equal, reproduces
from captum_norm.models.search.trace import UNFACTORED, Event, Factors, Trace, possible_factors, sum_of, with_scales

HOW_TO = 'See "Describe a new model" in the documentation; the scopes up to atb need none'
CROSSED = (
    "cross-attention follows, not a feed-forward network; in such a layer the feed-forward scopes are those of "
    'cross-attention: stacks=["cross"]'
)
FACTORED = (
    'beside the attention block "{}" a feed-forward network reads a residual stream that "{}" multiplies in the sum; '
    "feed-forward scopes are not supported there"
)


class FeedForwardSearch:
    """Searches for the feed-forward block behind each attention block during a forward pass, if asked to."""

    def __init__(self, asked: bool, reason: str | None) -> None:
        self.blocks: dict[nn.Module, FeedForwardBlock] = {}  # by attention module
        self.missing: dict[nn.Module, str] = {}  # why none was found
        # Blocks without theirs so far, the stream that it reads, and in a parallel layer what it writes.
        self.waiting: dict[nn.Module, tuple[Block, Tensor, Tensor | None]] = {}
        self._asked, self._reason = asked, reason
        self._seen: dict[nn.Module, str] = {}
        self._behind: dict[nn.Module, str] = {}  # what follows a network that was found
        self._attended: list[tuple[nn.Module, bool]] = []
        self._routings: dict[nn.Module, tuple[networks.Routing, Received]] = {}

    def expect(self, block: Block, trace: Trace) -> None:
        """Start the search for the feed-forward block behind an attention block."""
        layout = block.layout
        if not self._asked:
            return
        if layout.minus is not None and layout.residual_factor is not None:
            self.missing[block.attention] = FACTORED.format(block.name, layout.residual_factor)
            return
        stream, written = trace.at(layout.end), None if layout.minus is None else trace.at(layout.minus)
        if stream is not None:
            self.waiting[block.attention] = block, stream, written

    def routed(self, module: nn.Module, received: Received) -> None:
        """Note the routing that a module with stacked parameters receives."""
        routing = networks.routing_of(received)
        if routing is not None:
            self._routings[module] = routing, received

    def look(self, trace: Trace) -> None:
        """Search in a module that has just returned."""
        inside = set(trace.layer.modules())
        for attention in [attention for attention in self.waiting if attention in inside]:
            block = self._find(trace, *self.waiting[attention])
            if block is not None:
                self.blocks[attention] = block
                del self.waiting[attention]

    def attention_begins(self, module: nn.Module, *, cross: bool) -> None:
        """Note a call of attention; feed-forward blocks before it that have not been found by now never will be."""
        self._attended.append((module, cross))
        self.give_up()

    def give_up(self) -> None:
        """Note the reason for every attention block whose feed-forward block was not found."""
        for attention, (block, _, _) in self.waiting.items():
            place = next(place for place, (module, _) in enumerate(self._attended) if module is attention)
            crossed = any(cross for _, cross in self._attended[place + 1 : place + 2])
            reason = self._reason or f"found {self._seen.get(attention, 'nothing')}. {HOW_TO}"
            behind = None if self._reason else self._behind.get(attention)
            why = CROSSED if crossed else behind or f"no feed-forward network was understood: {reason}"
            self.missing[attention] = f'behind the attention block "{block.name}" {why}'
        self.waiting.clear()

    def _find(self, trace: Trace, block: Block, stream: Tensor, written: Tensor | None) -> FeedForwardBlock | None:
        # As for attention, try exact sums first.
        candidates = (
            candidate
            for same, factored in product((equal, reproduces), (False, True))
            for candidate in self._candidates(trace, block, stream, written, same, factored=factored)
        )
        return next(candidates, None)

    def _candidates(
        self, trace: Trace, block: Block, stream: Tensor, parallel: Tensor | None, same: Same, *, factored: bool
    ) -> Iterator[FeedForwardBlock]:
        """Yield the blocks that read a stream; in a parallel layer, those that write the tensor ``parallel``."""
        for norm, read in _norms(trace, stream, bare_first=True):
            inner = [call for call in trace.calls_on(read) if call.projection]
            if inner:
                names = [trace.name(call.module) for call in inner]
                self._seen[block.attention] = f"linear maps {names} of its output"
            for dense, experts, written, site in self._networks(trace, read, inner, same):
                if parallel is not None and not equal(written, parallel):
                    continue
                for branch_norm, branch in _norms(trace, written):
                    for factors in _factors(trace, block, branch, factored=factored):
                        residual, added = multiplied(factors[0], stream), multiplied(factors[1], branch)
                        end = _end(trace, residual, added, same) if parallel is None else (block.total, None)
                        # A summand that a factor makes negligible cannot be told from none.
                        vanishing = factored and any(same(sum_of(residual, added), part) for part in (residual, added))
                        if end is None and block.attention not in self._behind:
                            further = _further(trace, residual, added, same)
                            if further is not None:
                                self._behind[block.attention] = further
                        if end is not None and not vanishing:
                            total, final_norm = end
                            yield FeedForwardBlock(
                                dense=dense,
                                experts=experts,
                                written=site,
                                total=total,
                                norm=norm,
                                branch_norm=branch_norm,
                                final_norm=final_norm,
                                branch_factor=factors[1],
                                residual_factor=factors[0],
                                parallel=parallel is not None,
                                width=read.shape[-1],
                                overwritten=trace.overwritten,
                            )

    def _networks(
        self, trace: Trace, read: Tensor, inner: Sequence[Event], same: Same
    ) -> Iterator[tuple[tuple[networks.DenseReader, ...], networks.ExpertsReader | None, Tensor, Site[nn.Module]]]:
        """Yield the networks that read a tensor, their summed output, and where it is seen."""
        dense = [
            (reader, outer)
            for outer in trace.calls
            if outer.tensor.numel() == read.numel() and outer not in inner
            for reader in networks_into(trace, outer, inner)
        ]
        for experts, routed, seen in self._mixtures(trace, read):
            for reader, shared in dense:
                for gate, output in _with_position_gates(trace, read, shared.tensor):
                    total = sum_of(routed, output)
                    for other in trace.calls:
                        if same(total, other.tensor, routed, output):
                            readers = (replace(reader, gate=gate),)
                            yield readers, experts, other.tensor, Site(other.module, "output")
            if seen is not None:
                yield (), experts, routed, seen
        for reader, call in dense:
            yield (reader,), None, call.tensor, Site(call.module, "output")

    def _mixtures(
        self, trace: Trace, read: Tensor
    ) -> Iterator[tuple[networks.ExpertsReader, Tensor, Site[nn.Module] | None]]:
        """Yield the experts that read a tensor, their summed output, and where it is seen, if anywhere."""
        for call in trace.calls_on(read):
            if call.module not in self._routings:
                continue
            routing, received = self._routings[call.module]
            experts = networks.read_experts(call.module, call.inputs, call.tensor, routing, received)
            if experts is not None:
                yield experts, call.tensor, Site(call.module, "output")
        # Experts that each read all positions times their scores; no module returns their sum.
        positions = read.flatten(0, -2)
        for call in trace.calls:
            count = call.inputs.numel() // read.numel()
            if not any(parameter.dim() == 3 for parameter in call.module.parameters(recurse=False)):
                continue
            for scored in trace.calls_on(read):
                if scored.tensor.shape != (len(positions), count):
                    continue
                if equal(positions.repeat(count, 1) * scored.tensor.T.reshape(-1, 1), call.inputs):
                    together, routing = partial(_summed, positions=positions), networks.routing_of_scores(scored.tensor)
                    output, arguments = together(call.tensor), ((call.inputs,), dict[str, object]())
                    of_call = call.module, positions, output, routing, arguments
                    experts = networks.read_experts(*of_call, together=together, scorer=scored.module)
                    if experts is not None:
                        yield experts, output, None


def _summed(output: Tensor, positions: Tensor) -> Tensor:
    """Sum what experts wrote one after the other, each at all positions, (N, D)."""
    return output.reshape(-1, *positions.shape).sum(0)


def _with_position_gates(trace: Trace, read: Tensor, output: Tensor) -> Iterator[tuple[Projection | None, Tensor]]:
    """Yield a shared expert's output alone, and times the sigmoid of one number for each position."""
    yield None, output
    for call in trace.calls_on(read):
        if call.tensor.shape[-1] == 1 and call.projection is not None:
            yield call.projection, output * call.tensor.reshape(*output.shape[:-1], 1).sigmoid()


def _norms(trace: Trace, tensor: Tensor, *, bare_first: bool = False) -> Iterator[tuple[NormReader | None, Tensor]]:
    """Yield a tensor's norms, and before or after them itself: rounding may hide norms behind the stream."""
    if bare_first:
        yield None, tensor
    for norm, call in trace.norms_of(tensor):
        yield norm, call.tensor
    if not bare_first:
        yield None, tensor


def _factors(trace: Trace, block: Block, branch: Tensor, *, factored: bool) -> Iterator[Factors]:
    """Yield what may multiply the stream and the branch: nothing unless ``factored``."""
    if not factored:
        yield UNFACTORED
    else:
        held = possible_factors(trace.layer, branch.shape[-1])
        taken = block.layout.branch_factor
        # In a newly initialised model all layer scales have the same values; that of attention goes last.
        yield from sorted(held[1:], key=lambda factors: factors[1] is not None and factors[1].name == taken)
        yield from with_scales(held, trace.layer_scales(branch))


def _end(
    trace: Trace, residual: Tensor, branch: Tensor, same: Same
) -> tuple[Site[nn.Module], NormReader | None] | None:
    """Return where the sum with the stream is seen and the norm on it, if the layer continues with them."""
    output, total = trace.output, sum_of(residual, branch)
    if output is None:
        return None
    for event in trace.events:
        if not trace.is_unique(event) or not same(total, event.tensor, residual, branch):
            continue
        if equal(event.tensor, output):
            return event.site, None
        for call in trace.calls_on(event.tensor):
            if equal(call.tensor, output) and call.norm is not None:
                return event.site, call.norm
    return None


def _further(trace: Trace, residual: Tensor, branch: Tensor, same: Same) -> str | None:
    """Say which module reads the sum with the stream and which one's output the layer then adds, if any does."""
    output, total = trace.output, sum_of(residual, branch)
    readers = [event for event in trace.events if same(total, event.tensor, residual, branch)]
    if output is None or not readers:
        return None
    reader = trace.name(readers[0].module)
    for added, factors in product(trace.after(readers[0]), possible_factors(trace.layer, output.shape[-1])):
        summands = [multiplied(factors[0], total), multiplied(factors[1], added.tensor)]
        if added.tensor.numel() == output.numel() and same(sum_of(*summands), output, *summands):
            return (
                f'"{reader}" reads the sum with the feed-forward network\'s output, to which the layer adds the output '
                f'of "{trace.name(added.module)}", and no scope names what is between the two'
            )
    return None


def networks_into(trace: Trace, outer: Event, inner: Sequence[Event]) -> Iterator[networks.DenseReader]:
    """Yield the networks of some of the inner maps and of this outer map."""
    for chosen, activation, cuts in _gatings(trace, inner, outer.inputs):
        projections = [call.projection for call in (*chosen, outer)]
        *into, out = [projection for projection in projections if projection is not None]
        if len(into) == len(chosen):
            yield networks.DenseReader(tuple(into), out, activation, cuts)


def _gatings(
    trace: Trace, inner: Sequence[Event], hidden: Tensor
) -> Iterator[tuple[tuple[Event, ...], Elementwise, networks.Cuts]]:
    """Yield the one or two inner maps from whose outputs ``hidden`` follows, with the activation and the cuts."""
    width = hidden.shape[-1]
    for count in (1, 2):
        for chosen in permutations(inner, count):
            outputs = [call.tensor for call in chosen]
            for cuts in networks.cuts_of(outputs[0].shape[-1], width) if count == 1 else ((),):
                factors = [outputs[0][..., cut] for cut in cuts] or outputs
                if all(factor.shape[-1] == width and factor.numel() == hidden.numel() for factor in factors):
                    activation = _activation(trace, factors, hidden)
                    if activation is not None:
                        yield chosen, activation, cuts


def _activation(trace: Trace, factors: Sequence[Tensor], hidden: Tensor) -> Elementwise | None:
    """Return g if the neurons gave g(u), or g(u) ⊙ w: the nearest if half precision does not tell several apart."""
    fitting: list[tuple[float, Elementwise]] = []
    for function in _functions(trace, factors[0]):
        with torch.no_grad():
            computed = neuron_outputs(factors, function)
            if reproduces(computed, hidden) and networks.is_elementwise(function, factors[0]):
                distance = (computed.double() - hidden.double().reshape(computed.shape)).norm()
                fitting.append((float(distance), function))
    return min(fitting, key=itemgetter(0))[1] if fitting else None


def _functions(trace: Trace, point: Tensor) -> Iterator[Elementwise]:
    """Yield the modules that were called on a tensor, and the functions that a model may use instead."""
    for call in trace.calls_on(point):
        # A module with children may receive the same numbers (all zero), but also takes other arguments.
        single = not any(True for _ in call.module.children())
        if single and call.tensor.shape == call.inputs.shape:
            yield call.module.forward
    yield from networks.KNOWN
