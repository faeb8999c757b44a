"""Observes models: hooks for the calling thread alone, and the one place where everything is undone.

Hooks carry numbers in the order of their making, so what :func:`evaluating` undoes is whatever was made inside of it,
by whomever, and undoing it twice does no harm.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from threading import RLock, get_ident
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

Hook = Callable[..., Any]
Received = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a module."""
End = Literal["input", "output", "arguments", "result", "before", "after"]
"""What a hook takes beside its module: the first tensor there or None, all arguments, or everything that is returned.

What it returns, unless None, replaces the arguments or the result. Before and after the module, a function or partial
one that is made for this call takes what torch gives it, in any thread.
"""
# Attributes that are False while a model is explained: the second lets fairseq fuse whole layers, the third lets
# bitsandbytes pack weights of four bits, which then pass no gradient on.
SWITCHES = ("training", "can_use_fastpath", "support_avx512bf16_for_cpu")

LIBRARIES = ("captum_norm", "transformers", "accelerate", "peft", "torch")  # whose hooks run in any case
COMPILED = "OptimizedModule"  # class of a compiled module
EXPLAINING = RLock()
"""Held by the thread that explains a model: one at a time. Meanwhile no other thread may call or change that model."""

# A child process has no thread that would release the lock.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=EXPLAINING.acquire, after_in_parent=EXPLAINING.release, after_in_child=EXPLAINING.release
    )

numbers = count()  # for the changes made to models, in their order

_evaluation = ContextVar("evaluation", default=0)


def evaluation() -> int | None:
    """Return the number of the evaluation that this thread is in; weights stay the same in it. None outside of any."""
    return _evaluation.get() if EXPLAINING._is_owned() else None  # type: ignore[attr-defined]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List a module and all inside as ``model.modules()`` does, without the names that take most of its time."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += reversed(module._modules.values())
    return list(found)


def first_tensor(value: Any) -> Tensor | None:
    """First floating-point tensor with at least two axes in (nested) arguments or outputs."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point() and tensor.dim() >= 2), None)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """First such tensor among a module's arguments."""
    tensor = first_tensor(args)
    return first_tensor(kwargs) if tensor is None else tensor


def with_argument(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> Received:
    """Replace one tensor among a module's arguments by another."""
    replaced = tuple(new if value is old else value for value in args)
    return replaced, {name: new if value is old else value for name, value in kwargs.items()}


def with_result(output: Any, old: Tensor, new: Tensor) -> Any:
    """Replace one tensor in what a module returned by another."""
    if isinstance(output, Mapping):
        return type(output)(**{name: with_result(part, old, new) for name, part in output.items()})
    if isinstance(output, tuple | list):
        parts = [with_result(part, old, new) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return new if output is old else output


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in (nested) arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


OBSERVING = ContextVar("observing", default=True)
"""Whether modules run as part of the model, not under :func:`unobserved`."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Call no function of :func:`hooked` while the context is open: its modules are run on inputs of our own."""
    token = OBSERVING.set(False)
    try:
        yield
    finally:
        OBSERVING.reset(token)


def _hook(end: End, function: Hook) -> Hook:
    """Make a hook that is silent in other threads, and for modules that are run on inputs of our own."""
    thread = get_ident()

    def hook(module: nn.Module, *seen: Any) -> Any:
        # If the hook is removed meanwhile, other threads call it with fewer arguments.
        if get_ident() != thread or not OBSERVING.get():
            return None
        if end == "input":
            return function(module, first_argument(*seen))
        if end == "arguments":
            return function(module, seen)
        _, output = seen
        return function(module, first_tensor(output) if end == "output" else output)

    return hook


def hooks_of_users(model: nn.Module) -> list[str]:
    """Name the hooks that no library has made, by module and function."""
    named = []
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            function = getattr(hook, "func", hook)
            function = function if hasattr(function, "__qualname__") else type(function)
            if str(function.__module__).partition(".")[0] not in LIBRARIES:
                named.append(f'"{name}" ({function.__qualname__.rpartition(".")[2]})')
    return named


_open: list[int] = []  # the threads that have hooks now


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, End, Hook]]) -> Iterator[None]:
    """Hook modules for the calling thread while the context is open, each by a function at one of its ends."""
    with ExitStack() as stack:
        _open.append(get_ident())
        stack.callback(_open.remove, get_ident())
        for module, end, function in hooks:
            hook: Any = function if end in ("before", "after") else _hook(end, function)
            hook.mark = get_ident(), next(numbers)
            if end in ("output", "result", "after"):
                handle = module.register_forward_hook(hook, with_kwargs=end == "after")
            else:
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _undo(modules: Iterable[nn.Module], since: int) -> None:
    """Remove this thread's hooks of ours with numbers from ``since`` on, and undo what else was changed since."""
    thread = get_ident()
    for module in modules:
        own = vars(module)
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            left = [key for key, hook in own[kind].items() if _is_ours(hook, thread, since)]
            for key in left:
                own[kind].pop(key, None)
                own[f"{kind}_with_kwargs"].pop(key, None)
    for undo in undone:
        undo(since)


