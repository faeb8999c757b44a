"""Makes tiny vision-language models: a tower that reads pictures, and a text model that reads their patches."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from torch import nn
from transformers.models.idefics2 import Idefics2PerceiverConfig, Idefics2VisionConfig
from transformers.models.mllama import MllamaTextConfig, MllamaVisionConfig

from tests.families.family import GROUPED, HEADS, TEXT, VOCABULARY
from tests.families.llamas import LOCAL_EXPERTS
from tests.families.picture_inputs import END, IMAGE_TOKEN, START, VIDEO_TOKEN
from tests.families.vision import IMAGE

TOKEN: dict[str, Any] = {"image_token_id": IMAGE_TOKEN}
TOKENS = TOKEN | {"video_token_id": VIDEO_TOKEN}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
NO_HEAD: dict[str, Any] = {"vision_use_head": False}
TILES: dict[str, Any] = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}


def llama(**changes: Any) -> Any:
    return hf.LlamaConfig(**GROUPED | changes)


def clip_vision() -> Any:
    return hf.CLIPVisionConfig(**IMAGE)


def siglip_vision(**changes: Any) -> Any:
    return hf.SiglipVisionConfig(**IMAGE | NO_HEAD | changes)


def llava() -> nn.Module:
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=clip_vision(), text_config=llama(), **TOKEN))


def vip_llava() -> nn.Module:
    return hf.VipLlavaForConditionalGeneration(
        hf.VipLlavaConfig(
            vision_config=clip_vision(), text_config=llama(), **TOKEN | {"vision_feature_layers": [-2, -1]}
        )
    )


def llava_next() -> nn.Module:
    return hf.LlavaNextForConditionalGeneration(
        hf.LlavaNextConfig(vision_config=clip_vision(), text_config=llama(), **TOKEN, **TILES)
    )


def llava_onevision() -> nn.Module:
    return hf.LlavaOnevisionForConditionalGeneration(
        hf.LlavaOnevisionConfig(vision_config=siglip_vision(), text_config=hf.Qwen2Config(**GROUPED), **TOKENS, **TILES)
    )


def paligemma() -> nn.Module:
    return hf.PaliGemmaForConditionalGeneration(
        hf.PaliGemmaConfig(
            vision_config=siglip_vision(projection_dim=32),
            text_config=hf.GemmaConfig(**GROUPED, head_dim=8),
            **TOKEN,
            projection_dim=32,
        )
    )


def gemma3() -> nn.Module:
    text = hf.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    )
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config=siglip_vision(),
            text_config=text,
            **TOKEN | {"boi_token_id": START, "eoi_token_id": END},
            mm_tokens_per_image=4,
        )
    )


def qwen(model: Any, config: Any, **changes: Any) -> Callable[[], nn.Module]:
    text = GROUPED | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
    vision: dict[str, Any] = {"depth": 2, "num_heads": HEADS, "patch_size": 4, "temporal_patch_size": 2}
    marks: dict[str, Any] = {"vision_start_token_id": START, "vision_end_token_id": END}
    vision |= {"spatial_merge_size": 2, "hidden_size": 32} | changes
    return lambda: model(config(text_config=dict(text), vision_config=dict(vision), **TOKENS, **marks))


def idefics3(model: Any, config: Any, vision: Any) -> Callable[[], nn.Module]:
    return lambda: model(
        config(vision_config=vision(**IMAGE), text_config=llama(), **TOKEN, scale_factor=2, pad_token_id=0)
    )


def internvl() -> nn.Module:
    vision = hf.InternVLVisionConfig(
        **IMAGE | {"image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.5}
    )
    return hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(vision_config=vision, text_config=hf.Qwen2Config(**GROUPED), **TOKEN, downsample_ratio=0.5)
    )


def opt_text() -> Any:
    return hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        ffn_dim=48,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    )


def blip2() -> nn.Module:
    return hf.Blip2ForConditionalGeneration(
        hf.Blip2Config(
            vision_config=hf.Blip2VisionConfig(**IMAGE, initializer_range=0.02),
            qformer_config=hf.Blip2QFormerConfig(**TEXT, encoder_hidden_size=32, cross_attention_frequency=2),
            text_config=opt_text(),
            num_query_tokens=4,
            **TOKEN,
        )
    )


def mllama() -> nn.Module:
    vision = MllamaVisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=HEADS,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        max_num_tiles=2,
        intermediate_layers_indices=[0],
        vision_output_dim=64,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )
    text = MllamaTextConfig(
        **GROUPED | {"num_hidden_layers": 3}, cross_attention_layers=[1], rope_parameters=dict(ROPE)
    )
    return hf.MllamaForConditionalGeneration(
        hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    )


def llama4() -> nn.Module:
    vision = hf.Llama4VisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        pixel_shuffle_ratio=0.5,
        projector_input_dim=32,
        projector_output_dim=32,
        vision_output_dim=32,
        rope_parameters=dict(ROPE),
    )
    text = hf.Llama4TextConfig(**GROUPED, **LOCAL_EXPERTS, head_dim=8, intermediate_size_mlp=48)
    return hf.Llama4ForConditionalGeneration(
        hf.Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    )


def pixtral_vision() -> Any:
    return hf.PixtralVisionConfig(**IMAGE, rope_parameters=dict(ROPE))


def pixtral() -> nn.Module:
    options: dict[str, Any] = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=pixtral_vision(), text_config=llama(), **TOKEN, **options)
    )


def mistral3() -> nn.Module:
    options: dict[str, Any] = {"spatial_merge_size": 2, "vision_feature_layer": -1}
    return hf.Mistral3ForConditionalGeneration(
        hf.Mistral3Config(vision_config=pixtral_vision(), text_config=hf.MistralConfig(**GROUPED), **TOKEN, **options)
    )


def cohere(model: Any, config: Any, **changes: Any) -> Callable[[], nn.Module]:
    text = GROUPED | {"sliding_window": 6}
    return lambda: model(
        config(
            vision_config=siglip_vision(), text_config=hf.Cohere2Config(**text), downsample_factor=2, **TOKEN, **changes
        )
    )


def idefics2() -> nn.Module:
    perceiver = Idefics2PerceiverConfig(
        hidden_size=32,
        resampler_n_latents=4,
        resampler_depth=2,
        resampler_n_heads=HEADS,
        resampler_head_dim=8,
        num_key_value_heads=2,
    )
    return hf.Idefics2ForConditionalGeneration(
        hf.Idefics2Config(
            vision_config=Idefics2VisionConfig(**IMAGE),
            perceiver_config=perceiver,
            text_config=hf.MistralConfig(**GROUPED),
            **TOKEN,
        )
    )


def instruct_blip() -> nn.Module:
    return hf.InstructBlipForConditionalGeneration(
        hf.InstructBlipConfig(
            vision_config=dict(IMAGE),
            qformer_config=TEXT | {"encoder_hidden_size": 32, "cross_attention_frequency": 2},
            text_config=opt_text().to_dict(),
            num_query_tokens=4,
            image_token_index=IMAGE_TOKEN,
        )
    )


def blip() -> nn.Module:
    text = TEXT | {"encoder_hidden_size": 32, "projection_dim": 32, "is_decoder": True}
    return hf.BlipForConditionalGeneration(hf.BlipConfig(text_config=text, vision_config=IMAGE, projection_dim=32))


def aimv2() -> nn.Module:
    # With any other choice, its text model attends ahead in batches without padding.
    options: dict[str, Any] = {"attn_implementation": "eager"}
    return hf.Aimv2Model(hf.Aimv2Config(text_config=TEXT, vision_config=IMAGE, projection_dim=32, **options))


def metaclip2() -> nn.Module:
    return hf.MetaClip2Model(hf.MetaClip2Config(text_config=TEXT, vision_config=IMAGE, projection_dim=32))


def alt_clip() -> nn.Module:
    text = TEXT | {"project_dim": 32}
    return hf.AltCLIPModel(hf.AltCLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=32))


def clip() -> nn.Module:
    return hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=32))


def siglip() -> nn.Module:
    return hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=IMAGE))
