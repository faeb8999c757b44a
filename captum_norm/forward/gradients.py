"""Turns gradients on, and refuses layers that pass none on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.hooks import End, Hook, Received, first_argument, first_tensor, hooked, with_argument
from captum_norm.models.offloading import is_sharded

WITHOUT = "norms, ALTI, value zeroing or occlusion"
"""What explains a model without gradients, for messages."""
# How weights are stored as integers.
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32})


@contextmanager
def gradients_on() -> Iterator[None]:
    """Enable gradients, in inference mode, too."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def gradients_through(model: nn.Module) -> Iterator[None]:
    """While open, refuse a layer of integers whose output does not depend on its input for autograd."""
    names = {module: name for name, module in model.named_modules() if _may_hold_integers(module)}
    given = dict[nn.Module, Tensor]()

    def enter(module: nn.Module, received: Received) -> Received | None:
        tensor = first_argument(*received)
        if tensor is None or not tensor.requires_grad or not torch.is_grad_enabled():
            return None
        # The gradient of a view calls no hooks of the tensor itself.
        given[module] = tensor.view_as(tensor)
        return with_argument(*received, tensor, given[module])

    def leave(module: nn.Module, output: Any) -> None:
        tensor, written = given.pop(module, None), first_tensor(output)
        if tensor is None or written is None or _depends(written, tensor):
            return
        raise UnsupportedModelError(
            f'"{names[module]}" ({type(module).__name__}) of {type(model).__name__} passes no gradient on, as layers '
            f"of integers may not; explain the dequantized model, or take a method without gradients: {WITHOUT}"
        )

    ends: tuple[tuple[End, Hook], ...] = (("arguments", enter), ("result", leave))
    with hooked((module, *end) for module in names for end in ends):
        yield


def _may_hold_integers(module: nn.Module) -> bool:
    """Whether a module's weights are integers, tensors of another class, or packed."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    packed = (value for part in (module, *module.children()) for value in vars(part).values())
    known = (Tensor, nn.Parameter)
    foreign = ((type(tensor) not in known and not is_sharded(module)) or tensor.dtype in _INTEGERS for tensor in own)
    return any(foreign) or any(isinstance(value, torch.ScriptObject) for value in packed)


def _depends(output: Tensor, tensor: Tensor) -> bool:
    """Whether autograd knows that an output depends on a tensor; biases that are trained depend on nothing."""
    if not output.requires_grad:
        return False
    ones = torch.ones_like(output)
    (gradient,) = torch.autograd.grad(output, tensor, ones, retain_graph=True, allow_unused=True)
    return gradient is not None
