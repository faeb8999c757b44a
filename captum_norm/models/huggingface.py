"""The seam of Hugging Face models: every attention call of a model through one function of ours.

The models look their attention function up by name in ``AttentionInterface`` each time they run. We register one name
whose function calls the model file's own ``eager_attention_forward``, and select it in the model's configuration while
a context is open.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from captum_norm.errors import UnsupportedModelError

NAME = "captum_norm"
CONFIG_KEY = "_attn_implementation_internal"

EagerAttention = Callable[..., tuple[Tensor, Tensor]]


class AttentionFunction(Protocol):
    """What the seam calls in place of the model's attention."""

    def __call__(
        self,
        eager: EagerAttention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """(B, H, Q, d), (B, H or fewer, K, d) -> attention output (B, Q, H, d); ``eager`` is the model file's own."""
        ...


_current: ContextVar[AttentionFunction] = ContextVar("current attention function")
# The selection lives in the model's configuration, which all threads share.
_selecting = threading.RLock()


@contextmanager
def attention_through(model: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """While open, every attention call of ``model`` that goes through ``AttentionInterface`` runs ``function``.

    The configuration is left as it was, also when the body raises. Other threads that explain a model wait; a plain
    call of this model in another thread meanwhile raises RuntimeError.
    """
    AttentionInterface.register(NAME, _dispatch)
    AttentionMaskInterface.register(NAME, eager_mask)
    with _selecting:
        configs = _attention_configs(model)
        before = [getattr(config, CONFIG_KEY) for config in configs]
        token = _current.set(function)
        try:
            for config in configs:
                setattr(config, CONFIG_KEY, NAME)
            yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                setattr(config, CONFIG_KEY, implementation)
            _current.reset(token)


def _attention_configs(model: nn.Module) -> list[Any]:
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, CONFIG_KEY)]


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    eager = _eager_attention(module)
    function = _current.get(None)
    if function is None:
        # Its mask may have been made for another attention function, so going on could give a wrong output.
        raise RuntimeError(
            f"{type(module).__name__} was run while another thread explains its model; run it afterwards, or a copy"
        )
    return function(eager, module, query, key, value, attention_mask, **options), None


def _eager_attention(module: nn.Module) -> EagerAttention:
    """The ``eager_attention_forward`` of the file that defines the module's class, or of the class it derives from."""
    for base in type(module).__mro__:
        eager = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{type(module).__name__} calls the attention interface, but its file {type(module).__module__} defines no "
        "eager_attention_forward to get the attention weights from"
    )
