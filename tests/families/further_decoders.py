"""Further decoders of text, for each of which one test checks everything at once."""

from typing import Any

import transformers as hf
from torch import Tensor
from torch.nn import functional

from tests.families.decoders import FUSED, GPT, GPT2, OPT
from tests.families.family import GROUPED, HEADS, LLAMA, TEXT, VOCABULARY, Family, each_last
from tests.families.llamas import (
    ALTERNATING,
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


def gain_over_sigma(norm: Any, inputs: Tensor) -> Tensor:
    """What an RMSNorm multiplies its inputs by."""
    factor: Tensor = (
        norm.weight.detach() / (inputs.double().square().mean(-1, keepdim=True) + norm.variance_epsilon) ** 0.5
    )
    return factor


GATED = {"gate": ("self_attn.q_proj", "output", second_half), "special": ("grouped queries", "gated attention")}
LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["full_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FURTHER_DECODERS = {
    "qwen3-next": Family(
        lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(**GROUPED, **LINEAR_ATTENTION, **EXPERTS, head_dim=8, shared_expert_intermediate_size=24)
        ),
        **LLAMA | GATED,
    ),
    "qwen3-5": Family(
        lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**GROUPED, **LINEAR_ATTENTION, head_dim=8)),
        **LLAMA | GATED,
    ),
    "afmoe": Family(
        lambda: hf.AfmoeForCausalLM(
            hf.AfmoeConfig(**ALTERNATING, **EXPERTS, num_shared_experts=1, num_dense_layers=1, head_dim=8)
        ),
        **also("sliding window", "mixture of experts", "gated attention")
        | SANDWICH
        | {"gate": ("self_attn.gate_proj", "output", lambda _, output: output.sigmoid())},
    ),
    "laguna": Family(
        lambda: hf.LagunaForCausalLM(
            hf.LagunaConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=24, head_dim=8)
        ),
        **also("mixture of experts", "gated attention")
        | {
            "gate": (
                "self_attn.g_proj",
                "output",
                lambda _, output: functional.softplus(output.float()).double().repeat_interleave(8, -1),
            )
        },
    ),
    "granite-moe-shared": Family(
        lambda: hf.GraniteMoeSharedForCausalLM(
            hf.GraniteMoeSharedConfig(**GROUPED, **LOCAL_EXPERTS, shared_intermediate_size=24, residual_multiplier=0.4)
        ),
        **also("residual multiplier", "mixture of experts") | {"branch_factor": "residual_multiplier"},
    ),
    "granite-moe-hybrid": Family(
        lambda: hf.GraniteMoeHybridForCausalLM(
            hf.GraniteMoeHybridConfig(
                **GROUPED,
                **LOCAL_EXPERTS,
                layer_types=["attention", "attention"],
                shared_intermediate_size=24,
                residual_multiplier=0.4,
                mamba_n_heads=4,
                mamba_d_head=16,
            )
        ),
        **also("residual multiplier", "mixture of experts") | {"branch_factor": "residual_multiplier"},
    ),
    "bitnet": Family(
        lambda: hf.BitNetForCausalLM(hf.BitNetConfig(**GROUPED)),
        **LLAMA | {"gate": ("self_attn.attn_sub_norm", "input", gain_over_sigma)},
    ),
    "ctrl": Family(
        lambda: hf.CTRLLMHeadModel(hf.CTRLConfig(**GPT2, dff=48)),
        **GPT | {"value": "multi_head_attention.Wv", "projection": "multi_head_attention.dense"},
        positions="sinusoidal",
    ),
    "imagegpt": Family(
        lambda: hf.ImageGPTModel(hf.ImageGPTConfig(**GPT2)),
        **GPT | FUSED | {"layer": "h.{}", "centered": False},
    ),
    "xglm": Family(
        lambda: hf.XGLMForCausalLM(
            hf.XGLMConfig(
                vocab_size=VOCABULARY,
                d_model=32,
                ffn_dim=48,
                num_layers=2,
                attention_heads=HEADS,
                max_position_embeddings=64,
            )
        ),
        **OPT | {"layer": "model.layers.{}", "positions": "sinusoidal"},
        narrow=True,
    ),
    "trocr": Family(
        lambda: hf.TrOCRForCausalLM(
            hf.TrOCRConfig(
                vocab_size=VOCABULARY,
                d_model=32,
                decoder_ffn_dim=48,
                decoder_layers=2,
                decoder_attention_heads=HEADS,
                max_position_embeddings=64,
            )
        ),
        **OPT | {"style": "post-norm", "final_norm": "self_attn_layer_norm", "single": False},
    ),
    "bigbird-pegasus": Family(
        lambda: hf.BigBirdPegasusForCausalLM(
            hf.BigBirdPegasusConfig(
                encoder_layers=2,
                vocab_size=VOCABULARY,
                d_model=32,
                decoder_ffn_dim=48,
                decoder_layers=2,
                decoder_attention_heads=HEADS,
                max_position_embeddings=64,
            )
        ),
        **OPT,
    ),
    "aria-text": Family(
        lambda: hf.AriaTextForCausalLM(hf.AriaTextConfig(**GROUPED, moe_num_experts=4, moe_topk=2)),
        **MIXTURE,
        narrow=True,
    ),
    "cohere2-moe": Family(
        lambda: hf.Cohere2MoeForCausalLM(hf.Cohere2MoeConfig(**ALTERNATING, **FEW_EXPERTS, head_dim=8)),
        **also("sliding window", "mixture of experts") | {"style": "parallel"},
    ),
    "cwm": Family(lambda: hf.CwmForCausalLM(hf.CwmConfig(**ALTERNATING, head_dim=8)), **also("sliding window")),
    "doge": Family(
        lambda: hf.DogeForCausalLM(hf.DogeConfig(**GROUPED)),
        **LLAMA | {"residual_factor": "input_residual", "special": ("grouped queries", "residual scale")},
    ),
    "emu3": Family(lambda: hf.Emu3ForCausalLM(hf.Emu3TextConfig(**GROUPED)), **LLAMA),
    "ernie4-5-moe": Family(
        lambda: hf.Ernie4_5_MoeForCausalLM(
            hf.Ernie4_5_MoeConfig(
                **GROUPED,
                moe_num_experts=4,
                moe_k=2,
                moe_num_shared_experts=1,
                moe_intermediate_size=24,
                **EAGER,
            )
        ),
        **MIXTURE,
    ),
    "exaone-moe": Family(
        lambda: hf.ExaoneMoeForCausalLM(hf.ExaoneMoeConfig(**ALTERNATING, **EXPERTS)),
        **also("sliding window", "mixture of experts"),
    ),
    "flex-olmo": Family(
        lambda: hf.FlexOlmoForCausalLM(hf.FlexOlmoConfig(**GROUPED, **FEW_EXPERTS)),
        **MIXTURE | {"branch_norm": "post_attention_layernorm", "style": "norm-on-output"},
    ),
    "flint": Family(
        lambda: hf.FlintForCausalLM(
            hf.FlintConfig(
                **ALTERNATING, **EXPERTS, head_dim=8, shared_expert_intermediate_size=24, mlp_only_layers=[0]
            )
        ),
        **also("sliding window", "mixture of experts"),
    ),
    "gemma4-unified": Family(
        lambda: hf.Gemma4UnifiedForCausalLM(hf.Gemma4UnifiedTextConfig(**ALTERNATING, head_dim=8)),
        **also("sliding window")
        | SANDWICH
        | {"value": "self_attn.v_norm", "values": lambda output: output.flatten(-2)},
    ),
    "glm4-moe": Family(
        lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**GROUPED, **ROUTED, first_k_dense_replace=1)), **MIXTURE
    ),
    "glm4-moe-lite": Family(
        lambda: hf.Glm4MoeLiteForCausalLM(
            hf.Glm4MoeLiteConfig(
                **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
                mlp_layer_types=["dense", "sparse"],
            )
        ),
        **MLA,
    ),
    "dots1": Family(
        lambda: hf.Dots1ForCausalLM(hf.Dots1Config(**GROUPED, **ROUTED, first_k_dense_replace=1)), **MIXTURE
    ),
    "helium": Family(lambda: hf.HeliumForCausalLM(hf.HeliumConfig(**GROUPED, head_dim=8)), **LLAMA),
    "hunyuan-v1-dense": Family(
        lambda: hf.HunYuanDenseV1ForCausalLM(hf.HunYuanDenseV1Config(**GROUPED, head_dim=8)), **LLAMA
    ),
    "hunyuan-v1-moe": Family(
        lambda: hf.HunYuanMoEV1ForCausalLM(
            hf.HunYuanMoEV1Config(**GROUPED, num_experts=4, moe_topk=2, head_dim=8, **EAGER)
        ),
        **MIXTURE,
    ),
    "hy-v3": Family(
        lambda: hf.HYV3ForCausalLM(hf.HYV3Config(**GROUPED, **EXPERTS, head_dim=8)),
        **MIXTURE,
        narrow=True,
    ),
    "hyperclovax": Family(
        lambda: hf.HyperCLOVAXForCausalLM(hf.HyperCLOVAXConfig(**GROUPED, head_dim=8)),
        **LLAMA | SANDWICH | {"branch_norm": "post_norm1"},
    ),
    "jais2": Family(lambda: hf.Jais2ForCausalLM(hf.Jais2Config(**GROUPED, head_dim=8)), **LLAMA),
    "kolibri1": Family(
        lambda: hf.Kolibri1ForCausalLM(
            hf.Kolibri1Config(**ALTERNATING, **EXPERTS, head_dim=8, shared_expert_intermediate_size=24)
        ),
        **also("sliding window", "mixture of experts") | SANDWICH | {"branch_norm": "post_self_attn_layernorm"},
    ),
    "mellum": Family(
        lambda: hf.MellumForCausalLM(hf.MellumConfig(**ALTERNATING, **EXPERTS, head_dim=8)),
        **also("sliding window", "mixture of experts"),
    ),
    "mimo-v2-flash": Family(
        lambda: hf.MiMoV2FlashForCausalLM(
            hf.MiMoV2FlashConfig(
                **ALTERNATING, **MOE, n_routed_experts=4, moe_intermediate_size=24, head_dim=8, v_head_dim=12
            )
        ),
        **also("sliding window", "mixture of experts") | {"values": lambda output: 0.707 * output},
    ),
    "minimax-m2": Family(
        lambda: hf.MiniMaxM2ForCausalLM(hf.MiniMaxM2Config(**GROUPED, **LOCAL_EXPERTS, head_dim=8)), **MIXTURE
    ),
    "ministral": Family(
        lambda: hf.MinistralForCausalLM(hf.MinistralConfig(**WINDOWED, head_dim=8)), **also("sliding window")
    ),
    "ministral3": Family(lambda: hf.Ministral3ForCausalLM(hf.Ministral3Config(**GROUPED, head_dim=8)), **LLAMA),
    "mllama-text": Family(
        lambda: hf.MllamaForCausalLM(hf.MllamaTextConfig(**GROUPED, cross_attention_layers=[])), **LLAMA
    ),
    "modernbert-decoder": Family(
        lambda: hf.ModernBertDecoderForCausalLM(
            hf.ModernBertDecoderConfig(**TEXT, cls_token_id=1, sep_token_id=2, local_attention=8)
        ),
        **LLAMA | {"value": "attn.v_proj", "projection": "attn.Wo", "special": ("sliding window",)},
    ),
    "molmo2-text": Family(
        lambda: hf.Molmo2TextModel(hf.Molmo2TextConfig(**GROUPED, head_dim=8, additional_vocab_size=4)), **BARE
    ),
    "nanochat": Family(lambda: hf.NanoChatForCausalLM(hf.NanoChatConfig(**GROUPED)), **LLAMA),
    "qwen3-vl-text": Family(lambda: hf.Qwen3VLTextModel(hf.Qwen3VLTextConfig(**GROUPED, head_dim=8)), **BARE),
    "qwen3-vl-moe-text": Family(
        lambda: hf.Qwen3VLMoeTextModel(hf.Qwen3VLMoeTextConfig(**GROUPED, **EXPERTS, head_dim=8)),
        **MIXTURE | {"layer": "layers.{}"},
    ),
    "solar-open": Family(
        lambda: hf.SolarOpenForCausalLM(hf.SolarOpenConfig(**GROUPED, **ROUTED, head_dim=8)), **MIXTURE
    ),
    "vaultgemma": Family(
        lambda: hf.VaultGemmaForCausalLM(hf.VaultGemmaConfig(**ALTERNATING, head_dim=8, attn_logit_softcapping=1.0)),
        **also("sliding window", "soft-capping"),
    ),
    "minimax-m3-text": Family(
        lambda: hf.MiniMaxM3VLForCausalLM(hf.MiniMaxM3VLTextConfig(**GROUPED, **LOCAL_EXPERTS, head_dim=8)), **MIXTURE
    ),
    "persimmon-fuyu": Family(
        lambda: hf.FuyuForCausalLM(hf.FuyuConfig(**TEXT, text_config=hf.PersimmonConfig(**TEXT).to_dict())),
        **LLAMA
        | {
            "layer": "model.language_model.layers.{}",
            "value": "self_attn.query_key_value",
            "projection": "self_attn.dense",
            "values": each_last(HEADS, 8),
            "special": (),
        },
    ),
}
