"""Finds the parts of a model's attention blocks from the tensors of one forward pass.

No model family is named here. The output projection is the module that receives attention's output. The residual stream
is the tensor that, added to the projection's output or to its norm, gives a tensor that the layer continues with; the
layer's own output must follow from that sum. The smallest module in which all this holds is the layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.affinity import affinity, kind_of, may_be_affine
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block, bind, sum_of
from captum_norm.models.factors import UNFACTORED, Factors, layer_scales, multiplied, possible_factors, with_scales
from captum_norm.models.hooks import first_tensor, hooked, is_observed
from captum_norm.models.inputs import ModelCall
from captum_norm.models.layouts import Layout, Site, registered_layouts
from captum_norm.models.libraries.replaced_forward import not_compared
from captum_norm.models.projections import Same, equal, reproduces
from captum_norm.models.search.feed_forward_blocks import FeedForwardSearch
from captum_norm.models.search.gates import gated_projections
from captum_norm.models.search.sums import Sketch, Sketches, sketch
from captum_norm.models.search.trace import Event, ModuleCall, Trace
from captum_norm.models.stacks import Stacks
from captum_norm.models.wrappers import class_of

HOW_TO = 'Declare the layer with captum_norm.models.register_layout: see "Describe a new model" in the documentation'

RANDOMIZED = (nn.Linear, Conv1D, nn.Embedding, nn.Conv2d)
"""The modules whose outputs are replaced by random numbers during the search."""


class _OpenCall(NamedTuple):
    """A call of attention whose block is not found yet.

    Attributes:
        module: the module that attends.
        context: attention's output, (B, Q, H·d).
        order: the number of events before it.
    """

    module: nn.Module
    context: Tensor
    order: int


class _NotProjectedError(UnsupportedModelError):
    """No affine map receives attention's output as it is."""


CROWDED = 4
"""With more open calls of attention than a layer has, the first that is not understood ends the search in a module."""
REACH = 512
"""How many tensors after a sum the next sum is searched among."""
NEXT = 32
"""Among the outputs of how many modules two are searched whose sum is added."""


