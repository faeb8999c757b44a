"""Finds where the output of attention goes: its projection, the residual sum, and the layer's output from that.

The residual stream is the tensor that, added to the projection's output or to its norm, gives a tensor that the layer
continues with; the layer's own output must follow from that sum.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from typing import cast

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.blocks import Block, Factor, multiplied
from captum_norm.models.layouts import Layout, Site
from captum_norm.models.projections import NormReader, Same, equal, reproduces
from captum_norm.models.search.feed_forward_blocks import networks_into
from captum_norm.models.search.trace import (
    UNFACTORED,
    Event,
    Factors,
    Trace,
    near,
    possible_factors,
    read_factor,
    sketch,
    sketch_of_sum,
    stacked,
    sum_of,
    sums_with,
    with_scales,
)

End = tuple[Site[str], Event | None, str | None]
"""Where a residual sum is seen, a further summand in it, and the norm on it."""
REACH = 512  # how many tensors after a sum the next sum is searched among
NEXT = 32  # among the outputs of how many modules two are searched whose sum is added


def candidates(
    trace: Trace,
    attention: nn.Module,
    context: Tensor,
    order: int,  # the number of events before attention
    attending: Collection[nn.Module],
    same: Same,
    *,
    factored: bool,  # whether factors multiply the summands
) -> Iterator[Layout]:
    """Yield the layouts under which the layer's output follows from attention's output, ``context`` (B, Q, H·d)."""
    output, is_parallel = trace.output, partial(_is_parallel, trace, attention, order, attending)
    for projection in projections(trace, context):
        if output is None or output.numel() != projection.tensor.numel() or equal(projection.tensor, output):
            continue
        size = output.numel()
        earlier, streams, after = (
            [event for event in events if event.tensor.numel() == size and trace.is_unique(event)]
            for events in (trace.events[:order], trace.events, trace.after(projection))
        )
        before = _distinct(earlier)
        of_streams, of_after = (stacked([event.sketch for event in events]) for events in (streams, after))
        # If a norm receives attention's output, the layer adds the norm, even where rounding hides the difference.
        branches: list[tuple[str | None, Tensor]] = [
            (trace.name(call.module), call.tensor) for _, call in trace.norms_of(projection.tensor)
        ]
        branches.append((None, projection.tensor))
        received = trace.call_of(attention)
        held = possible_factors(trace.layer, output.shape[-1]) if factored else [UNFACTORED]
        scales = [scale for _, branch in branches for scale in trace.layer_scales(branch)] if factored else []
        factors = [*held, *with_scales(held, scales)]
        if factored and factors == [UNFACTORED]:
            continue
        # Two summands are tried before three: if the stream is itself a sum, an equation of three holds, too.
        for parallel, (residual_factor, branch_factor), (branch_norm, branch) in product(
            (False, True), factors, branches
        ):
            added = multiplied(branch_factor, branch)
            for stream in before:
                residual = multiplied(residual_factor, stream.tensor)
                end: End | None
                if parallel:
                    others = _third_summands(trace, residual, added, streams, of_streams, same)
                    ends = ((total, other, None) for total, other in others if is_parallel(other, stream.tensor))
                    end = next(ends, None)
                else:
                    end = _end(trace, residual, added, after, of_after, same, held)
                # A summand that is negligible beside the other cannot be told from none.
                if end is None or any(same(sum_of(residual, added), part) for part in (residual, added)):
                    continue
                total, other, final_norm = end
                yield Layout(
                    attention=trace.name(attention),
                    projection=trace.name(projection.module),
                    residual=trace.site(stream),
                    total=total,
                    minus=None if other is None else trace.site(other),
                    branch_norm=branch_norm,
                    final_norm=final_norm,
                    normed_input=received is not None and not torch.equal(received.inputs, stream.tensor),
                    branch_factor=None if branch_factor is None else branch_factor.name,
                    residual_factor=None if residual_factor is None else residual_factor.name,
                )


def projections(trace: Trace, context: Tensor) -> Iterator[Event]:
    """Yield the calls of affine maps that receive attention's output, ``context`` (B, Q, H·d), as it is."""
    orders = (context,) if 1 in context.shape[:2] else (context, context.transpose(0, 1))
    for received in orders:
        for call in trace.calls_on(received):
            if call.projection is not None:
                yield call


