"""Tiny models of the architectures that are refused, by the names in the library's table of reasons."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.encoder_decoders import BART, T5
from tests.families import GROUPED, HEADS, TEXT, VOCABULARY
from tests.families.family import new
from tests.families.further_signals import SOUND
from tests.families.picture_inputs import IMAGE_TOKEN
from tests.families.vision import IMAGE
from tests.hybrids import HYBRIDS, MAMBA

STAGES: dict[str, Any] = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
DAVIT = STAGES | {"embed_dim": [8, 16], "num_groups": [2, 2], "projection_dim": 32}
DAVIT |= {"patch_size": [4, 2], "patch_stride": [4, 2], "patch_padding": [0, 0], "patch_prenorm": [False, True]}
PROPHETNET = {key: BART[key] for key in BART if "_layers" not in key and "_heads" not in key} | {"hidden_size": 32}
PROPHETNET |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2)
PROPHETNET |= dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS)
BLOCKS: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}

REFUSED: dict[str, Callable[[], nn.Module]] = {
    "xlnet": new("XLNetModel", vocab_size=60, d_model=32, n_layer=2, n_head=HEADS, d_inner=48),
    "longformer": new("LongformerModel", **TEXT, attention_window=4),
    "led": new("LEDForConditionalGeneration", **BART, attention_window=4, max_encoder_position_embeddings=64),
    "longt5": new("LongT5ForConditionalGeneration", **T5, local_radius=2),
    "big_bird": new("BigBirdModel", **TEXT, attention_type="block_sparse", block_size=2, num_random_blocks=1),
    "pegasus_x": new("PegasusXForConditionalGeneration", **BART, block_size=4),
    "mobilebert": new(
        "MobileBertModel", **TEXT, embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2
    ),
    "squeezebert": new("SqueezeBertModel", **TEXT, embedding_size=32),
    "convbert": new("ConvBertModel", **TEXT, embedding_size=16),
    "funnel": new("FunnelModel", vocab_size=60, d_model=32, block_sizes=[1, 1], n_head=HEADS, d_head=8, d_inner=48),
    "ibert": new("IBertModel", **TEXT),
    "nystromformer": new("NystromformerModel", **TEXT, num_landmarks=4, segment_means_seq_len=16),
    "fnet": new("FNetModel", **{key: TEXT[key] for key in TEXT if key != "num_attention_heads"}),
    "canine": new(
        "CanineModel",
        **{key: TEXT[key] for key in TEXT if key != "vocab_size"},
        num_hash_buckets=16,
        local_transformer_stride=8,
    ),
    "prophetnet": new("ProphetNetForConditionalGeneration", **PROPHETNET),
    "jetmoe": new(
        "JetMoeForCausalLM",
        **{k: v for k, v in GROUPED.items() if k != "num_attention_heads"},
        kv_channels=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "diffllama": new("DiffLlamaForCausalLM", **GROUPED),
    "granite_swa": new("GraniteSWAForCausalLM", **GROUPED),
    "gpt_neox_japanese": new(
        "GPTNeoXJapaneseForCausalLM",
        **{k: v for k, v in TEXT.items() if k != "intermediate_size"},
        intermediate_multiple_size=2,
    ),
    "mamba": new("MambaForCausalLM", **BLOCKS, state_size=4),
    "rwkv": new("RwkvForCausalLM", **BLOCKS, attention_hidden_size=32),
    "blip-2 (T5)": lambda: hf.Blip2ForConditionalGeneration(
        hf.Blip2Config(
            vision_config=hf.Blip2VisionConfig(**IMAGE, initializer_range=0.02),
            qformer_config=hf.Blip2QFormerConfig(**TEXT, encoder_hidden_size=32, cross_attention_frequency=2),
            text_config=hf.T5Config(**T5 | {"vocab_size": VOCABULARY, "pad_token_id": 0}),
            num_query_tokens=4,
            image_token_index=IMAGE_TOKEN,
        )
    ),
    "florence2": new(
        "Florence2ForConditionalGeneration",
        text_config=BART | {"vocab_size": VOCABULARY, "model_type": "bart"},
        vision_config=DAVIT,
        image_token_id=IMAGE_TOKEN,
    ),
    "git": new("GitForCausalLM", **TEXT, vision_config=dict(IMAGE)),
    "kosmos-2": new(
        "Kosmos2ForConditionalGeneration",
        text_config=TEXT | {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": HEADS},
        vision_config=dict(IMAGE),
        latent_query_num=4,
    ),
    "wavlm": new("WavLMModel", **SOUND),
    "wav2vec2-conformer": new("Wav2Vec2ConformerModel", **SOUND),
    "swin": new("SwinModel", **STAGES, image_size=16, patch_size=2),
    "segformer": new(
        "SegformerModel",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 2],
        mlp_ratios=[2, 2],
    ),
    "pvt_v2": new("PvtV2Model", image_size=32, hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4]),
    "sam_vision_model": new("SamVisionModel", **IMAGE, output_channels=16, window_size=2, global_attn_indexes=[1]),
    "hiera": new(
        "HieraModel",
        embed_dim=8,
        image_size=[32, 32],
        depths=[1, 1],
        num_heads=[1, 2],
        num_query_pool=1,
        masked_unit_size=[2, 2],
        query_stride=[2, 2],
    ),
    "mlcd_vision_model": new("MLCDVisionModel", **IMAGE),
    "gemma3n_text": new(
        "Gemma3nForCausalLM",
        **GROUPED,
        head_dim=8,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
    ),
    "falcon_h1": new(
        "FalconH1ForCausalLM", **GROUPED, **MAMBA, mamba_d_ssm=64, attention_out_multiplier=0.7, ssm_out_multiplier=1.3
    ),
    "zamba2": HYBRIDS["zamba2"],
}

# Pixels of a side of an image, and its places in the text.
MARKED = {"blip-2 (T5)": (16, 4), "florence2": (32, 17), "git": (16, 0), "kosmos-2": (16, 4)}


def inputs(name: str, model: Any) -> dict[str, Tensor]:
    """What the model reads."""
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 640, generator=generator)}
    if model.main_input_name == "pixel_values" and name not in MARKED:
        size = 32 if name in ("pvt_v2", "hiera", "segformer") else 16
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    if name in MARKED:
        size, places = MARKED[name]
        images = torch.randn(2, 3, size, size, generator=generator)
        text = torch.tensor([[1] + [IMAGE_TOKEN] * places + [5, 6], [1] + [IMAGE_TOKEN] * places + [7, 8]])
        found = {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": images}
        if name == "kosmos-2":
            return found | {"image_embeds_position_mask": text == IMAGE_TOKEN}
        return found if name == "git" else found | {"decoder_input_ids": torch.tensor([[1, 5, 7], [1, 6, 8]])}
    length = {"big_bird": 32, "nystromformer": 16}.get(name, 12)
    ids = {"input_ids": torch.randint(3, 40, (2, length), generator=generator)}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = torch.randint(3, 40, (2, 6), generator=generator)
    return ids