@dataclass
class _Probe:
    """Watches all modules during one forward pass and finds each layer's block when the layer returns.

    Random numbers replace the outputs of embeddings and affine maps, so no equation holds by accident: no summand is
    negligible beside another, no activation is seen only near 0, and no two tensors are equal unless the model's code
    makes them so. The largest modules that are affine count as one map each, whatever they consist of.
    """

    model: nn.Module
    stacks: Stacks
    names: dict[nn.Module, str]
    feed_forwards: FeedForwardSearch | None
    gated: Mapping[nn.Module, nn.Module]
    blocks: dict[nn.Module, Block] = field(default_factory=dict)
    crossing: set[nn.Module] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    entered: list[tuple[int, Tensor | None]] = field(default_factory=list)
    affine: nn.Module | None = None
    kinds: dict[str, bool] = field(default_factory=dict)
    open_calls: list[_OpenCall] = field(default_factory=list)
    last_trace: Trace | None = None
    device: torch.device | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def attention(self, call: AttentionCall) -> Tensor:
        if not is_observed():
            raise RuntimeError("attention is not affine")
        if self.feed_forwards is not None:
            self.feed_forwards.attention_begins(call.module, cross=call.cross)
        output, _ = self.stacks.attend(call)
        if call.cross:
            self.crossing.add(call.module)
        if call.module not in self.blocks:
            context = output.to(self._device_for(output)).flatten(2)
            self.open_calls.append(_OpenCall(call.module, context, len(self.events)))
        return output

    def hooks(self) -> Iterator[Any]:
        """Yield hooks for the input and the output of every module."""
        for module in self.names:
            yield module, "input", self.enter
            yield module, "result", self.leave
            if self.feed_forwards is not None and any(p.dim() == 3 for p in module.parameters(recurse=False)):
                yield module, "arguments", self.feed_forwards.routed

    def enter(self, module: nn.Module, tensor: Tensor | None) -> None:
        if self.affine is not None:
            return
        self.entered.append((len(self.events), self._note(module, "input", tensor)))
        if tensor is not None and may_be_affine(module):
            # Whatever is read as a projection is tested by itself.
            kind = kind_of(module)
            if kind not in self.kinds:
                self.kinds[kind] = affinity(module, tensor) is not None
            self.affine = module if self.kinds[kind] else None

    def leave(self, module: nn.Module, result: Any) -> Tensor | None:
        if self.affine not in (None, module):
            return None
        (start, received), tensor, chosen = self.entered.pop(), first_tensor(result), None
        if tensor is not None and tensor is result and (module is self.affine or isinstance(module, RANDOMIZED)):
            chosen = torch.randn(tensor.shape, generator=self.generator, device="cpu").to(tensor)
        self.affine = None
        self._note(module, "output", tensor if chosen is None else chosen, received, None if chosen is None else tensor)
        inside = [call for call in self.open_calls if call.order >= start]
        feed_forwards = self.feed_forwards
        if inside or (feed_forwards is not None and feed_forwards.waits_for(module)):
            trace = Trace(self.names[module], module, self.events[start:])
            for call in inside:
                block = self._settle(trace, call, start)
                if block is not None:
                    block = replace(block, cross=call.module in self.crossing)
                    self.blocks[call.module] = block
                    self.open_calls.remove(call)
                    if feed_forwards is not None:
                        feed_forwards.expect(block, trace)
                elif len(inside) > CROWDED:
                    break
            self.last_trace = trace
            if feed_forwards is not None:
                feed_forwards.look(trace)
        if not self.open_calls and (feed_forwards is None or not feed_forwards.waiting):
            # Only the module's own input and output still matter, to the layer around it.
            self.events[start:] = [event for event in self.events[start:] if event.site.module is module]
        return chosen

    def _note(
        self,
        module: nn.Module,
        end: Literal["input", "output"],
        tensor: Tensor | None,
        received: Tensor | None = None,
        computed: Tensor | None = None,
    ) -> Tensor | None:
        """Note a tensor, and at the end of a call what the module received and computed; return the copy noted."""
        if tensor is None:
            return None
        device = self._device_for(tensor)
        computed = None if computed is None else computed.to(device, copy=True)
        copy = tensor.to(device, copy=True)
        call = None if received is None else ModuleCall(module, received, copy, computed)
        self.events.append(Event(Site(module, end), copy, tensor, call))
        return copy

    def _device_for(self, tensor: Tensor) -> torch.device:
        """Return the one device on which the tensors of a sharded model are compared."""
        if self.device is None:
            self.device = tensor.device
        return self.device

    def _settle(self, trace: Trace, call: _OpenCall, start: int) -> Block | None:
        declared = registered_layouts().get(class_of(trace.layer).__name__)
        context, gated = call.context, self.gated.get(call.module)
        if gated is not None:
            received = trace.call_of(gated) if gated in trace.layer.modules() else None
            if received is None:
                return None
            context = received.inputs.reshape(context.shape)
        # Sums that the model adds in our order are exact, so these are tried first. In a newly initialised model, whose
        # layers change next to nothing, a comparison up to rounding cannot tell a stream from its norm.
        found = (
            layout
            for same, factored in product((equal, reproduces), (False, True))
            for layout in _candidates(trace, call.module, context, call.order - start, same, factored=factored)
        )
        layout = declared or next(found, None)
        return None if layout is None else replace(bind(trace, layout, call.module, context), gated=gated is not None)


def find_blocks(call: ModelCall, *, feed_forward: bool = False) -> dict[nn.Module, Block]:
    """Find the attention blocks of a model in one forward pass; in three if its attention's output is gated.

    Args:
        call: the model with few and short examples: the structure does not depend on them.
        feed_forward: also find the feed-forward block behind each; where none is found, the attention block says why.

    Returns:
        The blocks by attention module.

    Raises:
        UnsupportedModelError: if no attention was seen, or the parts of a block are not found or do not reproduce the
            layer's output.
    """
    try:
        return _find_blocks(call, {}, feed_forward=feed_forward)
    except _NotProjectedError as error:
        gated = gated_projections(call, RANDOMIZED)
        if not gated:
            raise UnsupportedModelError(str(error)) from None
    return _find_blocks(call, gated, feed_forward=feed_forward)


def _find_blocks(
    call: ModelCall, gated: Mapping[nn.Module, nn.Module], *, feed_forward: bool
) -> dict[nn.Module, Block]:
    """Find blocks; ``gated`` has the projections that receive attention's output gated, by attention module."""
    model = call.model
    unwatched = call.unwatched
    names = {module: name for name, module in model.named_modules() if module not in unwatched}
    search = FeedForwardSearch() if feed_forward else None
    probe = _Probe(model, call.stacks(), names, search, gated)
    with torch.no_grad(), not_compared(), call.attention_through(probe.attention), hooked(probe.hooks()):
        call.run()
    if not probe.stacks.sizes:
        raise UnsupportedModelError(call.unseen)
    if probe.open_calls and probe.last_trace is not None:
        trace, unknown = probe.last_trace, probe.open_calls[0]
        projected = any(True for _ in _projections(trace, unknown.context))
        kind = UnsupportedModelError if projected else _NotProjectedError
        raise kind(_description(probe, trace, unknown))
    if search is None:
        return probe.blocks
    search.give_up()
    return {
        module: replace(block, feed_forward=search.found.get(module), without_feed_forward=search.missing.get(module))
        for module, block in probe.blocks.items()
    }