def _end(
    trace: Trace,
    residual: Tensor,
    branch: Tensor,
    after: list[Event],
    of_after: Tensor,
    same: Same,
    factors: list[Factors],
) -> End | None:
    """Return where the sum of residual and branch is seen and the norm behind it, if the layer continues with it."""
    total = sum_of(residual, branch)
    places = near(of_after, sketch_of_sum(sketch(residual), sketch(branch)))
    sums = [after[place] for place in places if same(total, after[place].tensor, residual, branch)]
    if not sums:
        return None
    # What attention adds once more is no part of what follows.
    later = [event for event in after if not equal(event.tensor, branch)]
    if _continues(trace, total, later, same, factors):
        return trace.site(sums[0]), None, None
    for _, call in trace.norms_of(sums[0].tensor):
        if _continues(trace, call.tensor, later, same, factors):
            name = trace.name(call.module)
            return Site(name, "input"), None, name
    return None


def _third_summands(
    trace: Trace, residual: Tensor, branch: Tensor, streams: list[Event], of_streams: Tensor, same: Same
) -> Iterator[tuple[Site[str], Event]]:
    """Yield the layer's output and what it holds beside the sum of residual and branch, from the last to the first."""
    total, of_total = sum_of(residual, branch), sketch_of_sum(sketch(residual), sketch(branch))
    for place in reversed(near(of_streams, sketch_of_sum(sketch(cast(Tensor, trace.output)), of_total, -1))):
        other = streams[place]
        of_three = sum_of(total, other.tensor)
        follows = other.site.end == "output" and same(of_three, trace.output, residual, branch, other.tensor)
        if follows and not same(of_three, other.tensor):
            yield Site("", "output"), other


def _is_parallel(
    trace: Trace, attention: nn.Module, order: int, attending: Collection[nn.Module], other: Event, stream: Tensor
) -> bool:
    """Whether the third summand is a parallel branch: a function of the stream alone, on which attention has no say."""
    # If it depends on attention, it carries a part of what attention adds: a second projection, an adapter. If
    # attention depends on it, it is a part of the stream that attention's output is added to.
    read = [stream, *(call.tensor for _, call in trace.norms_of(stream))]
    if any(event.is_call and equal(event.tensor, other.tensor) for event in trace.events[:order]):
        # It came before attention, which must read the stream or a norm; unknown if the layer itself attends.
        received = None if attention is trace.layer else trace.call_of(attention)
        if received is None or not any(equal(received.inputs, tensor) for tensor in read):
            return False
    inner = [[call for call in trace.calls_on(tensor) if call.projection] for tensor in read]
    # Modules, none of which attends, must compute it one after the other from the stream or its norm.
    pending, seen = [other.tensor], set[Event]()
    while pending:
        target = pending.pop()
        for call in trace.calls:
            if call in seen or not equal(call.tensor, target):
                continue
            if any(inside in attending for inside in call.module.modules()):
                continue
            if any(equal(call.inputs, tensor) for tensor in read):
                return True
            # The second map of a network on the stream, whose activation may be no module.
            if any(True for maps in inner for _ in networks_into(trace, call, maps)):
                return True
            seen.add(call)
            pending.append(call.inputs)
    return False


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
        written = [(event.tensor, event.sketch) for event in outputs] + _sums_of_two(outputs[:NEXT])
        for residual_factor, factor in factors:
            residual, summands = multiplied(residual_factor, stream), [multiplied(factor, t) for t, _ in written]
            if _adds_to_some(residual, summands, trace.output, same):
                return True
            ends = stacked([sketch(cast(Tensor, trace.output)), *(event.sketch for event in received)])
            of_summands = [
                sketched if factor is None else sketch(s) for (_, sketched), s in zip(written, summands, strict=True)
            ]
            for summand, end in sums_with(sketch(residual), stacked(of_summands), ends):
                total = sum_of(residual, summands[summand])
                reached = trace.output if end == 0 else received[end - 1].tensor
                if not same(total, reached, residual, summands[summand]) or same(total, summands[summand]):
                    continue
                if end == 0:
                    return True
                event = received[end - 1]
                call = trace.call_of(event.site.module)
                for onward in [total, call.tensor] if call is not None and call.norm else [total]:
                    value = sketch(onward).numpy().tobytes()
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
    stream, total = residual[changed], output[changed]
    fitting = (added.reshape(residual.shape)[changed] for added in summands if added.numel() == residual.numel())
    return any(same(stream + added, total, stream, added) and not same(stream + added, added) for added in fitting)


def _sums_of_two(outputs: Sequence[Event]) -> list[tuple[Tensor, Tensor]]:
    """Return the sums, sketched, of two outputs of modules that read the same, such as routed and shared experts."""
    readers: dict[tuple[float, ...], list[Event]] = {}
    for event in outputs:
        if event.is_call and event.inputs.numel() == event.tensor.numel():
            readers.setdefault(tuple(event.inputs.flatten()[:4].tolist()), []).append(event)
    return [
        (sum_of(first.tensor, second.tensor), sketch_of_sum(first.sketch, second.sketch))
        for together in readers.values()
        for first, second in combinations(together, 2)
        if equal(first.inputs, second.inputs)
    ]


