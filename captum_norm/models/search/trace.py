"""Holds the tensors that the modules of one layer received and returned, and finds which are sums of others.

Numbers and vectors of the layer may multiply the summands: residual multipliers, layer scales, gates.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from captum_norm.models.blocks import Factor
from captum_norm.models.layouts import Site
from captum_norm.models.projections import NormReader, Projection, equal, read_norm, read_projection

SMALLEST_FACTOR = 1e-4  # numbers no larger than this are an ε, not a factor
DIRECTIONS = 8
_ROUNDINGS = 8  # units in the last place that a sum may differ by; what passes is compared in full

Factors = tuple[Factor | None, Factor | None]
"""What multiplies the residual stream, and what multiplies the summand added to it."""

UNFACTORED: Factors = (None, None)


@dataclass(frozen=True, eq=False)
class Event:
    """A copy of a tensor that a module received, or returned at the end of a call."""

    site: Site[nn.Module]
    tensor: Tensor
    source: Tensor  # the model's own, which it may have changed since
    inputs: Tensor  # what the module received in this call; of a call of attention, the queries
    is_call: bool = False  # whether this is the output of a module that received a tensor
    computed: Tensor | None = None  # what the module itself computed, if the output replaced it

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self.site.module

    @cached_property
    def norm(self) -> NormReader | None:
        """The normalisation that the module computed, if it is one."""
        return read_norm(self.module, self.inputs, self.tensor)

    @cached_property
    def projection(self) -> Projection | None:
        """The affine map that the module computed, if it is one."""
        return None if self.computed is None else read_projection(self.module, self.inputs, self.computed)

    @cached_property
    def sketch(self) -> Tensor:
        """The tensor's random projections, see :func:`sketch`."""
        return sketch(self.tensor)


class Trace:
    """The events inside one layer, in their order."""

    def __init__(self, layer_name: str, layer: nn.Module, events: Sequence[Event]) -> None:
        self.layer_name = layer_name
        self.layer = layer
        self.events = events
        self._modules = dict(layer.named_modules())
        self._names: dict[nn.Module, str] = {module: name for name, module in self._modules.items()}
        self.calls = [event for event in events if event.is_call]
        self._first_calls = {call.module: call for call in reversed(self.calls)}
        self._times_called = Counter(call.module for call in self.calls)

    def site(self, event: Event) -> Site[str]:
        """Return the site of an event by its module's name inside the layer."""
        return Site(self._names[event.site.module], event.site.end)

    def is_unique(self, event: Event) -> bool:
        """Whether the event is the only one at its site; a dropout that a layer uses twice has two."""
        return self._times_called[event.site.module] <= 1

    def name(self, module: nn.Module) -> str:
        """Return the module's name inside the layer."""
        return self._names[module]

    def at(self, site: Site[str]) -> Tensor | None:
        """Return the first tensor at a site, or None."""
        if site.module not in self._modules:
            return None
        resolved = Site(self._modules[site.module], site.end)
        return next((event.tensor for event in self.events if event.site == resolved), None)

    @cached_property
    def overwritten(self) -> frozenset[Site[nn.Module]]:
        """The sites whose tensors the model changed afterwards."""
        return frozenset(
            event.site for event in self.events if not torch.equal(event.tensor, event.source.to(event.tensor.device))
        )

    @cached_property
    def output(self) -> Tensor | None:
        """The layer's output, or None if it returned no tensor."""
        return self.at(Site("", "output"))

    def after(self, call: Event) -> Sequence[Event]:
        """Return the events after the end of a call."""
        return self.events[self.events.index(call) + 1 :]

    def call_of(self, module: nn.Module) -> Event | None:
        """Return the first call of a module, or None."""
        return self._first_calls.get(module)

    def calls_on(self, tensor: Tensor) -> Iterator[Event]:
        """Yield the calls whose input equals ``tensor``."""
        return (call for call in self.calls if equal(call.inputs, tensor))

    def norms_of(self, tensor: Tensor) -> Iterator[tuple[NormReader, Event]]:
        """Yield the normalisations of a tensor and their calls."""
        for call in self.calls_on(tensor):
            if call.norm is not None:
                yield call.norm, call

    def layer_scales(self, branch: Tensor) -> Iterator[Factor]:
        """Yield the parameter of each module that receives ``branch``, (..., D), and has just one."""
        for call in self.calls_on(branch):
            parameters = list(call.module.named_parameters())
            if len(parameters) == 1 and parameters[0][1].shape == branch.shape[-1:]:
                factor = read_factor(self.layer, f"{self.name(call.module)}.{parameters[0][0]}".removeprefix("."))
                if factor is not None:
                    yield factor


