"""What the modules of one layer received and returned, while a forward pass runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.models.layouts import Site


@dataclass(frozen=True, eq=False)
class Event:
    """A tensor at one end of a module."""

    module: nn.Module
    end: Literal["input", "output"]
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One finished call of a module: its first input and output tensor, and the place of the output in the trace."""

    module: nn.Module
    inputs: Tensor
    output: Tensor
    order: int


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor with at least two axes in (nested) arguments or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() >= 2 else None
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Sequence) or isinstance(value, str):
        return None
    return next((tensor for item in value if (tensor := first_tensor(item)) is not None), None)


def input_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first floating-point tensor that a module's call was given."""
    tensor = first_tensor(args)
    return first_tensor(kwargs) if tensor is None else tensor


class Trace:
    """The events inside one layer, looked up by what is searched for."""

    def __init__(self, layer: nn.Module, events: Sequence[Event]) -> None:
        self.layer = layer
        self.events = events
        self._modules = dict(layer.named_modules())
        self._names: dict[nn.Module, str] = {module: name for name, module in self._modules.items()}
        self.calls = list(self._calls())
        self._times_called = Counter(call.module for call in self.calls)

    def site(self, event: Event) -> Site:
        """The event's place, relative to the layer."""
        return Site(self._names[event.module], event.end)

    def is_unique(self, event: Event) -> bool:
        """Whether the event's place names it: a dropout that a layer uses twice, for example, names neither."""
        return self._times_called[event.module] <= 1

    def name(self, module: nn.Module) -> str:
        """The module's name inside the layer."""
        return self._names[module]

    def at(self, site: Site) -> Tensor | None:
        """The tensor that passed a site, or None."""
        module = self._modules.get(site.module)
        found = (event.tensor for event in self.events if event.module is module and event.end == site.end)
        return next(found, None)

    def call_of(self, module: nn.Module) -> Call | None:
        """The first call of a module, or None."""
        return next((call for call in self.calls if call.module is module), None)

    def calls_on(self, tensor: Tensor) -> Iterator[Call]:
        """The calls whose input equals ``tensor``."""
        for call in self.calls:
            if call.inputs.numel() == tensor.numel() and torch.equal(call.inputs.reshape(tensor.shape), tensor):
                yield call

    def _calls(self) -> Iterator[Call]:
        opened: dict[nn.Module, Tensor] = {}
        for order, event in enumerate(self.events):
            if event.end == "input":
                opened[event.module] = event.tensor
            elif event.module in opened:
                yield Call(event.module, opened.pop(event.module), event.tensor, order)


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Removes the hooks when the context closes, whatever happens."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
