"""Decoders of text in the manner of LLaMA, which name their parts alike."""

from typing import Any

from tests.families.family import GROUPED, HEADS, LLAMA, TEXT, Family, last, new

WINDOW = 4
WIDE = GROUPED | {"head_dim": 12}
WINDOWED = GROUPED | {"sliding_window": WINDOW}
ALTERNATING = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = WINDOWED | {"head_dim": 12}
# Before transformers 5.21, attention that is not eager left the cap out.
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 1.0, "attn_implementation": "eager"}
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
    "llama": Family(new("LlamaForCausalLM", **GROUPED), **LLAMA),
    "mistral": Family(new("MistralForCausalLM", **WINDOWED), **also("sliding window")),
    "mixtral": Family(new("MixtralForCausalLM", **GROUPED, **LOCAL_EXPERTS), **MIXTURE),
    "qwen2": Family(new("Qwen2ForCausalLM", **GROUPED), **LLAMA),
    "qwen2-moe": Family(
        new("Qwen2MoeForCausalLM", **GROUPED, **EXPERTS, shared_expert_intermediate_size=24), **MIXTURE
    ),
    "qwen3": Family(new("Qwen3ForCausalLM", **GROUPED, head_dim=12), **LLAMA),
    "qwen3-moe": Family(new("Qwen3MoeForCausalLM", **WIDE, **EXPERTS), **MIXTURE),
    "gemma": Family(new("GemmaForCausalLM", **GROUPED, head_dim=12), **LLAMA),
    "gemma2": Family(
        new("Gemma2ForCausalLM", **GEMMA, **CAPPED),
        **also("sliding window", "soft-capping") | SANDWICH | {"gain_offset": 1.0},
    ),
    "gemma3": Family(new("Gemma3ForCausalLM", **GEMMA), **also("sliding window") | SANDWICH | {"gain_offset": 1.0}),
    "phi3": Family(
        new("Phi3ForCausalLM", **WINDOWED),
        **also("sliding window") | {"value": "self_attn.qkv_proj", "values": last(16)},
    ),
    "phimoe": Family(new("PhimoeForCausalLM", **GROUPED, **LOCAL_EXPERTS), **MIXTURE),
    "olmo": Family(new("OlmoForCausalLM", **GROUPED), **LLAMA),
    "olmo2": Family(new("Olmo2ForCausalLM", **GROUPED), **LLAMA | ON_OUTPUT),
    "olmo3": Family(new("Olmo3ForCausalLM", **ALTERNATING), **also("sliding window") | ON_OUTPUT),
    "olmoe": Family(new("OlmoeForCausalLM", **GROUPED, **FEW_EXPERTS), **MIXTURE),
    "cohere": Family(new("CohereForCausalLM", **GROUPED), **LLAMA | {"style": "parallel"}),
    "cohere2": Family(new("Cohere2ForCausalLM", **ALTERNATING), **also("sliding window") | {"style": "parallel"}),
    "stablelm": Family(new("StableLmForCausalLM", **GROUPED), **LLAMA),
    "stablelm-parallel": Family(
        new("StableLmForCausalLM", **GROUPED, use_parallel_residual=True), **LLAMA | {"style": "parallel"}
    ),
    "starcoder2": Family(new("Starcoder2ForCausalLM", **WINDOWED), **also("sliding window")),
    "granite": Family(
        new(
            "GraniteForCausalLM", **GROUPED, residual_multiplier=0.3, attention_multiplier=0.2, embedding_multiplier=3.0
        ),
        **also("residual multiplier") | {"branch_factor": "residual_multiplier"},
    ),
    "granite-moe": Family(
        new("GraniteMoeForCausalLM", **GROUPED, **LOCAL_EXPERTS, residual_multiplier=0.4),
        **also("residual multiplier", "mixture of experts") | {"branch_factor": "residual_multiplier"},
    ),
    "nemotron": Family(new("NemotronForCausalLM", **GROUPED), **LLAMA),
    "smollm3": Family(
        new("SmolLM3ForCausalLM", **GROUPED, no_rope_layers=[1, 0]), **LLAMA | {"positions": "rotary in some layers"}
    ),
    "glm": Family(new("GlmForCausalLM", **GROUPED, head_dim=8), **LLAMA),
    "glm4": Family(
        new("Glm4ForCausalLM", **GROUPED, head_dim=8), **LLAMA | SANDWICH | {"branch_norm": "post_self_attn_layernorm"}
    ),
    "exaone4": Family(new("Exaone4ForCausalLM", **ALTERNATING), **also("sliding window") | ON_OUTPUT),
    "apertus": Family(new("ApertusForCausalLM", **GROUPED), **LLAMA),
    "arcee": Family(new("ArceeForCausalLM", **GROUPED), **LLAMA),
    "ernie4-5": Family(new("Ernie4_5ForCausalLM", **GROUPED, head_dim=12), **LLAMA),
    "seed-oss": Family(new("SeedOssForCausalLM", **GROUPED, head_dim=12), **LLAMA),
    "llama4": Family(
        new("Llama4ForCausalLM", **GROUPED, head_dim=8, intermediate_size_mlp=48, **LOCAL_EXPERTS), **MIXTURE
    ),
    "deepseek-v2": Family(new("DeepseekV2ForCausalLM", **LATENT), **MLA),
    "deepseek-v3": Family(new("DeepseekV3ForCausalLM", **LATENT), **MLA),
    "gpt-oss": Family(
        new("GptOssForCausalLM", **WINDOWED, **LOCAL_EXPERTS, head_dim=8),
        **also("attention sinks", "sliding window", "mixture of experts"),
    ),
}
