"""Runs copies of modules with random parameters and inputs, which tell apart readings that agree by accident."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.models.offloading import loaded

FAILURES = (LookupError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError)
"""What modules raise that are given something else than they expect."""


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return a module's forward function without hooks; None if it cannot run on a copy of the module."""
    attributes = vars(module)
    # accelerate's hooks keep the original function here.
    own = attributes.get("_old_forward", attributes.get("forward"))
    return type(module).forward if own is None else getattr(own, "__func__", None)


def copy_with(module: nn.Module, parameters: Mapping[str, Tensor], like: Tensor) -> nn.Module | None:
    """Copy a module without its hooks, with some parameters replaced.

    Args:
        module: the module; it is not changed.
        parameters: the replaced parameters; the others take the dtype and the device of ``like``.
        like: what the copy will read.

    Returns:
        The copy; call its ``forward``. None if the module cannot be copied.
    """
    forward = forward_of(module)
    if forward is None:
        return None
    with loaded(module):
        copy = _unhooked(module)
        own = vars(copy)
        for tensors in ("_parameters", "_buffers"):
            # While a sharded module runs, torch keeps whole parameters among its plain attributes.
            present = {name: own.pop(name, value) for name, value in own[tensors].items()}
            own[tensors] = {name: _like(value, like) for name, value in present.items()}
    for name, value in parameters.items():
        kept = next((tensors for tensors in ("_parameters", "_buffers") if name in own[tensors]), None)
        (own if kept is None else own[kept])[name] = value
    own["forward"] = MethodType(forward, copy)
    return copy


def output_of(copy: nn.Module | None, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return a copy's output for these arguments; None if it fails or returns no tensor."""
    try:
        with torch.no_grad():
            output = None if copy is None else copy.forward(*args, **kwargs)
    except FAILURES:
        return None
    return output if isinstance(output, Tensor) else None


def _unhooked(module: nn.Module) -> nn.Module:
    copy = object.__new__(type(module))
    # What the module stores as it runs must not reach the model.
    for name, value in vars(module).items():
        vars(copy)[name] = value.copy() if type(value) in (list, dict, set) else value
    vars(copy).update({hooks: OrderedDict() for hooks in ("_forward_hooks", "_forward_pre_hooks")})
    vars(copy)["_modules"] = {name: child and _unhooked(child) for name, child in module._modules.items()}
    return copy


def _like(value: Tensor | None, inputs: Tensor) -> Tensor | None:
    return value.to(inputs) if value is not None and value.is_floating_point() else value


def drawn(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal numbers, the same ones each time, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like) for shape in shapes]
