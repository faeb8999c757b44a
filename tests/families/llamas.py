"""Decoders of text in the manner of LLaMA, which name their parts alike."""

from typing import Any

import transformers as hf

from tests.families.family import GROUPED, HEADS, LLAMA, TEXT, Family, last

WINDOW = 4
WIDE = GROUPED | {"head_dim": 12}
WINDOWED = GROUPED | {"sliding_window": WINDOW}
ALTERNATING = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = WINDOWED | {"head_dim": 12}
# One expert after the other: the grouped products that are chosen else know no float64.
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FEW_EXPERTS = MOE | {"num_experts": 4}
EXPERTS = FEW_EXPERTS | {"moe_intermediate_size": 24}
LOCAL_EXPERTS = MOE | {"num_local_experts": 4}
LATENT: dict[str, Any] = (
    TEXT
    | MOE
    | {
        "num_key_value_heads": HEADS,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 10,
    }
)


def also(*special: str) -> dict[str, Any]:
    """What is special beside grouped queries."""
    return LLAMA | {"special": ("grouped queries", *special)}


MIXTURE = also("mixture of experts")
MLA = LLAMA | {
    "value": "self_attn.kv_b_proj",
    "values": lambda output: output.reshape(len(output), -1, HEADS, 18)[..., 8:].flatten(-2),
    "special": ("latent values", "mixture of experts"),
}
SANDWICH = {"branch_norm": "post_attention_layernorm", "style": "sandwich"}
ON_OUTPUT = {"branch_norm": "post_attention_layernorm", "style": "norm-on-output"}

LLAMAS = {
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), **LLAMA),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**WINDOWED)), **also("sliding window")),
    "mixtral": Family(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, **LOCAL_EXPERTS)), **MIXTURE),
    "qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)), **LLAMA),
    "qwen2-moe": Family(
        lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=24)),
        **MIXTURE,
    ),
    "qwen3": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=12)), **LLAMA),
    "qwen3-moe": Family(lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**WIDE, **EXPERTS)), **MIXTURE),
    "gemma": Family(lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, head_dim=12)), **LLAMA),
    "gemma2": Family(
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GEMMA, attn_logit_softcapping=1.0)),
        **also("sliding window", "soft-capping") | SANDWICH | {"gain_offset": 1.0},
    ),
    "gemma3": Family(
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA)),
        **also("sliding window") | SANDWICH | {"gain_offset": 1.0},
    ),
    "phi3": Family(
        lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**WINDOWED)),
        **also("sliding window") | {"value": "self_attn.qkv_proj", "values": last(16)},
    ),
    "phimoe": Family(lambda: hf.PhimoeForCausalLM(hf.PhimoeConfig(**GROUPED, **LOCAL_EXPERTS)), **MIXTURE),
    "olmo": Family(lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**GROUPED)), **LLAMA),
    "olmo2": Family(lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)), **LLAMA | ON_OUTPUT),
    "olmo3": Family(lambda: hf.Olmo3ForCausalLM(hf.Olmo3Config(**ALTERNATING)), **also("sliding window") | ON_OUTPUT),
    "olmoe": Family(lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**GROUPED, **FEW_EXPERTS)), **MIXTURE),
    "cohere": Family(lambda: hf.CohereForCausalLM(hf.CohereConfig(**GROUPED)), **LLAMA | {"style": "parallel"}),
    "cohere2": Family(
        lambda: hf.Cohere2ForCausalLM(hf.Cohere2Config(**ALTERNATING)),
        **also("sliding window") | {"style": "parallel"},
    ),
    "stablelm": Family(lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**GROUPED)), **LLAMA),
    "stablelm-parallel": Family(
        lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**GROUPED, use_parallel_residual=True)),
        **LLAMA | {"style": "parallel"},
    ),
    "starcoder2": Family(lambda: hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**WINDOWED)), **also("sliding window")),
    "granite": Family(
        lambda: hf.GraniteForCausalLM(
            hf.GraniteConfig(**GROUPED, residual_multiplier=0.3, attention_multiplier=0.2, embedding_multiplier=3.0)
        ),
        **also("residual multiplier") | {"branch_factor": "residual_multiplier"},
    ),
    "granite-moe": Family(
        lambda: hf.GraniteMoeForCausalLM(hf.GraniteMoeConfig(**GROUPED, **LOCAL_EXPERTS, residual_multiplier=0.4)),
        **also("residual multiplier", "mixture of experts") | {"branch_factor": "residual_multiplier"},
    ),
    "nemotron": Family(lambda: hf.NemotronForCausalLM(hf.NemotronConfig(**GROUPED)), **LLAMA),
    "smollm3": Family(
        lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0])),
        **LLAMA | {"positions": "rotary in some layers"},
    ),
    "glm": Family(lambda: hf.GlmForCausalLM(hf.GlmConfig(**GROUPED, head_dim=8)), **LLAMA),
    "glm4": Family(
        lambda: hf.Glm4ForCausalLM(hf.Glm4Config(**GROUPED, head_dim=8)),
        **LLAMA | SANDWICH | {"branch_norm": "post_self_attn_layernorm"},
    ),
    "exaone4": Family(
        lambda: hf.Exaone4ForCausalLM(hf.Exaone4Config(**ALTERNATING)), **also("sliding window") | ON_OUTPUT
    ),
    "apertus": Family(lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**GROUPED)), **LLAMA),
    "arcee": Family(lambda: hf.ArceeForCausalLM(hf.ArceeConfig(**GROUPED)), **LLAMA),
    "ernie4-5": Family(lambda: hf.Ernie4_5ForCausalLM(hf.Ernie4_5Config(**GROUPED, head_dim=12)), **LLAMA),
    "seed-oss": Family(lambda: hf.SeedOssForCausalLM(hf.SeedOssConfig(**GROUPED, head_dim=12)), **LLAMA),
    "llama4": Family(
        lambda: hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(**GROUPED, head_dim=8, intermediate_size_mlp=48, **LOCAL_EXPERTS)
        ),
        **MIXTURE,
    ),
    "deepseek-v2": Family(lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**LATENT)), **MLA),
    "deepseek-v3": Family(lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT)), **MLA),
    "gpt-oss": Family(
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**WINDOWED, **LOCAL_EXPERTS, head_dim=8)),
        **also("attention sinks", "sliding window", "mixture of experts"),
    ),
}
