"""Temporarily replaces the forward function of attention modules by one that computes the same from their projections.

Each module's first result is compared with that of its own forward function.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.functional import length
from captum_norm.models.threads import explaining

ForwardFunction = Callable[..., Any]
ForwardByName = Callable[[ForwardFunction, dict[str, Any]], tuple[Tensor, Tensor | None]]
"""From a module's own forward function and the arguments by name, to output and attention weights."""

_compared: WeakSet[nn.Module] = WeakSet()
_comparing: ContextVar[bool] = ContextVar("whether modules are compared with themselves", default=True)


@contextmanager
def not_compared() -> Iterator[None]:
    """Compare no results while open, since the outputs of the projections are replaced by other numbers."""
    token = _comparing.set(False)
    try:
        yield
    finally:
        _comparing.reset(token)


@contextmanager
def replaced_attributes(
    model: nn.Module, attributes_of: Callable[[nn.Module], Iterable[tuple[str, Any]]]
) -> Iterator[None]:
    """Give attributes of the model's modules other values while open.

    They are restored in any case. Other threads that explain or call the model wait.

    Args:
        model: the model.
        attributes_of: the names and values of attributes for one of its modules.
    """
    with explaining(model), ExitStack() as stack:
        for module in model.modules():
            attributes = vars(module)
            for name, value in attributes_of(module):
                # An attribute that the module lacked is removed, which uncovers its class's.
                stack.callback(attributes.update, {name: attributes[name]} if name in attributes else {})
                stack.callback(attributes.pop, name)
                attributes[name] = value
        yield


def replaced_forward(module: nn.Module, parameters: Sequence[str], compute: ForwardByName) -> ForwardFunction:
    """Return a forward function for a module; threads other than this one still get the module's own.

    Args:
        module: the module.
        parameters: the parameters of its forward function, in order.
        compute: computes the module's result from its own forward function and the arguments by name.
    """
    own, thread = module.forward, threading.get_ident()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return own(*args, **kwargs)
        return compute(own, dict(zip(parameters, args, strict=False)) | kwargs)

    return forward


def split_heads(module: Any, projected: Tensor) -> Tensor:
    """Split heads: (S, B, H·d) -> (B, H, S, d)."""
    heads: Tensor = projected.unflatten(-1, (module.num_heads, module.head_dim))
    return heads.permute(1, 2, 0, 3)


def compare(module: nn.Module, output: Tensor, expected: Callable[[], Tensor], not_supported: str) -> None:
    """Compare ``output`` with the result of the module's own forward function, once for each module.

    Args:
        module: the attention module.
        output: what is computed in its place.
        expected: computes its own result.
        not_supported: variants of attention that are not computed here, for messages.

    Raises:
        UnsupportedModelError: if they differ.
    """
    if module in _compared or not _comparing.get():
        return
    with torch.no_grad():
        own = expected()
        difference, size = (length(tensor.float().flatten()) for tensor in (output - own, own))
    if not difference.isfinite():
        return  # reported later, where the cause can be named
    precision = max(torch.finfo(dtype).eps for dtype in (output.dtype, torch.float32))
    if difference > precision**0.5 * size:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes something other than scaled dot-product attention over its "
            f"projections; {not_supported} are not supported"
        )
    _compared.add(module)


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    softmax_dtype: torch.dtype | None = None,
    nothing_from_masked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention's output, (B, Q, H, d), and weights, (B, H, Q, K).

    Queries, (B, H, Q, d), are scaled already; keys and values are (B, H, K, d). A query whose keys are all masked by −∞
    gets weights 0 if ``nothing_from_masked``, else NaN.
    """
    scores = query @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=softmax_dtype).to(scores.dtype)
    if mask is not None and nothing_from_masked:
        weights = weights.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0)
    return (weights @ value).transpose(1, 2), weights


def additive_mask(attention: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Return the mask to add to the scores: (1, 1, Q, K), (B, 1, 1, K), (B, 1, Q, K) or (B, H, Q, K).

    Args:
        attention: (Q, K) or (B·H, Q, K): numbers to add, or bool, True where attention is masked.
        padding: (B, K), the same for keys.
        heads: H.
        dtype: the dtype of the scores.
    """
    if attention is not None:
        attention = _summand(attention, dtype)
        attention = attention[None, None] if attention.dim() == 2 else attention.unflatten(0, (-1, heads))
    if padding is None:
        return attention
    padded = _summand(padding, dtype)[:, None, None]
    return padded if attention is None else attention + padded


def _summand(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask into −∞ where it is True; return any other mask unchanged."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
