"""The seam of Hugging Face models: every attention call of a model through one function of ours.

The models look their attention function up by name in ``AttentionInterface`` each time they run. We register one name
whose function calls the model file's own ``eager_attention_forward``, and select it in the model's configuration while
a context is open.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
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
        *,
        cross: bool,
        **options: Any,
    ) -> Tensor:
        """(B, H, Q, d), (B, H or fewer, K, d) -> attention output (B, Q, H, d); ``eager`` is the model file's own.

        ``cross`` says whether keys and values come from another sequence than the queries.
        """
        ...


@dataclass
class _Seam:
    """What an open context sends attention through, and the modules that last read another sequence's keys."""

    function: AttentionFunction
    crossing: set[nn.Module] = field(default_factory=set)


_current: ContextVar[_Seam] = ContextVar("current seam")
# How the modules that call attention name the sequence that cross-attention reads.
OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")
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
        seam = _Seam(function)
        token = _current.set(seam)
        try:
            for config in configs:
                setattr(config, CONFIG_KEY, NAME)
            with _watching(model, seam.crossing):
                yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                setattr(config, CONFIG_KEY, implementation)
            _current.reset(token)


@contextmanager
def _watching(model: nn.Module, crossing: set[nn.Module]) -> Iterator[None]:
    """While open, keeps the set of those modules whose last call was given another sequence to read."""
    config = getattr(model, "config", None)
    may_cross = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = _parameters(type(module).forward)
        given = kwargs | dict(zip(names, args, strict=False))
        if any(given.get(name) is not None for name in OTHER_SEQUENCE):
            crossing.add(module)
        else:
            crossing.discard(module)

    with ExitStack() as stack:
        for module in model.modules() if may_cross else ():
            if not set(OTHER_SEQUENCE).isdisjoint(_parameters(type(module).forward)):
                stack.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a class's forward function, but for ``self``."""
    _, *names = inspect.signature(forward).parameters
    return tuple(names)


def _attention_configs(model: nn.Module) -> list[Any]:
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, CONFIG_KEY)]


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    eager = _eager_attention(module)
    seam = _current.get(None)
    if seam is None:
        # Its mask may have been made for another attention function, so going on could give a wrong output.
        raise RuntimeError(
            f"{type(module).__name__} was run while another thread explains its model; run it afterwards, or a copy"
        )
    cross = module in seam.crossing
    return seam.function(eager, module, query, key, value, attention_mask, cross=cross, **options), None


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
