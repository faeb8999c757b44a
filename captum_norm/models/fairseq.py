"""The seam of fairseq's models, which are recognised by their structure: fairseq itself is never imported.

fairseq has no place where attention can be exchanged, and most of its attention never calls its projections as modules.
So the forward function of every attention module is one of ours while a context is open: it computes the same from the
module's own projections. Each module's first result is compared with what its own forward function gives.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.library import AttentionFunction, Library, SequenceNames, forward_parameters, run_elsewhere

# What an attention module's forward function takes, in this order, and what the module consists of.
PARAMETERS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "incremental_state",
    "need_weights",
    "static_kv",
    "attn_mask",
    "before_softmax",
    "need_head_weights",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
SETTINGS = ("num_heads", "head_dim", "scaling", "encoder_decoder_attention")
# By this the encoder layers of 0.12.2 tell whether they may run as one fused operation.
FAST_PATH = "can_use_fastpath"

# Forward functions lie on modules, which all threads share.
_exchanging = threading.RLock()
_compared: WeakSet[nn.Module] = WeakSet()


@contextmanager
def attention_through(model: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """While open, every call of an attention module of ``model`` runs ``function``.

    The modules are left as they were, also when the body raises. Other threads that explain a model wait; a plain call
    of this model in another thread meanwhile raises RuntimeError. Attention weights are not in the model's output.
    """
    thread = threading.get_ident()
    with _exchanging, ExitStack() as stack:
        for module in model.modules():
            if _is_attention(module):
                forward = _Forward(module, module.forward, function, thread)
                stack.enter_context(_replaced(module, "forward", forward))
            if getattr(module, FAST_PATH, False):
                stack.enter_context(_replaced(module, FAST_PATH, False))
        yield


def _is_attention(module: nn.Module) -> bool:
    return (
        forward_parameters(module) == PARAMETERS
        and all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)
        and all(hasattr(module, name) for name in SETTINGS)
    )


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute for a while; the class's own is seen again afterwards if the module had none."""
    attributes = vars(module)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


@dataclass(frozen=True)
class _Forward:
    """Stands in for the forward function of an attention module.

    Attributes:
        module: the attention module.
        own: its own forward function.
        function: what its attention goes through.
        thread: the only one that may call it.
    """

    module: Any
    own: Callable[..., tuple[Tensor, Tensor | None]]
    function: AttentionFunction
    thread: int

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Query (Q, B, D), key and value (K, B, D or another width) -> output (Q, B, D), and no attention weights."""
        if threading.get_ident() != self.thread:
            raise run_elsewhere(self.module)
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        if given.get("incremental_state") is not None or given.get("before_softmax"):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} was called with incremental_state or before_softmax; only forward "
                "passes over whole sequences are supported: give the decoder all of prev_output_tokens at once"
            )
        query, key, value = given["query"], given["key"], given["value"]
        mask = _additive_mask(given.get("attn_mask"), given.get("key_padding_mask"), query.dtype)
        context = self.function(
            _attend,
            self.module,
            self._heads(self.module.q_proj(query)) * self.module.scaling,
            self._heads(self.module.k_proj(key)),
            self._heads(self.module.v_proj(value)),
            mask,
            cross=self.module.encoder_decoder_attention,
            # With static_kv fairseq takes the softmax itself; else it leaves that to torch.
            softmax_dtype=torch.float32 if given.get("static_kv") else None,
        )
        output = self.module.out_proj(context.transpose(0, 1).flatten(2))
        self._compare(output, (query, key, value), mask)
        return output, None

    def _heads(self, projected: Tensor) -> Tensor:
        """(S, B, H·d) -> (B, H, S, d)."""
        heads: Tensor = projected.unflatten(-1, (self.module.num_heads, self.module.head_dim))
        return heads.permute(1, 2, 0, 3)

    def _compare(self, output: Tensor, sequences: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> None:
        """Once for each module, on the first example, by a path on which none of its parts is called as a module."""
        if self.module in _compared:
            return
        query, key, value = (sequence[:, :1] for sequence in sequences)
        mask = None if mask is None else mask[0, 0].expand(len(query), len(key))
        with torch.no_grad():
            expected, _ = self.own(query, key, value, attn_mask=mask, need_weights=False)
            difference = (output[:, :1] - expected).float().norm()
        if not difference.isfinite():
            return  # it is told of where its cause can be named
        precision = max(torch.finfo(dtype).eps for dtype in (output.dtype, torch.float32))
        if difference > precision**0.5 * expected.float().norm():
            raise UnsupportedModelError(
                f"{type(self.module).__name__} computes something else than scaled dot-product attention over its "
                "projections; additional keys (add_bias_kv, add_zero_attn), xFormers and dropout in eval mode are not "
                "supported"
            )
        _compared.add(self.module)


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    softmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Scaled queries (B, H, Q, d), keys and values (B, H, K, d) -> output (B, Q, H, d), weights (B, H, Q, K)."""
    scores = query @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=softmax_dtype).to(scores.dtype)
    return (weights @ value).transpose(1, 2), weights


def _additive_mask(attention: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: (1, 1, Q, K), (B, 1, 1, K) or (B, 1, Q, K).

    Args:
        attention: (Q, K), a summand or, of bool, True where no attention is.
        padding: (B, K), not 0 at padded keys.
        dtype: of the scores.
    """
    cut = None if attention is None else _summand(attention, dtype)[None, None]
    if padding is None:
        return cut
    padded = _summand(padding.bool(), dtype)[:, None, None]
    return padded if cut is None else cut + padded


def _summand(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bool as −∞ where it is True; any other as it is."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _halves(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    encoder, decoder = getattr(model, "encoder", None), getattr(model, "decoder", None)
    if isinstance(encoder, nn.Module) and isinstance(decoder, nn.Module):
        return (encoder, decoder) if DECODER in forward_parameters(model) else None
    return None


def _embeddings(model: nn.Module) -> nn.Module | None:
    tables = (getattr(module, "embed_tokens", None) for module in model.modules())
    return next((table for table in tables if isinstance(table, nn.Module)), None)


SOURCE, DECODER = "src_tokens", "prev_output_tokens"
FAIRSEQ = Library(
    models="a model of fairseq whose attention modules are its MultiheadAttention",
    fits=lambda model: SOURCE in forward_parameters(model),
    attention_through=attention_through,
    halves=_halves,
    embeddings=_embeddings,
    inputs=SequenceNames((SOURCE,)),
    decoder=SequenceNames((DECODER,)),
    decoder_prefixes=(DECODER,),
    without_decoder=f"pass {SOURCE}, src_lengths and {DECODER} in a mapping, or the encoder alone: model.encoder",
)
