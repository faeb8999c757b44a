"""Runs copies of modules at parameters and inputs of our choosing, at which no two readings agree by accident."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.models.offloading import present


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that computes a module's output, without hooks; None if it cannot be run on a copy of the module."""
    attributes = vars(module)
    # Hooks of accelerate keep the function that they stand in for.
    own = attributes.get("_old_forward", attributes.get("forward"))
    return type(module).forward if own is None else getattr(own, "__func__", None)


def copy_with(module: nn.Module, parameters: Mapping[str, Tensor], like: Tensor) -> nn.Module | None:
    """A module with other parameters, which shares the rest, and which no hook watches.

    Args:
        module: the module, which is not changed.
        parameters: those that are other; the rest are in the dtype and on the device of ``like``.
        like: what it will read.

    Returns:
        the copy, whose ``forward`` is to be called; None if there is no such copy.
    """
    forward = forward_of(module)
    if forward is None:
        return None
    with present(module):
        copy = _unhooked(module)
        own = vars(copy)
        for tensors in ("_parameters", "_buffers"):
            own[tensors] = {name: _like(value, like) for name, value in own[tensors].items()}
    for name, value in parameters.items():
        kept = next((tensors for tensors in ("_parameters", "_buffers") if name in own[tensors]), None)
        (own if kept is None else own[kept])[name] = value
    own["forward"] = MethodType(forward, copy)
    return copy


def output_of(copy: nn.Module | None, *args: Any, **kwargs: Any) -> Tensor | None:
    """What a copy gives for these arguments; None if it does not run on them, or gives no tensor."""
    try:
        with torch.no_grad():
            output = None if copy is None else copy.forward(*args, **kwargs)
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError):
        return None
    return output if isinstance(output, Tensor) else None


def _unhooked(module: nn.Module) -> nn.Module:
    copy = object.__new__(type(module))
    # What the module notes as it runs is not to reach the model.
    for name, value in vars(module).items():
        vars(copy)[name] = value.copy() if type(value) in (list, dict, set) else value
    vars(copy).update({hooks: OrderedDict() for hooks in ("_forward_hooks", "_forward_pre_hooks")})
    vars(copy)["_modules"] = {name: child and _unhooked(child) for name, child in module._modules.items()}
    return copy


def _like(value: Tensor | None, inputs: Tensor) -> Tensor | None:
    return value.to(inputs) if value is not None and value.is_floating_point() else value


def drawn(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal numbers, the same each time, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like) for shape in shapes]
