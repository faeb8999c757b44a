"""Further decoders of text, for each of which one test checks everything at once."""

from typing import Any

import transformers as hf
from torch import Tensor
from torch.nn import functional

from tests.families.decoders import FUSED, GPT, GPT2, OPT, PERSIMMON
from tests.families.family import GROUPED, HEADS, LLAMA, TEXT, VOCABULARY, Family, new
from tests.families.llamas import (
    ALTERNATING,
    CAPPED,
    EXPERTS,
    FEW_EXPERTS,
    LATENT,
    LOCAL_EXPERTS,
    MIXTURE,
    MLA,
    MOE,
    SANDWICH,
    WINDOWED,
    also,
)

BARE = LLAMA | {"layer": "layers.{}"}
EAGER: dict[str, Any] = {"experts_implementation": "eager"}
ROUTED: dict[str, Any] = MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24}


def second_half(_: Any, output: Tensor) -> Tensor:
    """The sigmoid of the second half of each head's queries."""
    gate: Tensor = output.unflatten(-1, (HEADS, -1)).chunk(2, dim=-1)[1]
    return gate.flatten(-2).sigmoid()


def softplus(_: Any, output: Tensor) -> Tensor:
    """The softplus, in single precision, for each head."""
    return functional.softplus(output.float()).double().repeat_interleave(8, -1)


def gain_over_sigma(norm: Any, inputs: Tensor) -> Tensor:
    """What an RMSNorm multiplies its inputs by."""
    factor: Tensor = (
        norm.weight.detach() / (inputs.double().square().mean(-1, keepdim=True) + norm.variance_epsilon) ** 0.5
    )
    return factor


