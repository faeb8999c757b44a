"""Reaches attention that a model's own code computes, where softmaxed scores multiply the values.

Many of transformers' files, and most models that users write, call no attention interface. What all of them do is
``softmax(scores) @ values``, or torch's ``scaled_dot_product_attention``. Both are seen as calls of torch functions,
whatever the names of modules.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from captum_norm.models.attention import AttentionCall, AttentionFunction, EagerAttention
from captum_norm.models.hooks import Hook, hooked
from captum_norm.models.threads import here

SOFTMAX = frozenset({functional.softmax, torch.softmax, Tensor.softmax})
PRODUCTS = frozenset({torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm})
# What these make of attention weights are no weights, even if there are as many numbers.
MIXTURES = PRODUCTS | {functional.linear, torch.addmm, torch.baddbmm, torch.einsum}


class AttentionProducts(TorchFunctionMode):
    """Sends the attention that a model's code computes through a function of ours.

    What softmax returns is followed through all that keeps its number of elements: views, casts, masks, dropout. The
    matrix product in which it is the left factor is attention, and the right factor holds the values.

    Args:
        model: the model.
        attend: what attention goes through.
    """

    def __init__(self, model: nn.Module, attend: AttentionFunction) -> None:
        super().__init__()
        self._paused = False
        self._model = model
        self._attend = attend
        self._batch = 0
        self._running: list[nn.Module] = []
        self._weights = WeakTensorKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, in this thread, attention goes through the function."""

        def note_batch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim())
            self._batch = next((len(tensor) for tensor in tensors), 0)

        handle = self._model.register_forward_pre_hook(here(note_batch), with_kwargs=True)
        try:
            with hooked(self._ends()), self:
                yield
        finally:
            handle.remove()

    def unwatched(self, eager: EagerAttention) -> EagerAttention:
        """Return an attention function whose own products are left alone."""

        def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            before, self._paused = self._paused, True
            try:
                return eager(*args, **options)
            finally:
                self._paused = before

        return run

    def _ends(self) -> Iterator[tuple[nn.Module, Literal["input", "output"], Hook]]:
        for module in self._model.modules():
            yield module, "input", lambda module, _: self._running.append(module)
            yield module, "output", self._leave

    def _leave(self, _module: nn.Module, _: Tensor | None) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stands in for every torch function; inside it this mode is off."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if self._running:
            if func is functional.scaled_dot_product_attention and args and args[0].dim() == 4:
                return self._scaled_dot_product(*args, **kwargs)
            if func in PRODUCTS and len(args) == 2 and args[0] in self._weights:
                weights, values = (self._by_head(factor) for factor in args)
                if weights is not None and values is not None:
                    self._weights.clear()
                    return self._product(weights, values).reshape(*args[0].shape[:-1], -1)
        result = func(*args, **kwargs)
        if func in SOFTMAX or (self._weights and func not in MIXTURES and self._holds_weights(args, result)):
            self._weights[result] = True
        return result

    def _holds_weights(self, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a function of ``args`` gave as many numbers as attention weights among them are."""
        size = result.numel() if isinstance(result, Tensor) else None
        return any(isinstance(arg, Tensor) and arg.numel() == size and arg in self._weights for arg in args)

    def _by_head(self, factor: Tensor) -> Tensor | None:
        """(B, H, ·, ·) from that or (B·H, ·, ·); None for anything else."""
        if factor.dim() == 3 and self._batch and len(factor) % self._batch == 0:
            return factor.reshape(self._batch, -1, *factor.shape[1:])
        return factor if factor.dim() == 4 else None

    def _product(self, weights: Tensor, values: Tensor) -> Tensor:
        """(B, H, Q, K), (B, H or 1, K, d) -> (B, H, Q, d)."""

        def eager(_: nn.Module, weights: Tensor, __: Tensor, values: Tensor, ___: None) -> tuple[Tensor, Tensor]:
            weights = weights[..., : values.shape[2]]
            return (weights @ values).transpose(1, 2), weights

        # The weights stand where queries are expected: both have a row for each.
        return self._attend(AttentionCall(eager, self._running[-1], weights, values, values, None)).transpose(1, 2)

    def _scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002 - a model in eval mode drops nothing
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 - told by the number of heads
    ) -> Tensor:
        """(B, H, Q, d), (B, H or fewer, K, d) -> (B, H, Q, d)."""
        if is_causal:
            attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.reshape(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
        factor = query.shape[-1] ** -0.5 if scale is None else scale

        def eager(
            _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            group = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
            scores = query @ key.transpose(-1, -2) * factor
            weights = (scores if mask is None else scores + mask).softmax(-1)
            return (weights @ value).transpose(1, 2), weights

        return self._attend(AttentionCall(eager, self._running[-1], query, key, value, attn_mask)).transpose(1, 2)