def read_factor(layer: nn.Module, name: str) -> Factor | None:
    """Return the factor of that name inside a layer; None unless it is a number or a vector."""
    form: Literal["plain", "gate", "divisor"] = "plain"
    path = name
    if name.startswith("tanh(") and name.endswith(")"):
        form, path = "gate", name[5:-1]
    elif name.startswith("1/"):
        form, path = "divisor", name[2:]
    parent, _, attribute = path.rpartition(".")
    try:
        module = layer.get_submodule(parent)
    except AttributeError:
        return None
    value = getattr(module, attribute, None)
    if isinstance(value, Tensor):
        fits = value.is_floating_point() and value.dim() <= 1 and form != "divisor"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and form != "gate" and not (form == "divisor" and value == 0)
    return Factor(name, module, attribute, form) if fits else None


def possible_factors(layer: nn.Module, width: int) -> list[Factors]:
    """Return the factors that a sum in a layer may have, none first: numbers and vectors (D,) of the layer itself."""
    parameters, buffers = (dict(held(recurse=False)) for held in (layer.named_parameters, layer.named_buffers))
    gates = (f"tanh({name})" for name, parameter in parameters.items() if parameter.numel() == 1)
    divisors = (f"1/{name}" for name, value in vars(layer).items() if isinstance(value, float))
    named = (read_factor(layer, name) for name in (*vars(layer), *parameters, *buffers, *gates, *divisors))
    held = [factor for factor in named if factor is not None and _matters(factor, width)]
    return list(product((None, *held), (None, *held)))


def with_scales(held: Iterable[Factors], scales: Iterable[Factor]) -> Iterator[Factors]:
    """Yield every factor of the residual stream alone, combined with every layer scale of the added summand."""
    return product((residual for residual, added in held if added is None), scales)


def _matters(factor: Factor, width: int) -> bool:
    """Whether a factor fits and can be told from others."""
    # Whole numbers are counts, or change nothing; very small ones are an ε, and leave nothing of what they multiply, as
    # a gate does that is still closed. An offloaded parameter has no value yet.
    stored = factor.stored
    if isinstance(stored, Tensor):
        return stored.numel() in (1, width) and (stored.is_meta or bool(stored.any()))
    return abs(stored) > SMALLEST_FACTOR and not float(stored).is_integer()


def sum_of(first: Tensor, *others: Tensor) -> Tensor:
    """Add tensors with the same number of elements, in the shape of the first."""
    for other in others:
        first = first + other.reshape(first.shape)
    return first


def sketch(tensor: Tensor) -> Tensor:
    """Return products with random directions, a bound of their size, and the machine epsilon, (DIRECTIONS + 2,)."""
    # Products of a sum are sums, so sketches tell which tensors may be sums of others.
    directions, length = _directions(tensor.numel())
    flat = tensor.detach().cpu().double().flatten()
    eps = flat.new_tensor([torch.finfo(tensor.dtype).eps])
    return torch.cat([flat @ directions, (length * flat.norm())[None], eps])


@cache
def _directions(size: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(size, DIRECTIONS, generator=generator, dtype=torch.float64, device="cpu")
    return directions, float(directions.norm(dim=0).max())


def sketch_of_sum(first: Tensor, second: Tensor, factor: int = 1) -> Tensor:
    """Return the sketch of the sum of two sketched tensors, the second times 1 or −1."""
    products = first[:DIRECTIONS] + factor * second[:DIRECTIONS]
    return torch.cat([products, (first[-2] + second[-2])[None], torch.maximum(first[-1], second[-1])[None]])


def stacked(sketches: Sequence[Tensor]) -> Tensor:
    """Stack sketches of tensors with as many elements each, (N, DIRECTIONS + 2)."""
    empty = torch.empty(0, DIRECTIONS + 2, dtype=torch.float64, device="cpu")
    return torch.stack(list(sketches)) if sketches else empty


def near(sketches: Tensor, target: Tensor) -> list[int]:
    """Return the places of the tensors that may equal a tensor up to rounding."""
    error = _ROUNDINGS * torch.maximum(sketches[:, -1], target[-1]) * (sketches[:, -2] + target[-2])
    close = (sketches[:, :DIRECTIONS] - target[:DIRECTIONS]).abs() <= error[:, None]
    places: list[int] = close.all(1).nonzero().flatten().tolist()
    return places


def sums_with(stream: Tensor, summands: Tensor, totals: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (place in ``summands``, place in ``totals``) where the stream plus a summand may equal a total."""
    eps = torch.maximum(torch.maximum(summands[:, -1, None], totals[:, -1]), stream[-1])
    error = _ROUNDINGS * eps * (summands[:, -2, None] + totals[:, -2] + stream[-2])
    close = torch.ones_like(error, dtype=torch.bool)
    for direction in range(DIRECTIONS):
        differences = totals[:, direction] - stream[direction]
        close &= (summands[:, None, direction] - differences).abs() <= error
    yield from map(tuple, close.nonzero().tolist())
