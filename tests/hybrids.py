"""Tiny models whose layers mix positions in other ways than by attention alone."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.families import GROUPED, TEXT
from tests.families.family import new
from tests.families.further_decoders import LINEAR_ATTENTION

MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
FULL = "full_attention"
THREE = GROUPED | {"num_hidden_layers": 3}
JAMBA: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 2, "use_mamba_kernels": False, "mamba_dt_rank": 4}
JAMBA |= dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2)
JAMBA |= dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1)

HYBRIDS: dict[str, Callable[[], nn.Module]] = {
    "jamba": new("JambaForCausalLM", **GROUPED | JAMBA),
    "bamba": new("BambaForCausalLM", **THREE, attn_layer_indices=[0, 2], **MAMBA),
    "granite-moe-hybrid": new(
        "GraniteMoeHybridForCausalLM",
        **THREE | MAMBA | {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 24},
        layer_types=["attention", "mamba", "attention"],
    ),
    "falcon-h1": new("FalconH1ForCausalLM", **GROUPED, mamba_d_ssm=64, **MAMBA),
    "nemotron-h": new(
        "NemotronHForCausalLM",
        **{key: value for key, value in GROUPED.items() if key != "num_hidden_layers"},
        layers_block_type=["attention", "mamba", "attention"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=8,
    ),
    "zamba2": new(
        "Zamba2ForCausalLM",
        **GROUPED | {"num_hidden_layers": 4, "num_key_value_heads": 4},
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=4,
        use_mem_rope=True,
        adapter_rank=4,
    ),
    "qwen3-next": new(
        "Qwen3NextForCausalLM",
        **LINEAR_ATTENTION | THREE | {"layer_types": [FULL, "linear_attention", FULL]},
        num_experts=0,
        mlp_only_layers=[0, 1, 2],
    ),
    "lfm2": new("Lfm2ForCausalLM", **THREE, layer_types=[FULL, "conv", FULL], block_multiple_of=8),
    "recurrent-gemma": new(
        "RecurrentGemmaForCausalLM",
        **{key: value for key, value in THREE.items() if key != "max_position_embeddings"},
        head_dim=8,
        block_types=["recurrent", "attention"],
        lru_width=32,
        attention_window_size=64,
    ),
    "minimax": new("MiniMaxForCausalLM", **THREE, layer_types=[FULL, "linear_attention", FULL], num_local_experts=2),
    "deberta-v2 with a convolution": new(
        "DebertaV2Model", **TEXT | {"conv_kernel_size": 3, "conv_act": "gelu", "attn_implementation": "eager"}
    ),
}
