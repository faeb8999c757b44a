"""Sees through wrappers: modules around a model, or classes put over its own, that pass arguments and outputs on."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError


def _is_of_weights_alone(peft_model: Any) -> bool:
    """Whether adapters change layers in place, and neither add inputs nor choose by the inputs what to compute."""
    return not any(
        config.is_prompt_learning
        or getattr(config, "alora_invocation_tokens", None)
        or getattr(config.peft_type, "value", config.peft_type) in ("POLY", "XLORA")
        for config in peft_model.peft_config.values()
    )


_Wrapper = tuple[str, Callable[[Any], nn.Module], Callable[[Any], bool]]
"""The package that defines it, what returns the module inside, and whether that computes the same on its own."""
_WRAPPERS: Mapping[str, _Wrapper] = {
    "DataParallel": ("torch", lambda model: model.module, lambda _: True),
    "DistributedDataParallel": ("torch", lambda model: model.module, lambda _: True),
    "OptimizedModule": ("torch", lambda model: model._orig_mod, lambda _: True),
    # It gathers the weights.
    "FullyShardedDataParallel": ("torch", lambda model: model._fsdp_wrapped_module, lambda _: False),
    "SentenceEncoder": ("captum_norm", lambda model: model.transformer, lambda _: False),
    "PeftModel": ("peft", lambda model: model.get_base_model(), _is_of_weights_alone),
    "PeftMixedModel": ("peft", lambda model: model.base_model.model, _is_of_weights_alone),
}
"""By the name of the class or of a base class; importing the classes takes seconds."""

_OPAQUE: Mapping[str, str] = {
    "torch.jit.": "TorchScript (torch.jit.trace or torch.jit.script)",
    "torch.export.": "an exported program (torch.export)",
}
"""What runs code of its own instead of a model's layers, by the module of its class."""


def explained_module(model: object) -> nn.Module:
    """Return the module to explain: what is inside wrappers that do nothing but call it, in other threads or compiled.

    It computes what the wrapper computes, uncompiled, and leaves the wrapper's own state alone. Wrappers that do more,
    or that have hooks or a forward function of the user's, are kept.

    Raises:
        InvalidInputError: if the model is no module.
        UnsupportedModelError: if it has no layers that can be observed, or accelerate runs it in another precision.
    """
    classes = [f"{base.__module__}." for base in type(model).__mro__]
    kind = next((kind for module, kind in _OPAQUE.items() if any(name.startswith(module) for name in classes)), None)
    if kind is not None:
        raise UnsupportedModelError(
            f"got {kind}, whose layers cannot be observed; pass the model that it was made from, a torch.nn.Module"
        )
    if not isinstance(model, nn.Module):
        expected = "a torch.nn.Module, a pipeline of transformers or a SentenceTransformer"
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a model of type {type(model).__name__}"
        remedy = "; captum_norm.loading.load(name) loads one and its tokenizer" if isinstance(model, str) else ""
        raise InvalidInputError(f"got {got}; expected {expected}{remedy}")
    if "_original_forward" in vars(model):
        raise UnsupportedModelError(
            f"accelerate has replaced the forward function of {type(model).__name__} (mixed precision, or a pipeline); "
            "pass the model as it was: accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    wrapper = _wrapper(model)
    own, compiled = vars(model), type(model).__name__ == "OptimizedModule"  # whose forward function is an attribute
    runs_more = own["_forward_hooks"] or own["_forward_pre_hooks"] or ("forward" in own and not compiled)
    if wrapper is None or runs_more:
        return model
    _, inside, may_stand_alone = wrapper
    return explained_module(inside(model)) if may_stand_alone(model) else model


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers, which knows its configuration and its parts."""
    wrapper = _wrapper(model)
    return model if wrapper is None else unwrapped(wrapper[1](model))


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return the class of the model inside all wrappers; torch's ``fully_shard`` puts one of its own over it."""
    found = type(unwrapped(model))
    while any(base.__name__ in ("FSDPModule", "ReplicateModule") for base in found.__bases__):
        found = found.__bases__[-1]
    return found


def _wrapper(model: nn.Module) -> _Wrapper | None:
    for base in type(model).__mro__:
        wrapper = _WRAPPERS.get(base.__name__)
        if wrapper is not None and base.__module__.partition(".")[0] == wrapper[0]:
            own = type(model).forward.__module__.partition(".")[0] != wrapper[0]
            return None if own else wrapper
    return None


def refuse_spread(model: nn.Module) -> None:
    """Refuse a model that has its weights in several processes."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel" and module.sharding_strategy.name != "NO_SHARD":  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"FullyShardedDataParallel has the weights of {class_of(module).__name__} in {module.world_size} "
                "processes; explain the model in one process, or shard it with torch's fully_shard"
            )


def config_of(model: nn.Module) -> Any:
    """The model's configuration, found through wrappers; None if it has none."""
    return getattr(unwrapped(model), "config", None)


# Adapters of these kinds are keys and values in every layer; all others are embeddings before the inputs'.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")
# In an encoder-decoder model these put embeddings before the encoder's inputs alone.
_BEFORE_THE_ENCODER = ("PROMPT_TUNING", "P_TUNING")


def virtual_tokens(model: nn.Module) -> tuple[int, bool] | None:
    """Return how many virtual tokens an active adapter puts before the inputs, and whether they attend as others do."""
    adapted: Any = next(filter(is_peft, model.modules()), None)
    return None if adapted is None else tokens_of_adapter(adapted)


def tokens_of_adapter(adapted: Any) -> tuple[int, bool] | None:
    """Return the virtual tokens that a PeftModel puts before the inputs; see :func:`virtual_tokens`."""
    if not isinstance(adapted.active_adapter, str) or getattr(adapted, "_adapters_disabled", False):
        return None
    settings = adapted.active_peft_config
    if not settings.is_prompt_learning:
        return None
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    if kind in _PREFIXES:
        return settings.num_virtual_tokens, False
    if settings.num_transformer_submodules == 2 and kind not in _BEFORE_THE_ENCODER:
        raise UnsupportedModelError(
            f"{kind} of {type(adapted).__name__} puts virtual tokens before the inputs of both encoder and decoder; "
            f"supported are {', '.join((*_BEFORE_THE_ENCODER, *_PREFIXES))} for encoder-decoder models"
        )
    return settings.num_virtual_tokens, True


def is_peft(module: nn.Module) -> bool:
    """Whether a module is PEFT's model with adapters."""
    kinds = type(module).__mro__
    return any(kind.__module__ == "peft.peft_model" and kind.__name__ == "PeftModel" for kind in kinds)
