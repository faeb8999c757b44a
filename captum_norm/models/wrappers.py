"""Finds the model inside torch's wrappers, which pass arguments and outputs on unchanged."""

from typing import Any

from torch import nn

from captum_norm.errors import UnsupportedModelError

# Attribute that holds the model, by class name: importing the classes takes seconds.
_WRAPPED = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "SentenceEncoder": "transformer",
    "SentenceSimilarity": "transformer",
}


_LIBRARIES = ("torch.", "captum_norm.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch's wrappers (parallel, sharded or compiled models), or the model itself."""
    while type(model).__module__.startswith(_LIBRARIES) and type(model).__name__ in _WRAPPED:
        model = getattr(model, _WRAPPED[type(model).__name__])
    return model


def refuse_spread(model: nn.Module) -> None:
    """Refuse a model that runs copies of itself on several devices, each in its own thread."""
    devices = getattr(model, "device_ids", None) or ()
    if isinstance(model, nn.DataParallel) and len(devices) > 1:
        raise UnsupportedModelError(
            f"DataParallel runs {type(unwrapped(model)).__name__} on {len(devices)} devices, each in its own thread; "
            "explain the model inside it: model.module"
        )


def config_of(model: nn.Module) -> Any:
    """The model's configuration, found through torch's wrappers; None if it has none."""
    return getattr(unwrapped(model), "config", None)
