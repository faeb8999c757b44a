"""Brings parameters that accelerate's hooks keep elsewhere between the calls of a module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from captum_norm.errors import UnsupportedModelError


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """A module's own parameters, for a while, as its forward function finds them.

    A hook of accelerate may keep them on another device or on disk, and brings them for each call of the module.

    Raises:
        UnsupportedModelError: if they are nowhere.
    """
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        yield
        return
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        raise UnsupportedModelError(
            f"the weights of a {type(module).__name__} are on no device (meta), and no hook of accelerate brings them; "
            "load the model's weights, or offload module by module (without preload_module_classes)"
        )
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)