def _is_ours(hook: object, thread: int, since: int) -> bool:
    if not isinstance(hook, FunctionType | partial) or "mark" not in vars(hook):
        return False
    owner, number = vars(hook)["mark"]
    return bool(owner == thread and number >= since)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` compiles calls of a module, or its forward function."""
    compiled = module._compiled_call_impl is not None or type(module).__name__ == COMPILED
    return compiled or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


undone: list[Callable[[int], object]] = []
"""What else is undone on leaving :func:`evaluating`: functions of the first number of the changes to undo."""


class _Undone:
    """Undoes, on exit, whatever was changed inside; entering it only looks."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._first = modules, next(numbers)
        own = [(vars(module), name) for module in modules for name in SWITCHES]
        self.switched = [(held, name, held[name]) for held, name in own if held.get(name)]
        # Where parameters of FullyShardedDataParallel are the original ones, a gradient of inputs alone leaves views.
        wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in modules)
        sharded = [module for module in modules if wrapped and getattr(module, "_fsdp_use_orig_params", False)]
        self._parameters = [(module, dict(module._parameters)) for module in sharded]
        lazy = _lazy(modules) if "bitsandbytes" in sys.modules else []
        self._lazy = [(vars(held), dict(vars(held))) for held in lazy]
        self._data = [(held, held.data) for held in lazy if isinstance(held, nn.Parameter)]
        self._gradients = torch.is_grad_enabled()
        self._modes = torch._C._len_torch_function_stack()

    def __enter__(self) -> "_Undone":
        return self

    def __exit__(self, *_: object) -> None:
        for held, name, value in self.switched:
            held[name] = value
        while torch._C._len_torch_function_stack() > self._modes:
            torch._C._pop_torch_function_stack()
        torch.set_grad_enabled(self._gradients)
        for own, values in self._lazy:
            own.update(values)
            for name in own.keys() - values.keys():
                del own[name]
        for parameter, data in self._data:
            if (parameter.dtype, parameter.data_ptr()) != (data.dtype, data.data_ptr()):
                parameter.data = data
        for module, parameters in self._parameters:
            module._parameters.update(parameters)
            for name in parameters.keys() & vars(module).keys():
                del vars(module)[name]
        _undo(self._modules, self._first)


def _lazy(modules: Iterable[nn.Module]) -> list[Any]:
    """Return bitsandbytes' layers and the objects in them, which take their final form in a forward pass."""
    kinds = sys.modules["bitsandbytes"].nn
    layers: list[Any] = [m for m in modules if isinstance(m, kinds.Linear4bit | kinds.Linear8bitLt)]
    held = [(layer, layer.weight, layer.bias, getattr(layer, "state", None)) for layer in layers]
    states = [getattr(layer.weight, "quant_state", None) for layer in layers]
    return [part for part in (*states, *(part for parts in held for part in parts)) if part is not None]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what forward passes inside change of modules: frequencies for a length, attention chosen by it."""
    # Modules that hold weights, also packed ones, keep what they note of them, as those of torch itself do.
    every = [
        module
        for module in modules_of(model)
        if not type(module).__module__.startswith("torch.")
        and all(parameter is None for parameter in module._parameters.values())
        and all(buffer is None or buffer.is_floating_point() for buffer in module._buffers.values())
    ]
    # Behind names with an underscore, libraries note hooks that they have made.
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, {name: value for name, value in held.items() if not name.startswith("_")})
        for module in every
        for held in (vars(module), module._buffers, module._modules)
    ]
    try:
        yield
    finally:
        for held, before in kept:
            held.update(before)
            for name in held.keys() - before.keys():
                if not name.startswith("_"):
                    held.pop(name, None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in ``eval()`` and run compiled modules uncompiled; on exit, undo whatever was changed inside.

    Undone are modes, hooks of ours, entries of ours in transformers' registry of attention functions, torch's function
    modes, and whether gradients are enabled. Another thread that explains a model waits; none may call this one.

    Args:
        model: the model.

    Example:
        >>> model = nn.Linear(2, 2).train()
        >>> with evaluating(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    inside = evaluation() is not None
    outermost = not inside and get_ident() not in _open
    with EXPLAINING:
        if not inside:
            _evaluation.set(next(numbers))
        # Read under the lock: before, another thread may have had the model in eval mode.
        modules = modules_of(model)
        if outermost:  # what an interrupt at the very end of an earlier call left
            _undo(modules, 0)
        # Of two, one survives an interrupt on its way out.
        with _Undone(modules), _Undone(modules) as before, ExitStack() as stack:
            if any(map(is_compiled, modules)):
                # A compiler would trace our hooks, too, and compile anew for every call.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for held, name, _ in before.switched:
                held[name] = False
            yield
