"""Describes translation models of fairseq, which is never imported.

Their attention is observed in the functions that it calls (:mod:`captum_norm.models.libraries.own_code`).
"""

from functools import partial

from torch import nn

from captum_norm.models.libraries.library import Library, forward_parameters
from captum_norm.models.libraries.own_code import attention_through


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
    observer=lambda model: partial(attention_through, model),
    halves=_halves,
    embeddings=_embeddings,
    inputs=(SOURCE,),
    decoder=(DECODER,),
    decoder_prefixes=(DECODER,),
    without_decoder=f"pass {SOURCE}, src_lengths and {DECODER} in a mapping, or the encoder alone: model.encoder",
)
