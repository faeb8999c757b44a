"""What a module computes at parameters and inputs of our choosing, at which no two readings agree by accident."""

from collections.abc import Callable, Mapping
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


def output_at(module: nn.Module, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """What a module would give for ``inputs`` if it had these parameters and the others in the inputs' dtype.

    The module itself is not changed.

    Returns:
        its output, or None if it does not run on one tensor of this dtype.
    """
    forward = forward_of(module)
    if forward is None:
        return None
    copy = object.__new__(type(module))
    with present(module):
        own = {name: value for name, value in vars(module).items() if name != "forward"}
        vars(copy).update(own)
        for tensors in ("_parameters", "_buffers"):
            vars(copy)[tensors] = {name: _like(value, inputs) for name, value in own[tensors].items()}
    for name, value in parameters.items():
        kept = next((tensors for tensors in ("_parameters", "_buffers") if name in own[tensors]), None)
        (vars(copy) if kept is None else vars(copy)[kept])[name] = value
    try:
        with torch.no_grad():
            output = forward(copy, inputs)
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError):
        return None
    return output if isinstance(output, Tensor) else None


def _like(value: Tensor | None, inputs: Tensor) -> Tensor | None:
    return value.to(inputs) if value is not None and value.is_floating_point() else value


def drawn(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal numbers, the same each time, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(like) for shape in shapes]
