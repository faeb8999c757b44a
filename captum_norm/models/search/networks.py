"""Finds feed-forward networks: two linear modules with an element-wise function, or a gate, between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
from torch import Tensor, nn

from captum_norm.functional import Elementwise
from captum_norm.models.feed_forward import DenseReader, FeedForwardLayout, Gating
from captum_norm.models.layouts import Site
from captum_norm.models.projections import Projection, read_projection, reproduces
from captum_norm.models.search.trace import Call, Trace

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


@dataclass(frozen=True)
class Named:
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

    def allows_total(self, site: Site[str]) -> bool:
        """Whether the sum may be here."""
        return self.layout is None or site == self.layout.total


def dense_networks(
    trace: Trace, read: Tensor, inner: Sequence[Call], named: Named
) -> Iterator[tuple[DenseReader, Call]]:
    """Networks that read a tensor."""
    for outer in trace.calls:
        if outer.output.numel() != read.numel() or outer in inner or not named.allows("outer", outer.module):
            continue
        for chosen, gating in _gatings(trace, inner, outer.inputs, named):
            projections = [read_projection(call.module, call.inputs, call.own) for call in (*chosen, outer)]
            *into, out = [projection for projection in projections if projection is not None]
            if len(into) == len(chosen) and named.allows_inner([call.module for call in chosen]):
                yield DenseReader(tuple(into), out, gating), outer


def _gatings(
    trace: Trace, inner: Sequence[Call], hidden: Tensor, named: Named
) -> Iterator[tuple[tuple[Call, ...], Gating]]:
    """How the neurons' output follows from one or two of the inner maps."""
    width = hidden.shape[-1]
    for count in (1, 2):
        for chosen in permutations(inner, count):
            outputs = [call.output for call in chosen]
            for cuts in cuts_of(outputs[0].shape[-1], width) if count == 1 else ((),):
                factors = [outputs[0][..., cut] for cut in cuts] or outputs
                if all(factor.shape[-1] == width and factor.numel() == hidden.numel() for factor in factors):
                    functions = [g for g in _functions(trace, factors[0], named) if _gives(g, factors, hidden)]
                    if functions:
                        # In half precision several round to what was seen.
                        nearest = min(functions, key=lambda g: _error(g, factors, hidden))
                        yield chosen, Gating(nearest, cuts=cuts)


def cuts_of(outputs: int, width: int) -> list[tuple[slice, ...]]:
    """The ways in which the outputs of one map may be those of one factor or two, the gate's first."""
    if outputs == width:
        return [()]
    if outputs != 2 * width:
        return []
    halves = slice(0, width), slice(width, None)
    interleaved = slice(0, None, 2), slice(1, None, 2)
    return [order for pair in (halves, interleaved) for order in (pair, pair[::-1])]


def _functions(trace: Trace, point: Tensor, named: Named) -> Iterator[Elementwise]:
    """The modules that were called on a tensor, and the functions that a model may use instead."""
    for call in trace.calls_on(point):
        # A module around others may receive the same numbers where all are zero, and takes more than these.
        single = not any(True for _ in call.module.children())
        if single and call.output.shape == call.inputs.shape and named.allows("activation", call.module):
            yield call.module.forward
    if named.allows("activation", None):
        yield from KNOWN


def _gives(activation: Elementwise, factors: Sequence[Tensor], hidden: Tensor) -> bool:
    """Whether g(u), or g(u) w, is what the neurons gave, and g element-wise."""
    with torch.no_grad():
        return reproduces(_neurons(activation, factors), hidden) and is_elementwise(activation, factors[0])


def _error(activation: Elementwise, factors: Sequence[Tensor], hidden: Tensor) -> float:
    """How far g(u), or g(u) w, is from what the neurons gave."""
    with torch.no_grad():
        return float((_neurons(activation, factors).double() - hidden.double().reshape(factors[0].shape)).norm())


def _neurons(activation: Elementwise, factors: Sequence[Tensor]) -> Tensor:
    neurons = activation(factors[0])
    for other in factors[1:]:
        neurons = neurons * other
    return neurons


def is_elementwise(function: Elementwise, point: Tensor) -> bool:
    """Whether a neuron's output does not depend on the others: half of them are changed and the rest must stay."""
    changed = point.clone()
    changed[..., ::2] = 1 - changed[..., ::2]
    before, after = function(point), function(changed)
    return before.shape == point.shape and reproduces(after[..., 1::2], before[..., 1::2])


def gated(trace: Trace, read: Tensor, output: Tensor) -> Iterator[tuple[Projection | None, Tensor]]:
    """A shared expert's output, by itself and times the sigmoid of a number for each position."""
    yield None, output
    for call in trace.calls_on(read):
        if call.output.shape[-1] == 1:
            gate = read_projection(call.module, call.inputs, call.own)
            if gate is not None:
                yield gate, output * call.output.reshape(*output.shape[:-1], 1).sigmoid()