def _candidates(
    trace: Trace, attention: nn.Module, context: Tensor, order: int, same: Same, *, factored: bool
) -> Iterator[Layout]:
    """Yield the layouts under which the layer's output follows from attention's output, ``context`` (B, Q, H·d)."""
    output = trace.output
    for projection in _projections(trace, context):
        if output is None or output.numel() != projection.output.numel() or equal(projection.output, output):
            continue
        size = output.numel()
        earlier, streams, after = (
            [event for event in events if event.tensor.numel() == size and trace.is_unique(event)]
            for events in (trace.events[:order], trace.events, trace.after(projection))
        )
        before, sketches = _distinct(earlier), [Sketches([event.sketch for event in some]) for some in (streams, after)]
        # If a norm receives attention's output, the layer adds the norm, even where rounding hides the difference.
        branches: list[tuple[str | None, Tensor]] = [
            (trace.name(call.module), call.output)
            for call in trace.calls_on(projection.output)
            if call.norm is not None
        ]
        branches.append((None, projection.output))
        received = trace.call_of(attention)
        held = possible_factors(trace.layer, output.shape[-1]) if factored else [UNFACTORED]
        scales = [scale for _, branch in branches for scale in layer_scales(trace, branch)] if factored else []
        factors = [*held, *with_scales(held, scales)]
        if factored and factors == [UNFACTORED]:
            continue
        for (residual_factor, branch_factor), (branch_norm, branch) in product(factors, branches):
            added = multiplied(branch_factor, branch)
            for stream in before:
                residual = multiplied(residual_factor, stream.tensor)
                end = _end(trace, residual, added, streams, after, sketches, same, held)
                # A residual that is negligible beside attention's output cannot be told from none.
                if end is None or same(sum_of(residual, added), added):
                    continue
                total, minus, final_norm = end
                yield Layout(
                    attention=trace.name(attention),
                    projection=trace.name(projection.module),
                    residual=trace.site(stream),
                    total=total,
                    minus=minus,
                    branch_norm=branch_norm,
                    final_norm=final_norm,
                    normed_input=received is not None and not torch.equal(received.inputs, stream.tensor),
                    branch_factor=None if branch_factor is None else branch_factor.name,
                    residual_factor=None if residual_factor is None else residual_factor.name,
                )


def _projections(trace: Trace, context: Tensor) -> Iterator[ModuleCall]:
    orders = (context,) if 1 in context.shape[:2] else (context, context.transpose(0, 1))
    for received in orders:
        for call in trace.calls_on(received):
            if call.projection is not None:
                yield call


def _end(
    trace: Trace,
    residual: Tensor,
    branch: Tensor,
    streams: list[Event],
    after: list[Event],
    sketches: list[Sketches],
    same: Same,
    factors: list[Factors],
) -> tuple[Site[str], Site[str] | None, str | None] | None:
    """Return where the sum of residual and branch is seen, what else is in it, and the norm behind it, or None."""
    total, together = sum_of(residual, branch), sketch(residual).plus(sketch(branch))
    of_streams, of_after = sketches
    near = (after[place] for place in of_after.near(together))
    sums = [event for event in near if same(total, event.tensor, residual, branch)]
    if sums:
        if _continues(trace, total, after, same, factors):
            return trace.site(sums[0]), None, None
        for call in trace.calls_on(sums[0].tensor):
            normed = call.output if call.norm else None
            if normed is not None and _continues(trace, normed, after, same, factors):
                name = trace.name(call.module)
                return Site(name, "input"), None, name
        return None
    for place in reversed(of_streams.near(sketch(cast(Tensor, trace.output)).plus(together, -1))):
        other = streams[place]
        whole = sum_of(total, other.tensor)
        follows = other.site.end == "output" and same(whole, trace.output, residual, branch, other.tensor)
        if follows and not same(whole, other.tensor):
            return Site("", "output"), trace.site(other), None
    # Beside attention stands another mixer, whose output the same sum holds (Falcon-H1).
    for place, end in of_streams.pairs(together, of_after):
        other, event = streams[place], after[end]
        whole = sum_of(total, other.tensor)
        if event.site.end == "output" or other.site.end == "input" or same(whole, other.tensor):
            continue
        summands = (residual, branch, other.tensor)
        if same(whole, event.tensor, *summands) and _continues(trace, whole, after, same, factors):
            return trace.site(event), trace.site(other), None
    return None


