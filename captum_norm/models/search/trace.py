"""Holds the tensors that the modules of one layer received and returned in a forward pass."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from captum_norm.models.layouts import Site
from captum_norm.models.measured_projections import read_projection
from captum_norm.models.projections import NormReader, Projection, read_norm
from captum_norm.models.search.sums import Sketch, sketch


@dataclass(frozen=True, eq=False)
class Event:
    """A tensor that a module received or returned.

    Attributes:
        site: where.
        tensor: a copy of it.
        source: the model's own tensor, which the model may have changed since.
        call: the call that this output ends; None for an input.
    """

    site: Site[nn.Module]
    tensor: Tensor
    source: Tensor
    call: "ModuleCall | None" = None

    @cached_property
    def sketch(self) -> Sketch:
        """The tensor's random projections."""
        return sketch(self.tensor)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One finished call of a module.

    Attributes:
        module: the module.
        inputs: its first input tensor; of a call of attention, the queries.
        output: its first output tensor.
        computed: what the module itself computed, if ``output`` replaced it.
    """

    module: nn.Module
    inputs: Tensor
    output: Tensor
    computed: Tensor | None = None

    @cached_property
    def norm(self) -> NormReader | None:
        """The normalisation that the module computed, if it is one."""
        return read_norm(self.module, self.inputs, self.output)

    @cached_property
    def projection(self) -> Projection | None:
        """The affine map that the module computed, if it is one."""
        return None if self.computed is None else read_projection(self.module, self.inputs, self.computed)


class Trace:
    """The events inside one layer, in their order."""

    def __init__(self, layer_name: str, layer: nn.Module, events: Sequence[Event]) -> None:
        self.layer_name = layer_name
        self.layer = layer
        self.events = events
        self._modules = dict(layer.named_modules())
        self._names: dict[nn.Module, str] = {module: name for name, module in self._modules.items()}
        self.calls = [event.call for event in events if event.call is not None]
        self._call_of: dict[nn.Module, ModuleCall] = {}
        for call in self.calls:
            self._call_of.setdefault(call.module, call)
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

    def after(self, call: ModuleCall) -> Sequence[Event]:
        """Return the events after the end of a call."""
        place = next(place for place, event in enumerate(self.events) if event.call is call)
        return self.events[place + 1 :]

    def call_of(self, module: nn.Module) -> ModuleCall | None:
        """Return the first call of a module, or None."""
        return self._call_of.get(module)

    def calls_on(self, tensor: Tensor) -> Iterator[ModuleCall]:
        """Yield the calls whose input equals ``tensor``."""
        for call in self.calls:
            if call.inputs.numel() == tensor.numel() and torch.equal(call.inputs.reshape(tensor.shape), tensor):
                yield call
