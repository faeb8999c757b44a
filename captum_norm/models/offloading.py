"""Loads a module's offloaded parameters through accelerate's hooks."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from captum_norm.errors import UnsupportedModelError


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Load a module's own parameters, which accelerate may keep on another device or on disk between calls.

    Raises:
        UnsupportedModelError: if they are on the meta device and no hook loads them.
    """
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
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
