"""Observes attention that a model's own code computes with torch functions.

Many model files of transformers, and most models that users write, call no attention interface. But they all compute
``softmax(scores) @ values``, or call ``scaled_dot_product_attention``. Both are seen as calls of torch functions,
whatever the modules are called.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from captum_norm.models.attention import AttentionCall, AttentionFunction, OwnAttention, mask_rows, scaled_dot_product
from captum_norm.models.hooks import OBSERVING, End, Hook, Received, hooked
from captum_norm.models.libraries.library import forward_parameters

SOFTMAX = frozenset({functional.softmax, torch.softmax, Tensor.softmax})
PRODUCTS = frozenset({torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm})
# Results of these are not attention weights, even if they have as many elements.
MIXTURES = PRODUCTS | {functional.linear, torch.addmm, torch.baddbmm, torch.einsum}
# Names of the argument with the sequence that cross-attention reads.
OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "key")

# torch's attention with its inner steps in sight: the same code, which does not hand itself on to a mode as a whole.
_whole: Any = functional.multi_head_attention_forward
multi_head_attention = FunctionType(
    _whole.__code__, {**vars(functional), "has_torch_function": lambda _: False}, argdefs=_whole.__defaults__
)
multi_head_attention.__kwdefaults__ = _whole.__kwdefaults__


@contextmanager
def attention_through(model: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """Tell ``function`` of the attention that a model's own code computes; what it returns is attention's output."""
    with watching_sequences(model) as crossing:
        products = AttentionProducts(
            model, lambda call: function(products.unwatched_call(replace(call, cross=call.module in crossing)))
        )
        with products.watching():
            yield


@contextmanager
def watching_sequences(model: nn.Module) -> Iterator[set[nn.Module]]:
    """While open, keep a set of the modules whose last call was given another sequence to read."""
    crossing: set[nn.Module] = set()

    def look(module: nn.Module, received: Received) -> None:
        args, kwargs = received
        given = kwargs | dict(zip(forward_parameters(module), args, strict=False))
        other = (given.get(name) for name in OTHER_SEQUENCE)
        if any(value is not None and value is not given.get("query") for value in other):
            crossing.add(module)
        else:
            crossing.discard(module)

    names = set(OTHER_SEQUENCE)
    reading = (module for module in model.modules() if not names.isdisjoint(forward_parameters(module)))
    with hooked((module, "arguments", look) for module in reading):
        yield crossing


class AttentionProducts(TorchFunctionMode):
    """Tells a function of ours of the attention that a model's code computes: products of softmax and values."""

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
        """Tell the function of this thread's attention while open."""
        ends: tuple[tuple[End, Hook], ...] = (("arguments", self._enter), ("output", self._leave))
        with hooked((module, *end) for module in self._model.modules() for end in ends), self:
            yield

    def unwatched_call(self, call: AttentionCall) -> AttentionCall:
        """Return a call whose functions' own products are left alone."""
        own = call.own and replace(call.own, run=partial(self._unwatched, call.own.run))
        return replace(call, eager=partial(self._unwatched, call.eager), own=own)

    def _unwatched(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before, self._paused = self._paused, True
        try:
            return function(*args, **options)
        finally:
            self._paused = before

    def _enter(self, module: nn.Module, received: Received) -> None:
        if not self._running:  # the model, or a part of it that is run alone
            args, kwargs = received
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim())
            self._batch = next((len(tensor) for tensor in tensors), 0)
        self._running.append(module)

    def _leave(self, _module: nn.Module, _: Tensor | None) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run in place of every torch function; inside it this mode is off."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if self._running:
            made = self._attended(func, args, kwargs)
            if made is not None:
                return made
        result = func(*args, **kwargs)
        if func in SOFTMAX or (self._weights and func not in MIXTURES and self._holds_weights(args, result)):
            self._weights[result] = True
        return result

    def _attended(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return a function's result if it computes attention, or the output projection of torch's; else None."""
        if func is _whole:
            with self:
                return multi_head_attention(*args, **kwargs)  # type: ignore[no-any-return]
        module: Any = self._running[-1]
        projects = func is functional.linear and len(args) > 1 and _has_heads(module) and OBSERVING.get()
        if projects and args[1] is module.out_proj.weight:
            return self._projected(module, args[0])
        if func is functional.scaled_dot_product_attention and args and args[0].dim() == 4:
            return self._scaled_dot_product(*args, **kwargs)
        if func in PRODUCTS and len(args) == 2 and args[0] in self._weights:
            weights, values = (self._by_head(factor) for factor in args)
            if weights is not None and values is not None:
                self._weights.clear()
                return self._product(weights, values, partial(func, *args)).reshape(*args[0].shape[:-1], -1)
        if func is torch.einsum and len(args) == 3 and args[1] in self._weights and _is_attention(args[0]):
            values = self._by_head(args[2])
            if args[1].dim() == 4 and values is not None:
                self._weights.clear()
                return self._product(args[1], values, partial(func, *args))
        return None

    def _holds_weights(self, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a function's result has as many elements as attention weights among its arguments."""
        size = result.numel() if isinstance(result, Tensor) else None
        return any(isinstance(arg, Tensor) and arg.numel() == size and arg in self._weights for arg in args)

    def _by_head(self, factor: Tensor) -> Tensor | None:
        """Return a factor (B, H, ·, ·) or (B·H, ·, ·) as (B, H, ·, ·); None for any other shape."""
        module: Any = self._running[-1]
        if factor.dim() == 3 and _has_heads(module):
            return factor.unflatten(0, (-1, module.num_heads))  # type: ignore[no-any-return]
        if factor.dim() == 3 and self._batch and len(factor) % self._batch == 0:
            return factor.reshape(self._batch, -1, *factor.shape[1:])
        return factor if factor.dim() == 4 else None

    def _projected(self, attention: Any, rows: Tensor) -> Tensor:
        """Run an output projection as the module that it is, on (B, Q, D) or (Q, B, D), for rows (Q·B, D) if merged."""
        with self:
            if rows.dim() != 2:
                return attention.out_proj(rows)  # type: ignore[no-any-return]
            inputs = rows.unflatten(0, (-1, self._examples))
            if getattr(attention, "batch_first", False):
                return attention.out_proj(inputs.transpose(0, 1)).transpose(0, 1).flatten(0, 1)  # type: ignore[no-any-return]
            return attention.out_proj(inputs).flatten(0, 1)  # type: ignore[no-any-return]

    def _product(self, weights: Tensor, values: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """Return attention's output, (B, H, Q, d), of weights (B, H, Q, K) and values (B, H or 1, K, d)."""

        def output() -> Tensor:
            return own().reshape(*weights.shape[:3], -1).transpose(1, 2)

        def eager(_: nn.Module, weights: Tensor, __: Tensor, values: Tensor, ___: None) -> tuple[Tensor, Tensor]:
            weights = weights[..., : values.shape[2]]
            return (weights @ values).transpose(1, 2), weights

        own_attention = OwnAttention(lambda: (output(), None), lambda _: None)
        # The weights take the place of the queries: both have one row for each query.
        call = AttentionCall(eager, self._running[-1], weights, values, values, None, own=own_attention)
        self._examples = len(weights)
        return self._attend(call).transpose(1, 2)

    def _scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002 - a model in eval mode drops nothing
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention's output, (B, H, Q, d), from queries alike, keys and values (B, H or fewer, K, d)."""
        make = partial(mask_rows, attn_mask, query, key.shape[2], causal=is_causal, masked=-torch.inf)

        def output() -> Tensor:
            options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            made: Tensor = functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
            return made.transpose(1, 2)

        own = OwnAttention(lambda: (output(), None), make)
        self._examples = len(query)
        options, module = {"scaling": scale}, self._running[-1]
        call = AttentionCall(scaled_dot_product, module, query, key, value, None, options=options, own=own)
        return self._attend(call).transpose(1, 2)


def _has_heads(module: Any) -> bool:
    """Whether a module computes attention by torch's function, as those of torch and of fairseq do."""
    projection = vars(module)["_modules"].get("out_proj")
    return hasattr(module, "num_heads") and isinstance(getattr(projection, "weight", None), Tensor)


def _is_attention(equation: object) -> bool:
    """Whether an equation of einsum is that of weights and values, such as ``b h i j, b h j d -> b h i d``."""
    terms = str(equation).replace(" ", "").replace("->", ",").split(",")
    if [len(term) for term in terms] not in ([4, 4, 4], [4, 3, 4]):
        return False
    weights, values, output = terms
    batch, head, query, key, width = *weights, values[-1]
    shared = batch + key + width  # of one head for all
    return values in (batch + head + key + width, shared) and output == batch + head + query + width
