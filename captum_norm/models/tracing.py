"""What the modules of one layer received and returned, while a forward pass runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.models.layouts import Site
from captum_norm.models.threads import EXPLAINING, explaining, here


@dataclass(frozen=True, eq=False)
class Event:
    """A tensor at one end of a module.

    Attributes:
        module: the module.
        end: which end.
        tensor: a copy of what passed there.
        source: the model's own tensor, into which it may have written since.
        computed: what the module itself gave, if another tensor was put in its place.
    """

    module: nn.Module
    end: Literal["input", "output"]
    tensor: Tensor
    source: Tensor
    computed: Tensor | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        end: Literal["input", "output"],
        source: Tensor,
        device: torch.device | None = None,
        computed: Tensor | None = None,
    ) -> "Event":
        """What passes there now; the copies are on ``device`` if one is given."""
        computed = None if computed is None else computed.to(device, copy=True)
        return cls(module, end, source.to(device, copy=True), source, computed)

    @property
    def own(self) -> Tensor:
        """What the module computed."""
        return self.tensor if self.computed is None else self.computed

    @property
    def overwritten(self) -> bool:
        """Whether the model wrote into the tensor afterwards."""
        return not torch.equal(self.tensor, self.source.to(self.tensor.device))


@dataclass(frozen=True, eq=False)
class Call:
    """One finished call of a module: its first input and output tensor, and the place of the output in the trace.

    ``computed`` is what the module itself gave, if another output was put in its place.
    """

    module: nn.Module
    inputs: Tensor
    output: Tensor
    order: int
    computed: Tensor | None = None

    @property
    def own(self) -> Tensor:
        """What the module computed."""
        return self.output if self.computed is None else self.computed


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor with at least two axes in (nested) arguments or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() >= 2 else None
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Sequence) or isinstance(value, str):
        return None
    return next((tensor for item in value if (tensor := first_tensor(item)) is not None), None)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first such tensor that a module is called with."""
    tensor = first_tensor(args)
    return first_tensor(kwargs) if tensor is None else tensor


def with_argument(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> "Received":
    """The same arguments with one tensor in place of another."""
    exchanged = tuple(new if value is old else value for value in args)
    return exchanged, {name: new if value is old else value for name, value in kwargs.items()}


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in (nested) arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


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

    def event_at(self, site: Site) -> Event | None:
        """The first event at a site, or None."""
        module = self._modules.get(site.module)
        return next((event for event in self.events if event.module is module and event.end == site.end), None)

    def at(self, site: Site) -> Tensor | None:
        """The tensor that passed a site, or None."""
        event = self.event_at(site)
        return None if event is None else event.tensor

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
                yield Call(event.module, opened.pop(event.module), event.tensor, order, event.computed)


Hook = Callable[..., Any]
Received = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module was called with: its arguments by place and by name."""
End = Literal["input", "output", "arguments", "result"]


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, End, Hook]]) -> Iterator[None]:
    """Hooks at ends of modules while open, called in this thread alone.

    Args:
        hooks: for each a module, its end, and a function of the module and the first tensor there (None if there is
            none), or at ``"arguments"`` all that it receives, as (args, kwargs), or at ``"result"`` all that it
            returns, in whose place the function may give something else.
    """

    def at_start(hook: Hook, chosen: Callable[[Any, Any], Any]) -> Hook:
        return here(lambda module, args, kwargs: hook(module, chosen(args, kwargs)))

    def at_output(hook: Hook, chosen: Callable[[Any], Any]) -> Hook:
        return here(lambda module, _, output: hook(module, chosen(output)))

    with ExitStack() as stack:
        for module, end, hook in hooks:
            if end in ("output", "result"):
                handle = module.register_forward_hook(at_output(hook, first_tensor if end == "output" else _whole))
            else:
                chosen = first_argument if end == "input" else _all_arguments
                handle = module.register_forward_pre_hook(at_start(hook, chosen), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _whole(output: Any) -> Any:
    return output


def _all_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Received:
    return args, kwargs


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``eval()`` for a while, with compiled modules run as they were written; every module's own mode is restored.

    Other threads that explain a model wait, and if the mode is another than before, those that call this one.
    """
    with EXPLAINING, ExitStack() as stack:
        # Seen only now: until this thread's turn came, another one may have had the model in eval mode.
        training = [module for module in model.modules() if module.training]
        if training:
            stack.enter_context(explaining(model))
        if any(map(_is_compiled, model.modules())):
            # A compiler would trace what is put into the model, too, and once for every call.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
