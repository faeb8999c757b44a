"""Counts the virtual tokens that PEFT's prompt-learning adapters put before a model's inputs; PEFT is not imported."""

from functools import cache
from typing import Any, NamedTuple

from torch import nn

from captum_norm.errors import UnsupportedModelError

# Adapters of these kinds are keys and values in every layer; all others are embeddings before the inputs'.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")
# In an encoder-decoder model these put embeddings before the encoder's inputs alone.
_BEFORE_THE_ENCODER = ("PROMPT_TUNING", "P_TUNING")


class VirtualTokens(NamedTuple):
    """Learned positions before those of the inputs.

    Attributes:
        number: how many there are.
        attend: whether they are embeddings, which attend as other tokens do; False for keys and values alone.
    """

    number: int
    attend: bool


def virtual_tokens(model: nn.Module) -> VirtualTokens | None:
    """Return the virtual tokens that a model's active adapter puts before the inputs; None if it puts none.

    Raises:
        UnsupportedModelError: if it puts some before the inputs of an encoder and of a decoder.
    """
    adapted: Any = next((module for module in model.modules() if _is_peft(type(module))), None)  # type: ignore[arg-type]
    if adapted is None or not isinstance(adapted.active_adapter, str) or getattr(adapted, "_adapters_disabled", False):
        return None
    settings = adapted.active_peft_config
    if not settings.is_prompt_learning:
        return None
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    if kind in _PREFIXES:
        return VirtualTokens(settings.num_virtual_tokens, attend=False)
    if settings.num_transformer_submodules == 2 and kind not in _BEFORE_THE_ENCODER:
        raise UnsupportedModelError(
            f"{kind} of {type(adapted).__name__} puts virtual tokens before the inputs of both encoder and decoder; "
            f"supported are {', '.join((*_BEFORE_THE_ENCODER, *_PREFIXES))} for encoder-decoder models"
        )
    return VirtualTokens(settings.num_virtual_tokens, attend=True)


@cache
def _is_peft(kind: type) -> bool:
    return any(base.__module__ == "peft.peft_model" and base.__name__ == "PeftModel" for base in kind.__mro__)
