"""Brings a module the parameters that it has only while it runs, since accelerate keeps them elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError


def input_device(model: nn.Module) -> torch.device:
    """Return the device that a model's inputs belong on: its first parameter's, or where accelerate loads that."""
    parameter = next(model.parameters(), None)
    if parameter is not None and not parameter.is_meta:
        return parameter.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Give a module its own parameters, which accelerate may keep on disk."""
    if not any(tensor is not None and tensor.is_meta for tensor in module._parameters.values()):
        yield
        return
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        raise UnsupportedModelError(
            f"the weights of a {type(module).__name__} are on no device (meta), and no hook of accelerate loads them; "
            "load the model's weights, or offload module by module (without preload_module_classes)"
        )
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer of a module as it stores it, perhaps offloaded; None if it has none."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def loaded_tensors(module: nn.Module, *, transposed: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Return a module's weight (or its transpose) and bias, loaded if they are offloaded; None for what it lacks."""
    weight, bias = tensor_of(module, "weight"), tensor_of(module, "bias")
    first = bias if weight is None else weight  # a module's parameters are offloaded together
    if first is not None and first.is_meta:
        with loaded(module):
            weight, bias = tensor_of(module, "weight"), tensor_of(module, "bias")
    return weight.T if transposed and weight is not None else weight, bias


def versions_of(module: nn.Module) -> object:
    """Return what changes when a module's weight or bias is replaced or written to."""
    return version_of(getattr(module, "weight", None)), version_of(getattr(module, "bias", None))


def version_of(value: object) -> object:
    """Return what changes when a tensor is replaced or written to; of anything else, itself."""
    if not isinstance(value, Tensor):
        return value
    return value.data_ptr(), 0 if value.is_inference() else value._version
