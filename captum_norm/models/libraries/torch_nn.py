"""Describes models built with torch's ``nn.MultiheadAttention``, whatever their class, and fairseq's, never imported.

Their attention is observed in the functions that it calls (:mod:`captum_norm.models.libraries.own_code`); while these
are watched, torch fuses no whole layers.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.attention import AttentionCall, AttentionFunction
from captum_norm.models.hooks import Received, hooked, modules_of
from captum_norm.models.libraries import own_code
from captum_norm.models.libraries.library import Library, forward_parameters

_, *PARAMETERS = inspect.signature(nn.MultiheadAttention.forward).parameters
# How the name of a decoder layer's self-attention begins.
SELF = "self"


@contextmanager
def attention_through(model: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """Tell ``function`` of every call of an ``nn.MultiheadAttention`` of ``model`` while open."""
    decoder = _decoder_attention(model)

    def attend(call: AttentionCall) -> Tensor:
        module: Any = call.module
        if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to an additional key (add_bias_kv, add_zero_attn), which belongs to "
                "no position; that is not supported"
            )
        if call.cross and call.module not in decoder:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} was given another tensor as keys than as queries; that is supported "
                f'only in decoder layers, which hold an attention module named "{SELF}..." and another one'
            )
        return function(call)

    with own_code.attention_through(model, attend):
        yield


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) and [*forward_parameters(module)] == PARAMETERS


class _AllSeen(BaseException):
    """Ends a forward pass early; not an Exception, so handlers of errors in the model do not catch it."""


def sequences(model: nn.Module, run: Callable[[], None]) -> tuple[Tensor | None, Tensor | None]:
    """Return the first sequence and the decoder's, True at real positions, (B, S), as attention receives them."""
    # Only attention shows which axis is the batch and what is padding: a model may treat its arguments in any way.
    decoder = _decoder_attention(model)
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, received: Received) -> None:
        args, kwargs = received
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        query, key = given["query"], given.get("key", given["query"])
        if query.is_nested or query.dim() != 3:
            got = "a nested tensor" if query.is_nested else f"a sequence of shape {tuple(query.shape)}"
            expected = "expected a batch of sequences, three axes"
            raise InvalidInputError(f"{type(module).__name__} was given {got}; {expected}")
        name = "decoder" if module in decoder and query is key else "first"
        keys = key if getattr(module, "batch_first", False) else key.transpose(0, 1)
        seen.setdefault(name, _real(keys, given.get("key_padding_mask")))
        if "first" in seen and (not decoder or "decoder" in seen):
            raise _AllSeen

    watched = hooked((module, "arguments", look) for module in model.modules() if _is_attention(module))
    with watched, BaseTorchFunctionMode(), suppress(_AllSeen):
        run()
    return seen.get("first"), seen.get("decoder")


def _real(keys: Tensor, padding: Tensor | None) -> Tensor:
    """Return True for those of the keys, (B, S, D), that a padding mask leaves."""
    if padding is None:
        return torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    return ~padding if padding.dtype == torch.bool else padding != -torch.inf


def _decoder_attention(model: nn.Module) -> dict[nn.Module, None]:
    """Return a decoder's attention modules: of layers that directly hold one named "self..." and another one."""
    found: dict[nn.Module, None] = {}
    for layer in model.modules():
        held = {name: child for name, child in layer.named_children() if _is_attention(child)}
        if 0 < sum(name.startswith(SELF) for name in held) < len(held):
            found |= dict.fromkeys(held.values())
    return found


def _halves(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    decoder = _decoder_attention(model)
    if not decoder:
        return None
    encoder = (module for module in model.modules() if _is_attention(module) and module not in decoder)
    return nn.ModuleList(encoder), nn.ModuleList(decoder)


def _fits(model: nn.Module) -> bool:
    """Whether a model has such attention, and no modules of transformers, whose attention may differ."""
    modules = modules_of(model)
    packages = {type(module).__module__.partition(".")[0] for module in modules}
    return "transformers" not in packages and any(map(_is_attention, modules))


TORCH_NN = Library(
    models="a model whose attention modules are torch's nn.MultiheadAttention",
    fits=_fits,
    observer=lambda model: partial(attention_through, model),
    halves=_halves,
    embeddings=lambda _: None,
    inputs=("src",),
    decoder=("tgt",),
    decoder_prefixes=("tgt", "trg", "target"),
    without_decoder="if the decoder's sequence is missing, pass it, too, in a tuple or mapping of arguments",
    with_weights="torch.backends.mha.set_fastpath_enabled(False)",
    sequences=sequences,
)


def _halves_of_fairseq(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    encoder, decoder = getattr(model, "encoder", None), getattr(model, "decoder", None)
    if isinstance(encoder, nn.Module) and isinstance(decoder, nn.Module):
        return (encoder, decoder) if DECODER in forward_parameters(model) else None
    return None


def _embeddings_of_fairseq(model: nn.Module) -> nn.Module | None:
    tables = (getattr(module, "embed_tokens", None) for module in model.modules())
    return next((table for table in tables if isinstance(table, nn.Module)), None)


SOURCE, DECODER = "src_tokens", "prev_output_tokens"
FAIRSEQ = Library(
    models="a model of fairseq whose attention modules are its MultiheadAttention",
    fits=lambda model: SOURCE in forward_parameters(model),
    observer=lambda model: partial(own_code.attention_through, model),
    halves=_halves_of_fairseq,
    embeddings=_embeddings_of_fairseq,
    inputs=(SOURCE,),
    decoder=(DECODER,),
    decoder_prefixes=(DECODER,),
    without_decoder=f"pass {SOURCE}, src_lengths and {DECODER} in a mapping, or the encoder alone: model.encoder",
)