GATED = {"gate": ("self_attn.q_proj", "output", second_half), "special": ("grouped queries", "gated attention")}
LINEAR_ATTENTION = GROUPED | {"layer_types": ["full_attention", "full_attention"], "head_dim": 8}
LINEAR_ATTENTION |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
LINEAR_ATTENTION |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 24, "head_dim": 8}
SHARED = GROUPED | LOCAL_EXPERTS | {"shared_intermediate_size": 24, "residual_multiplier": 0.4}
ERNIE: dict[str, Any] = EAGER | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
HALF: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64}
HALF |= {"decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": HEADS}
FURTHER_DECODERS = {
    "qwen3-next": Family(new("Qwen3NextForCausalLM", **LINEAR_ATTENTION | SHARED_EXPERT), **LLAMA | GATED),
    "qwen3-5": Family(new("Qwen3_5ForCausalLM", **LINEAR_ATTENTION), **LLAMA | GATED),
    "afmoe": Family(
        new("AfmoeForCausalLM", **ALTERNATING, **EXPERTS, num_shared_experts=1, num_dense_layers=1, head_dim=8),
        **also("sliding window", "mixture of experts", "gated attention")
        | SANDWICH
        | {"gate": ("self_attn.gate_proj", "output", lambda _, output: output.sigmoid())},
    ),
    "laguna": Family(
        new("LagunaForCausalLM", **GROUPED, **SHARED_EXPERT),
        **also("mixture of experts", "gated attention") | {"gate": ("self_attn.g_proj", "output", softplus)},
    ),
    "granite-moe-shared": Family(
        new("GraniteMoeSharedForCausalLM", **SHARED),
        **also("residual multiplier", "mixture of experts") | {"branch_factor": "residual_multiplier"},
    ),
    "granite-moe-hybrid": Family(
        new("GraniteMoeHybridForCausalLM", **SHARED, layer_types=["attention"] * 2, mamba_n_heads=4, mamba_d_head=16),
        **also("residual multiplier", "mixture of experts") | {"branch_factor": "residual_multiplier"},
    ),
    "bitnet": Family(
        new("BitNetForCausalLM", **GROUPED), **LLAMA | {"gate": ("self_attn.attn_sub_norm", "input", gain_over_sigma)}
    ),
    "ctrl": Family(
        new("CTRLLMHeadModel", **GPT2, dff=48),
        **GPT | {"value": "multi_head_attention.Wv", "projection": "multi_head_attention.dense"},
        positions="sinusoidal",
    ),
    "imagegpt": Family(new("ImageGPTModel", **GPT2), **GPT | FUSED | {"layer": "h.{}", "centered": False}),
    "xglm": Family(
        new("XGLMForCausalLM", **TEXT, ffn_dim=48),
        **OPT | {"layer": "model.layers.{}", "positions": "sinusoidal"},
        narrow=True,
    ),
    "trocr": Family(
        new("TrOCRForCausalLM", **HALF),
        **OPT | {"style": "post-norm", "final_norm": "self_attn_layer_norm", "single": False},
    ),
    "bigbird-pegasus": Family(new("BigBirdPegasusForCausalLM", **HALF, encoder_layers=2), **OPT),
    "aria-text": Family(new("AriaTextForCausalLM", **GROUPED, moe_num_experts=4, moe_topk=2), **MIXTURE, narrow=True),
    "cohere2-moe": Family(
        new("Cohere2MoeForCausalLM", **ALTERNATING, **FEW_EXPERTS, head_dim=8),
        **also("sliding window", "mixture of experts") | {"style": "parallel"},
    ),
    "cwm": Family(new("CwmForCausalLM", **ALTERNATING, head_dim=8), **also("sliding window")),
    "doge": Family(
        new("DogeForCausalLM", **GROUPED),
        **LLAMA | {"residual_factor": "input_residual", "special": ("grouped queries", "residual scale")},
    ),
    "emu3": Family(new("Emu3ForCausalLM", **GROUPED), **LLAMA),
    "ernie4-5-moe": Family(new("Ernie4_5_MoeForCausalLM", **GROUPED, **ERNIE, moe_intermediate_size=24), **MIXTURE),
    "exaone-moe": Family(
        new("ExaoneMoeForCausalLM", **ALTERNATING, **EXPERTS), **also("sliding window", "mixture of experts")
    ),
    "flex-olmo": Family(
        new("FlexOlmoForCausalLM", **GROUPED, **FEW_EXPERTS),
        **MIXTURE | {"branch_norm": "post_attention_layernorm", "style": "norm-on-output"},
    ),
    "flint": Family(
        new("FlintForCausalLM", **ALTERNATING, **SHARED_EXPERT, mlp_only_layers=[0]),
        **also("sliding window", "mixture of experts"),
    ),
    "gemma4-unified": Family(
        new("Gemma4UnifiedForCausalLM", **ALTERNATING, head_dim=8),
        **also("sliding window")
        | SANDWICH
        | {"value": "self_attn.v_norm", "values": lambda output: output.flatten(-2)},
    ),
    "glm4-moe": Family(new("Glm4MoeForCausalLM", **GROUPED, **ROUTED, first_k_dense_replace=1), **MIXTURE),
    "glm4-moe-lite": Family(
        new(
            "Glm4MoeLiteForCausalLM",
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            mlp_layer_types=["dense", "sparse"],
        ),
        **MLA,
    ),
    "dots1": Family(new("Dots1ForCausalLM", **GROUPED, **ROUTED, first_k_dense_replace=1), **MIXTURE),
    "helium": Family(new("HeliumForCausalLM", **GROUPED, head_dim=8), **LLAMA),
    "hunyuan-v1-dense": Family(new("HunYuanDenseV1ForCausalLM", **GROUPED, head_dim=8), **LLAMA),
    "hunyuan-v1-moe": Family(
        new("HunYuanMoEV1ForCausalLM", **GROUPED, num_experts=4, moe_topk=2, head_dim=8, **EAGER), **MIXTURE
    ),
    "hy-v3": Family(new("HYV3ForCausalLM", **GROUPED, **EXPERTS, head_dim=8), **MIXTURE, narrow=True),
    "hyperclovax": Family(
        new("HyperCLOVAXForCausalLM", **GROUPED, head_dim=8), **LLAMA | SANDWICH | {"branch_norm": "post_norm1"}
    ),
    "jais2": Family(new("Jais2ForCausalLM", **GROUPED, head_dim=8), **LLAMA),
    "kolibri1": Family(
        new("Kolibri1ForCausalLM", **ALTERNATING, **SHARED_EXPERT),
        **also("sliding window", "mixture of experts") | SANDWICH | {"branch_norm": "post_self_attn_layernorm"},
    ),
    "mellum": Family(
        new("MellumForCausalLM", **ALTERNATING, **EXPERTS, head_dim=8), **also("sliding window", "mixture of experts")
    ),
    "mimo-v2-flash": Family(
        new("MiMoV2FlashForCausalLM", **ALTERNATING, **ROUTED, head_dim=8, v_head_dim=12),
        **also("sliding window", "mixture of experts") | {"values": lambda output: 0.707 * output},
    ),
    "minimax-m2": Family(new("MiniMaxM2ForCausalLM", **GROUPED, **LOCAL_EXPERTS, head_dim=8), **MIXTURE),
    "ministral": Family(new("MinistralForCausalLM", **WINDOWED, head_dim=8), **also("sliding window")),
    "ministral3": Family(new("Ministral3ForCausalLM", **GROUPED, head_dim=8), **LLAMA),
    "mllama-text": Family(new("MllamaForCausalLM", **GROUPED, cross_attention_layers=[]), **LLAMA),
    "modernbert-decoder": Family(
        new("ModernBertDecoderForCausalLM", **TEXT, cls_token_id=1, sep_token_id=2, local_attention=8),
        **LLAMA | {"value": "attn.v_proj", "projection": "attn.Wo", "special": ("sliding window",)},
    ),
    "molmo2-text": Family(new("Molmo2TextModel", **GROUPED, head_dim=8, additional_vocab_size=4), **BARE),
    "nanochat": Family(new("NanoChatForCausalLM", **GROUPED), **LLAMA),
    "qwen3-vl-text": Family(new("Qwen3VLTextModel", **GROUPED, head_dim=8), **BARE),
    "qwen3-vl-moe-text": Family(
        new("Qwen3VLMoeTextModel", **GROUPED, **EXPERTS, head_dim=8), **MIXTURE | {"layer": "layers.{}"}
    ),
    "solar-open": Family(new("SolarOpenForCausalLM", **GROUPED, **ROUTED, head_dim=8), **MIXTURE),
    "vaultgemma": Family(
        new("VaultGemmaForCausalLM", **ALTERNATING, **CAPPED, head_dim=8),
        **also("sliding window", "soft-capping"),
    ),
    "minimax-m3-text": Family(new("MiniMaxM3VLForCausalLM", **GROUPED, **LOCAL_EXPERTS, head_dim=8), **MIXTURE),
    "persimmon-fuyu": Family(
        lambda: hf.FuyuForCausalLM(hf.FuyuConfig(**TEXT, text_config=hf.PersimmonConfig(**TEXT).to_dict())),
        **PERSIMMON | {"layer": "model.language_model.layers.{}"},
    ),
}
