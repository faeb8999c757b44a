"""The model families of the test matrix: tiny random models, and where a reader of their code finds the parts.

The places are written down by hand, so that the oracle shares nothing with the library's search for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.oracle import DirectNorm

VOCABULARY = 60
HEADS = 4
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
WINDOWED = GROUPED | {"head_dim": 12, "sliding_window": 4}
SPECIAL: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 2}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        build: makes a model.
        layer: name of layer i, with ``{}`` for i; its first argument is the residual stream.
        value: the module inside the layer whose output holds the values.
        projection: the output projection inside the layer.
        branch_norm: the norm on the attention output before the residual sum.
        final_norm: the norm on the sum, in post-norm layers.
        centered: LayerNorm or RMSNorm.
        gain_offset: added to the norm's weight.
        values: cuts (B, K, H, d) out of what the value module returns.
        style: the arrangement.
        causal: whether attention looks back only.
        single: whether its file takes the softmax or the norms in float32 even in a float64 model.
    """

    build: Callable[[], nn.Module]
    layer: str
    value: str
    projection: str
    style: str
    branch_norm: str | None = None
    final_norm: str | None = None
    centered: bool = True
    gain_offset: float = 0.0
    values: Callable[[Tensor], Tensor] = lambda output: output
    causal: bool = False
    single: bool = False

    def norm(self, layer: nn.Module, name: str | None) -> DirectNorm | None:
        """The norm of that name, in the oracle's form."""
        if name is None:
            return None
        module: Any = layer.get_submodule(name)
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        bias = getattr(module, "bias", None)
        gain = module.weight.detach() + self.gain_offset
        return DirectNorm(self.centered, gain, torch.zeros_like(gain) if bias is None else bias.detach(), float(eps))


def third(part: int) -> Callable[[Tensor], Tensor]:
    """One third of the last axis: queries, keys or values of a fused projection."""
    return lambda output: output.chunk(3, dim=-1)[part]


def interleaved(output: Tensor) -> Tensor:
    """GPT-NeoX: each head's queries, keys and values stand together."""
    heads: Tensor = output.unflatten(-1, (HEADS, 3, -1))
    return heads[..., 2, :].flatten(-2)


BERT: dict[str, Any] = {
    "value": "attention.self.value",
    "projection": "attention.output.dense",
    "final_norm": "attention.output.LayerNorm",
    "style": "post-norm",
}
LLAMA: dict[str, Any] = {
    "layer": "model.layers.{}",
    "value": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
    "style": "pre-norm",
    "centered": False,
    "causal": True,
    "single": True,
}


def opt(*, norm_before: bool) -> nn.Module:
    """OPT-125m and larger normalise before attention, OPT-350m after it."""
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    config = hf.OPTConfig(
        **{key: TEXT[key] for key in keys}, ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=norm_before
    )
    return hf.OPTForCausalLM(config)


FAMILIES = {
    "bert": Family(lambda: hf.BertModel(hf.BertConfig(**TEXT)), "encoder.layer.{}", **BERT),
    "roberta": Family(lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)), "encoder.layer.{}", **BERT),
    "electra": Family(lambda: hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=16)), "encoder.layer.{}", **BERT),
    "albert": Family(
        lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16)),
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention.value",
        "attention.dense",
        "post-norm",
        final_norm="attention.LayerNorm",
    ),
    "distilbert": Family(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(
                vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=HEADS, hidden_dim=48, max_position_embeddings=64
            )
        ),
        "transformer.layer.{}",
        "attention.v_lin",
        "attention.out_lin",
        "post-norm",
        final_norm="sa_layer_norm",
    ),
    "modernbert": Family(
        lambda: hf.ModernBertModel(hf.ModernBertConfig(**TEXT, **SPECIAL, local_attention=4)),
        "layers.{}",
        "attn.Wqkv",
        "attn.Wo",
        "pre-norm",
        values=third(2),
        single=True,
    ),
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=HEADS,
                n_positions=64,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
        "transformer.h.{}",
        "attn.c_attn",
        "attn.c_proj",
        "pre-norm",
        values=third(2),
        causal=True,
    ),
    "opt": Family(
        lambda: opt(norm_before=True),
        "model.decoder.layers.{}",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "pre-norm",
        causal=True,
        single=True,
    ),
    "opt-post-norm": Family(
        lambda: opt(norm_before=False),
        "model.decoder.layers.{}",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "post-norm",
        final_norm="self_attn_layer_norm",
        causal=True,
        single=True,
    ),
    "gpt-neox": Family(
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)),
        "gpt_neox.layers.{}",
        "attention.query_key_value",
        "attention.dense",
        "parallel",
        values=interleaved,
        causal=True,
        single=True,
    ),
    "gpt-neox-sequential": Family(
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT, use_parallel_residual=False)),
        "gpt_neox.layers.{}",
        "attention.query_key_value",
        "attention.dense",
        "pre-norm",
        values=interleaved,
        causal=True,
        single=True,
    ),
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), **LLAMA),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)), **LLAMA),
    "qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)), **LLAMA),
    "qwen3": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=12)), **LLAMA),
    "phi": Family(
        lambda: hf.PhiForCausalLM(hf.PhiConfig(**GROUPED)),
        **LLAMA | {"projection": "self_attn.dense", "style": "parallel"},
    ),
    "gemma2": Family(
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**WINDOWED)),
        **LLAMA | {"branch_norm": "post_attention_layernorm", "style": "sandwich", "gain_offset": 1.0},
    ),
    "gemma3": Family(
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**WINDOWED)),
        **LLAMA | {"branch_norm": "post_attention_layernorm", "style": "sandwich", "gain_offset": 1.0},
    ),
    "olmo2": Family(
        lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)),
        **LLAMA | {"branch_norm": "post_attention_layernorm", "style": "norm-on-output"},
    ),
    "t5-encoder": Family(
        lambda: hf.T5EncoderModel(
            hf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=12, num_layers=2, num_heads=HEADS, d_ff=48)
        ),
        "encoder.block.{}.layer.0",
        "SelfAttention.v",
        "SelfAttention.o",
        "pre-norm",
    ),
    "vit": Family(
        lambda: hf.ViTModel(
            hf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=HEADS,
                intermediate_size=48,
                image_size=16,
                patch_size=4,
            )
        ),
        "layers.{}",
        "attention.v_proj",
        "attention.o_proj",
        "pre-norm",
        single=True,
    ),
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the family with random weights, biases, γ and β, none of them at its initial value, in ``eval()``."""
    return randomized(FAMILIES[name].build, seed, dtype)


def randomized(make: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> Any:
    """A model with random parameters, none of them at its initial value, in ``eval()``."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.to(dtype)


def inputs(name: str, seed: int = 0, batch: int = 3, length: int = 11, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random token ids without special ones, or random pixels."""
    generator = torch.Generator().manual_seed(100 + seed)
    if name == "vit":
        return torch.randn(batch, 3, 16, 16, generator=generator).to(dtype)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
