"""Decoders of text in the manner of GPT: each file has its own names."""

from typing import Any

import transformers as hf
from torch import nn

from tests.families.family import GROUPED, HEADS, LLAMA, TEXT, VOCABULARY, Family, each_last, last, new, part

GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT: dict[str, Any] = {
    key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
}
# With any other choice this file forgets the causal mask when it is asked for attention weights.
EAGER: dict[str, Any] = SHORT | {"attn_implementation": "eager"}
GPT: dict[str, Any] = {"layer": "transformer.h.{}", "style": "pre-norm", "causal": True}
FUSED: dict[str, Any] = {"value": "attn.c_attn", "projection": "attn.c_proj", "values": part(2)}
PARALLEL: dict[str, Any] = {"style": "parallel", "single": True, "positions": "rotary"}
SEPARATE: dict[str, Any] = {"value": "attn.v_proj", "projection": "attn.out_proj"}
FALCON: dict[str, Any] = {"value": "self_attention.query_key_value", "projection": "self_attention.dense"}
NEOX: dict[str, Any] = {
    "layer": "gpt_neox.layers.{}",
    "value": "attention.query_key_value",
    "projection": "attention.dense",
    "values": each_last(HEADS, 8),
    "causal": True,
    "single": True,
    "positions": "rotary",
}
PERSIMMON = LLAMA | {"value": "self_attn.query_key_value", "projection": "self_attn.dense", "special": ()}
PERSIMMON |= {"values": each_last(HEADS, 8)}
OPT: dict[str, Any] = {
    "layer": "model.decoder.layers.{}",
    "value": "self_attn.v_proj",
    "projection": "self_attn.out_proj",
    "style": "pre-norm",
    "causal": True,
    "single": True,
}


def opt(*, norm_before: bool) -> nn.Module:
    """OPT-125m and larger normalise before attention, OPT-350m after it."""
    sizes: dict[str, Any] = {"max_position_embeddings": 64, "ffn_dim": 48, "word_embed_proj_dim": 32}
    return hf.OPTForCausalLM(hf.OPTConfig(**SHORT, **sizes, do_layer_norm_before=norm_before))


DECODERS = {
    "openai-gpt": Family(
        new("OpenAIGPTLMHeadModel", **GPT2), **GPT | FUSED | {"style": "post-norm", "final_norm": "ln_1"}
    ),
    "gpt2": Family(new("GPT2LMHeadModel", **GPT2), **GPT | FUSED),
    "gpt-bigcode": Family(
        new("GPTBigCodeForCausalLM", **GPT2),
        **GPT | FUSED | {"values": last(8), "single": True, "special": ("one value head",)},
    ),
    "gpt-neo": Family(
        new("GPTNeoForCausalLM", **TEXT, attention_types=[[["global", "local"], 1]], window_size=4),
        **GPT | {"value": "attn.attention.v_proj", "projection": "attn.attention.out_proj"},
        single=True,
        special=("sliding window",),
    ),
    "gptj": Family(new("GPTJForCausalLM", **GPT2, rotary_dim=4), **GPT | SEPARATE | PARALLEL),
    "codegen": Family(
        new("CodeGenForCausalLM", **GPT2, rotary_dim=4),
        **GPT | SEPARATE | PARALLEL | {"value": "attn.qkv_proj"},
        # One group of queries, values and keys for each of four processors.
        values=lambda output: output.unflatten(-1, (4, 3, -1))[..., 1, :].flatten(-2),
    ),
    "gpt-neox": Family(new("GPTNeoXForCausalLM", **TEXT), **NEOX, style="parallel"),
    "gpt-neox-sequential": Family(
        new("GPTNeoXForCausalLM", **TEXT, use_parallel_residual=False), **NEOX, style="pre-norm"
    ),
    "bloom": Family(
        new("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=HEADS),
        **GPT | FALCON | {"values": each_last(HEADS, 8), "single": True, "positions": "ALiBi"},
    ),
    "mpt": Family(
        new("MptForCausalLM", vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=HEADS, max_seq_len=64),
        **GPT | {"layer": "transformer.blocks.{}", "value": "attn.Wqkv", "projection": "attn.out_proj"},
        values=part(2),
        single=True,
        positions="ALiBi",
    ),
    "falcon": Family(
        new("FalconForCausalLM", **EAGER),
        **GPT | FALCON | PARALLEL | {"values": last(8), "special": ("one value head",)},
    ),
    "falcon-40b": Family(
        new("FalconForCausalLM", **EAGER, num_kv_heads=2, new_decoder_architecture=True),
        **GPT | FALCON | PARALLEL | {"values": each_last(2, 8)},
    ),
    "falcon-rw": Family(
        new("FalconForCausalLM", **EAGER, alibi=True, parallel_attn=False, multi_query=False, bias=True),
        **GPT | FALCON | {"values": each_last(HEADS, 8), "single": True, "positions": "ALiBi"},
    ),
    "opt": Family(lambda: opt(norm_before=True), **OPT),
    "opt-350m": Family(
        lambda: opt(norm_before=False), **OPT | {"style": "post-norm", "final_norm": "self_attn_layer_norm"}
    ),
    "biogpt": Family(new("BioGptForCausalLM", **TEXT), **OPT | {"layer": "biogpt.layers.{}"}),
    "persimmon": Family(new("PersimmonForCausalLM", **TEXT), **PERSIMMON),
    "phi": Family(new("PhiForCausalLM", **GROUPED), **LLAMA | {"projection": "self_attn.dense", "style": "parallel"}),
}