def _distinct(events: Sequence[Event]) -> list[Event]:
    """Return the first event of each tensor, and of each value that was written into it."""
    distinct: dict[int, list[Event]] = {}
    for event in events:
        same = distinct.setdefault(event.source.data_ptr(), [])
        if not any(equal(event.tensor, other.tensor) for other in same):
            same.append(event)
    return [event for same in distinct.values() for event in same]


def bind(trace: Trace, layout: Layout, caller: nn.Module, context: Tensor) -> Block:
    """Read a layout's parts, of attention by ``caller`` to ``context``, (B, Q, H·d), and check its equations."""
    try:
        return _read(trace, layout, caller, context)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f'the {layout.style} layout of {type(trace.layer).__name__} ("{trace.layer_name}") does not hold: {error}; '
            'see "Describe a new model" in the documentation'
        ) from None


def _read(trace: Trace, layout: Layout, caller: nn.Module, context: Tensor) -> Block:
    if _module(trace, layout.attention) is not caller:
        raise UnsupportedModelError(f'attention is called by "{trace.name(caller)}", not by "{layout.attention}"')
    projected = _call(trace, layout.projection)
    projection = projected.projection
    if projection is None:
        raise UnsupportedModelError(f'"{layout.projection}" does not compute input @ weight + bias')
    branch_norm = final_norm = None
    branch = projected.tensor
    if layout.branch_norm is not None:
        branch_norm = _norm(trace, layout.branch_norm, branch)
        branch = _call(trace, layout.branch_norm).tensor
    residual = _tensor(trace, layout.residual)
    residual_factor = _factor(trace, layout.residual_factor, residual)
    branch_factor = _factor(trace, layout.branch_factor, branch)
    summands = [multiplied(residual_factor, residual), multiplied(branch_factor, branch)]
    if layout.minus is not None:
        summands.append(_tensor(trace, layout.minus))
    total = _tensor(trace, layout.total)
    if any(part.numel() != total.numel() for part in summands) or not reproduces(sum_of(*summands), total, *summands):
        raise UnsupportedModelError(f'"{layout.total}" is not the sum of "{layout.residual}" and the attention output')
    if layout.final_norm is not None:
        final_norm = _norm(trace, layout.final_norm, total)
    return Block(
        name=trace.layer_name,
        layer=trace.layer,
        layout=layout,
        attention=caller,
        projection=projection,
        residual=layout.residual.inside(trace.layer),
        total=layout.total.inside(trace.layer),
        minus=None if layout.minus is None else layout.minus.inside(trace.layer),
        branch_norm=branch_norm,
        final_norm=final_norm,
        branch_factor=branch_factor,
        residual_factor=residual_factor,
        queries_first=_is_queries_first(projected.inputs, context),
        overwritten=trace.overwritten,
    )


def _is_queries_first(received: Tensor, context: Tensor) -> bool:
    """Whether the projection, and so all of a block, received attention's output, (B, Q, H·d), as (Q, B, H·d)."""
    straight, swapped = (equal(order, received) for order in (context, context.transpose(0, 1)))
    if straight != swapped:
        return swapped
    batch, queries, _ = context.shape
    return batch != queries and received.shape[:-1] == (queries, batch)


def _module(trace: Trace, part: str) -> nn.Module:
    try:
        return trace.layer.get_submodule(part)
    except AttributeError:
        raise UnsupportedModelError(f'there is no module "{part}"') from None


def _call(trace: Trace, part: str) -> Event:
    call = trace.call_of(_module(trace, part))
    if call is None:
        raise UnsupportedModelError(f'no tensor passed "{part}"')
    return call


def _tensor(trace: Trace, site: Site[str]) -> Tensor:
    tensor = trace.at(site)
    if tensor is None:
        raise UnsupportedModelError(f'no tensor passed "{site}"')
    return tensor


def _factor(trace: Trace, name: str | None, tensor: Tensor) -> Factor | None:
    if name is None:
        return None
    factor = read_factor(trace.layer, name)
    if factor is None or factor.size not in (1, tensor.shape[-1]):
        raise UnsupportedModelError(f'"{name}" is neither a number nor a vector of {tensor.shape[-1]} numbers')
    return factor


def _norm(trace: Trace, part: str, expected: Tensor) -> NormReader:
    call = _call(trace, part)
    if not equal(call.inputs, expected):
        raise UnsupportedModelError(f'"{part}" does not receive the tensor that it should normalise')
    if call.norm is None:
        raise UnsupportedModelError(f'"{part}" does not compute LayerNorm or RMSNorm with its parameters')
    return call.norm
