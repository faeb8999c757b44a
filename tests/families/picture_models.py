"""Makes tiny vision-language models: a tower that reads pictures, and a text model that reads their patches."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.families.family import GROUPED, HEADS, TEXT, new
from tests.families.llamas import LOCAL_EXPERTS
from tests.families.picture_inputs import END, IMAGE_TOKEN, START, VIDEO_TOKEN
from tests.families.vision import IMAGE

TOKEN: dict[str, Any] = {"image_token_id": IMAGE_TOKEN}
TOKENS = TOKEN | {"video_token_id": VIDEO_TOKEN}
INDEX: dict[str, Any] = {"image_token_index": IMAGE_TOKEN}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
TILES: dict[str, Any] = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}

CLIP = IMAGE | {"model_type": "clip_vision_model"}
SIGLIP = IMAGE | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = IMAGE | {"model_type": "pixtral", "rope_parameters": ROPE}
LLAMA, MISTRAL, QWEN = (GROUPED | {"model_type": name} for name in ("llama", "mistral", "qwen2"))
OPT: dict[str, Any] = {
    **{name: TEXT[name] for name in TEXT if name not in ("intermediate_size", "bos_token_id", "eos_token_id")},
    "model_type": "opt",
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
}
QFORMER = TEXT | {"encoder_hidden_size": 32, "cross_attention_frequency": 2}


def qwen(name: str, **changes: Any) -> Callable[[], nn.Module]:
    text = GROUPED | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
    vision: dict[str, Any] = {"depth": 2, "num_heads": HEADS, "patch_size": 4, "temporal_patch_size": 2}
    vision |= {"spatial_merge_size": 2, "hidden_size": 32} | changes
    return new(
        name, text_config=text, vision_config=vision, **TOKENS, vision_start_token_id=START, vision_end_token_id=END
    )


def cohere(name: str, **changes: Any) -> Callable[[], nn.Module]:
    text = GROUPED | {"model_type": "cohere2", "sliding_window": 6}
    return new(name, vision_config=SIGLIP, text_config=text, downsample_factor=2, **TOKEN, **changes)


def idefics3(name: str) -> Callable[[], nn.Module]:
    return new(name, vision_config=IMAGE, text_config=LLAMA, **TOKEN, scale_factor=2, pad_token_id=0)


MLLAMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": HEADS,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
    "max_num_tiles": 2,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}
MLLAMA_TEXT = GROUPED | {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": ROPE}
LLAMA4_VISION = IMAGE | {
    "intermediate_size": 128,
    "pixel_shuffle_ratio": 0.5,
    "rope_parameters": ROPE,
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
}
PERCEIVER: dict[str, Any] = {
    "hidden_size": 32,
    "resampler_n_latents": 4,
    "resampler_depth": 2,
    "resampler_n_heads": HEADS,
    "resampler_head_dim": 8,
    "num_key_value_heads": 2,
}
LAYER_TYPES = ["sliding_attention", "full_attention"]

PICTURES: dict[str, Callable[[], nn.Module]] = {
    "llava": new("LlavaForConditionalGeneration", vision_config=CLIP, text_config=LLAMA, **TOKEN),
    "vip-llava": new(
        "VipLlavaForConditionalGeneration",
        vision_config=CLIP,
        text_config=LLAMA,
        **TOKEN | {"vision_feature_layers": [-2, -1]},
    ),
    "llava-next": new("LlavaNextForConditionalGeneration", vision_config=CLIP, text_config=LLAMA, **TOKEN, **TILES),
    "llava-onevision": new(
        "LlavaOnevisionForConditionalGeneration", vision_config=SIGLIP, text_config=QWEN, **TOKENS, **TILES
    ),
    "paligemma": new(
        "PaliGemmaForConditionalGeneration",
        vision_config=SIGLIP | {"projection_dim": 32},
        text_config=GROUPED | {"model_type": "gemma", "head_dim": 8},
        **TOKEN | {"projection_dim": 32},
    ),
    "gemma3-images": new(
        "Gemma3ForConditionalGeneration",
        vision_config=SIGLIP,
        text_config=GROUPED | {"head_dim": 8, "sliding_window": 6, "layer_types": LAYER_TYPES},
        **TOKEN | {"boi_token_id": START, "eoi_token_id": END, "mm_tokens_per_image": 4},
    ),
    "qwen2-vl": qwen("Qwen2VLForConditionalGeneration", embed_dim=32),
    "qwen2.5-vl": qwen(
        "Qwen2_5_VLForConditionalGeneration",
        out_hidden_size=32,
        intermediate_size=48,
        window_size=8,
        fullatt_block_indexes=[1],
    ),
    "qwen3-vl": qwen(
        "Qwen3VLForConditionalGeneration",
        out_hidden_size=32,
        intermediate_size=48,
        deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    ),
    "idefics3": idefics3("Idefics3ForConditionalGeneration"),
    "smolvlm": idefics3("SmolVLMForConditionalGeneration"),
    "internvl": new(
        "InternVLForConditionalGeneration",
        vision_config=IMAGE | {"image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.5},
        text_config=QWEN,
        **TOKEN | {"downsample_ratio": 0.5},
    ),
    "blip-2": new(
        "Blip2ForConditionalGeneration",
        vision_config=IMAGE | {"initializer_range": 0.02},
        qformer_config=QFORMER,
        text_config=OPT,
        **TOKEN | {"num_query_tokens": 4},
    ),
    "instruct-blip": new(
        "InstructBlipForConditionalGeneration",
        vision_config=IMAGE,
        qformer_config=QFORMER,
        text_config=OPT,
        **INDEX | {"num_query_tokens": 4},
    ),
    "mllama": new("MllamaForConditionalGeneration", vision_config=MLLAMA_VISION, text_config=MLLAMA_TEXT, **INDEX),
    "llama4-images": new(
        "Llama4ForConditionalGeneration",
        vision_config=LLAMA4_VISION,
        text_config=GROUPED | LOCAL_EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48},
        **INDEX,
    ),
    "pixtral": new(
        "LlavaForConditionalGeneration",
        vision_config=PIXTRAL,
        text_config=LLAMA,
        **TOKEN | {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "mistral3": new(
        "Mistral3ForConditionalGeneration",
        vision_config=PIXTRAL,
        text_config=MISTRAL,
        **TOKEN | {"spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "aya-vision": cohere("AyaVisionForConditionalGeneration"),
    "cohere2-vision": cohere("Cohere2VisionForConditionalGeneration", alignment_intermediate_size=32),
    "idefics2": new(
        "Idefics2ForConditionalGeneration",
        vision_config=IMAGE,
        perceiver_config=PERCEIVER,
        text_config=MISTRAL,
        **TOKEN,
    ),
    "blip": new(
        "BlipForConditionalGeneration",
        text_config=TEXT | {"encoder_hidden_size": 32, "projection_dim": 32, "is_decoder": True},
        vision_config=IMAGE,
        projection_dim=32,
    ),
    # With any other choice, its text model attends ahead in batches without padding.
    "aimv2": new("Aimv2Model", text_config=TEXT, vision_config=IMAGE, projection_dim=32, attn_implementation="eager"),
    "metaclip2": new("MetaClip2Model", text_config=TEXT, vision_config=IMAGE, projection_dim=32),
    "alt-clip": new("AltCLIPModel", text_config=TEXT | {"project_dim": 32}, vision_config=IMAGE, projection_dim=32),
    "clip": new("CLIPModel", text_config=TEXT, vision_config=IMAGE, projection_dim=32),
    "siglip": new("SiglipModel", text_config=TEXT, vision_config=IMAGE),
}
