"""Brings a module the parameters that it has only while it runs: offloaded by accelerate, or sharded by torch."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError

# The modules of models sharded by torch's ``fully_shard``, which frees whole weights while the model runs.
_sharded: WeakSet[nn.Module] = WeakSet()


def note_sharded(model: nn.Module) -> None:
    """Note which modules of a model torch's ``fully_shard`` shards; it puts a class of its own over them."""
    for module in model.modules():
        if is_shard(module):
            _sharded.update(module.modules())


def is_shard(module: nn.Module) -> bool:
    """Whether torch's ``fully_shard`` gathers the weights of a module when it is called, and frees them at the end."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__bases__)


def is_sharded(module: nn.Module) -> bool:
    """Whether a module of a model that was noted has its weights in shards between calls."""
    return module in _sharded


def is_elsewhere(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a module's parameter is offloaded (meta), or sharded: a DTensor, or whole for a moment."""
    return tensor.is_meta or type(tensor).__name__ == "DTensor" or module in _sharded


def processes_of(model: nn.Module) -> Any:
    """Return the mesh of the processes that have a model's shards; None if it is in this one alone."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in meshes if mesh is not None and mesh.size() > 1), None)


def expect_same_inputs(processes: Any, *inputs: object) -> None:
    """Refuse, in all processes that have a model's shards, inputs that differ: how often they wait depends on them."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _plain(inputs):
        digest.update(part)
    told = {digest.hexdigest()}
    for group in processes.get_all_groups():
        answers = [told] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(answers, told, group=group)
        told = told.union(*answers)
    if len(told) > 1:
        raise InvalidInputError(
            f"got other inputs in one process than in another; a model with shards in {processes.size()} processes "
            "runs in all of them together: make the same calls with the same inputs in each, or explain a model that "
            "one process has whole"
        )


def _plain(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if not value.is_meta:
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield from (part for name in value for part in (str(name).encode(), *_plain(value[name])))
    elif isinstance(value, list | tuple):
        yield from (part for own in value for part in _plain(own))
    else:
        yield (repr(value) if isinstance(value, str | int | float | None) else type(value).__name__).encode()


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
    """Give a module its own parameters, which accelerate may keep on disk, and ``fully_shard`` in shards."""
    own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if not any(is_elsewhere(module, tensor) for tensor in own.values()):
        yield
        return
    if not any(tensor.is_meta for tensor in own.values()):
        module._parameters.update({name: _whole(tensor) for name, tensor in own.items()})
        try:
            yield
        finally:
            module._parameters.update(own)
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
    """Return a parameter or buffer of a module as it stores it, perhaps offloaded or sharded; None if it has none."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def loaded_tensors(module: nn.Module, *, transposed: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Return a module's weight (or its transpose) and bias, loaded if they are elsewhere; None for what it lacks."""
    weight, bias = tensor_of(module, "weight"), tensor_of(module, "bias")
    first = bias if weight is None else weight  # a module's parameters are offloaded or sharded together
    if first is not None and is_elsewhere(module, first):
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


def _whole(tensor: Any) -> Any:
    """A sharded parameter as a tensor of its own."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