def _continues(trace: Trace, stream: Tensor, after: list[Event], same: Same, factors: list[Factors]) -> bool:
    """Whether the layer's output is the stream, or follows from it by norms and by adding outputs of modules."""
    seen, pending = set[bytes](), [(stream, 0)]
    while pending:
        stream, start = pending.pop()
        if same(stream, trace.output):
            return True
        here = after[start : start + REACH]
        outputs, received = ([event for event in here if event.site.end == end] for end in ("output", "input"))
        places = {event: place for place, event in enumerate(here, start + 1)}
        written = [(event.tensor, event.sketch) for event in outputs] + _together(outputs[:NEXT])
        for residual_factor, factor in factors:
            residual, summands = multiplied(residual_factor, stream), [multiplied(factor, one) for one, _ in written]
            if _adds_to_some(residual, summands, trace.output, same):
                return True
            ends = [sketch(cast(Tensor, trace.output)), *(event.sketch for event in received)]
            of_summands = [own if factor is None else sketch(s) for (_, own), s in zip(written, summands, strict=True)]
            for summand, end in Sketches(of_summands).pairs(sketch(residual), Sketches(ends)):
                total = sum_of(residual, summands[summand])
                reached = trace.output if end == 0 else received[end - 1].tensor
                if not same(total, reached, residual, summands[summand]):
                    continue
                if end == 0:
                    return True
                event = received[end - 1]
                call = trace.call_of(event.site.module)
                for onward in [total] if call is None or call.output.numel() != total.numel() else [total, call.output]:
                    value = sketch(onward).products.numpy().tobytes()
                    if value not in seen:
                        seen.add(value)
                        pending.append((onward, places[event]))
    return False


def _adds_to_some(residual: Tensor, summands: Sequence[Tensor], output: Tensor | None, same: Same) -> bool:
    """Whether a layer adds one of some tensors at some positions and leaves the others, which see no picture, as is."""
    if output is None or output.numel() != residual.numel():
        return False
    output = output.reshape(residual.shape)
    changed = (output != residual).any(-1)
    if changed.all() or not changed.any():
        return False
    stream, whole = residual[changed], output[changed]
    fitting = (added.reshape(residual.shape)[changed] for added in summands if added.numel() == residual.numel())
    return any(same(stream + added, whole, stream, added) for added in fitting)


def _together(outputs: Sequence[Event]) -> list[tuple[Tensor, Sketch]]:
    """Return the sums of the outputs of every two modules that read the same tensor, such as routed and shared experts.

    No module may show these sums before a number multiplies them.
    """
    readers: dict[tuple[float, ...], list[Event]] = {}
    for event in outputs:
        if event.call is not None and event.call.inputs.numel() == event.tensor.numel():
            readers.setdefault(tuple(event.call.inputs.flatten()[:4].tolist()), []).append(event)
    return [
        (sum_of(first.tensor, second.tensor), first.sketch.plus(second.sketch))
        for together in readers.values()
        for first, second in combinations(together, 2)
        if first.call and second.call and equal(first.call.inputs, second.call.inputs)
    ]


def _distinct(events: Sequence[Event]) -> list[Event]:
    """Return the first event of each tensor, and of each value that was written into it."""
    kept: dict[int, list[Event]] = {}
    for event in events:
        same = kept.setdefault(event.source.data_ptr(), [])
        if not any(equal(event.tensor, other.tensor) for other in same):
            same.append(event)
    return [event for same in kept.values() for event in same]


def _description(probe: _Probe, trace: Trace, call: _OpenCall) -> str:
    """Say what was found of the first layer that was not understood, what was not, and what to do."""
    found = f'{type(probe.model).__name__} is not understood: "{probe.names[call.module]}" attends'
    projection = next((one.module for one in _projections(trace, call.context)), None)
    if projection is not None:
        return (
            f'{found} and "{probe.names[projection]}" projects its output, but no sum with a residual stream was found '
            f"from which the layer's output follows. {HOW_TO}"
        )
    received = [one.module for one in trace.calls_on(call.context) if trace.name(one.module)]
    if not received:
        return f"{found}, but no module receives its output. {HOW_TO}"
    return (
        f'{found}, but "{probe.names[received[0]]}" ({type(received[0]).__name__}), which receives its output, is not '
        "affine: merge the adapter (merge_and_unload()), dequantize() the weights, or switch dropout off "
        f"(eval()). {HOW_TO}"
    )
