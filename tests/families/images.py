"""Vision-language models: a tower reads pictures, and the text model reads their patches among its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.idefics3 import Idefics3VisionConfig
from transformers.models.mllama import MllamaTextConfig, MllamaVisionConfig
from transformers.models.smolvlm import SmolVLMVisionConfig

from tests.families.family import GROUPED, HEADS, LLAMA, TEXT, VOCABULARY, Family, part
from tests.families.llamas import LOCAL_EXPERTS, SANDWICH
from tests.families.vision import CLIP, IMAGE, LAMBDA, VIT

IMAGE_TOKEN, VIDEO_TOKEN, START, END = 50, 51, 52, 53
TOKEN: dict[str, Any] = {"image_token_id": IMAGE_TOKEN}
TOKENS = TOKEN | {"video_token_id": VIDEO_TOKEN}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
NO_HEAD: dict[str, Any] = {"vision_use_head": False}
TILES: dict[str, Any] = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
# Pixels of a patch of Qwen's towers, and of the frame that a still picture is repeated to.
QWEN_PATCH = 3 * 2 * 4 * 4


@dataclass(frozen=True)
class VisionLanguage:
    """One family.

    Attributes:
        text: the layers of its text model, and how to make the whole model.
        tower: the layers of its vision tower.
        inputs: makes a batch of two examples with different numbers of pictures, padded on the right.
        layers: which layers of the text model attend to its own sequence.
        grids: rows and columns of patches that each picture has in the sequence; empty if it has none in rows.
    """

    text: Family
    tower: Family
    inputs: Callable[[], dict[str, Any]]
    layers: tuple[int, ...] = (0, 1)
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def build(self) -> Callable[[], nn.Module]:
        return self.text.build


def sequences(*examples: list[int]) -> dict[str, Any]:
    """Token ids and mask of examples padded on the right; a negative number -n stands for n places of a picture."""
    rows = [[t for e in example for t in ([IMAGE_TOKEN] * -e if e < 0 else [e])] for example in examples]
    length = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows]), "attention_mask": mask}


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(300))


def pictures(tokens: int) -> Callable[[], dict[str, Any]]:
    """One example with a picture and one with two; each picture takes ``tokens`` places."""
    return lambda: (
        sequences([1, 7, -tokens, 9, 11], [1, -tokens, 5, -tokens, 8, 21, 34]) | {"pixel_values": pixels(3, 3, 16, 16)}
    )


def qwen_pictures() -> dict[str, Any]:
    """Pictures of 4 × 4, 2 × 6 and 4 × 2 patches, every 2 × 2 of which take one place."""
    found = sequences([1, 7, START, -4, END, 9, 11], [1, START, -3, END, 5, START, -2, END, 8, 21, 34])
    grid = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 4, 2]])
    return found | {
        "pixel_values": pixels(int(grid.prod(1).sum()), QWEN_PATCH),
        "image_grid_thw": grid,
        "mm_token_type_ids": (found["input_ids"] == IMAGE_TOKEN).int(),
    }


def padded_pictures() -> dict[str, Any]:
    """A picture of zeros fills up the example that has fewer, and one picture is half padding."""
    images, mask = pixels(2, 2, 3, 16, 16), torch.ones(2, 2, 16, 16, dtype=torch.bool)
    images[0, 1], mask[1, 1, :, 8:], images[1, 1, :, :, 8:] = 0, False, 0
    found = sequences([1, 7, -4, 9, 11], [1, -4, 5, -4, 8, 21, 34])
    return found | {"pixel_values": images, "pixel_attention_mask": mask}


def tiled_pictures() -> dict[str, Any]:
    """Pictures of 16 × 32 and 32 × 20 pixels: the whole, then two or four tiles without padding, with new lines."""
    images = pixels(2, 5, 3, 16, 16)
    found = sequences([1, 7, -(16 + 4 * 9), 9, 11], [1, -(16 + 8 * 5), 8])
    images[0, 3:] = images[1, 3:] = 0
    return found | {"pixel_values": images[:, :3], "image_sizes": torch.tensor([[16, 32], [32, 16]])}


def attended_pictures() -> dict[str, Any]:
    """Pictures of one and of two tiles, to which the text after them attends."""
    mask = torch.zeros(2, 6, 1, 2, dtype=torch.long)
    mask[0, 1:4, :, :1] = mask[1, 2:] = 1
    return sequences([1, -1, 9, 11], [1, 5, -1, 8, 21, 34]) | {
        "pixel_values": pixels(2, 1, 2, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        "cross_attention_mask": mask,
    }


def pairs() -> dict[str, Any]:
    """Two texts and two pictures side by side."""
    return sequences([1, 7, 9, 11, 2], [1, 5, 8, 2]) | {"pixel_values": pixels(2, 3, 16, 16)}


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
            vision_config=clip_vision(),
            text_config=llama(),
            **TOKEN | {"vision_feature_layers": [-2, -1]},
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
        config(
            vision_config=vision(**IMAGE),
            text_config=llama(),
            **TOKEN,
            scale_factor=2,
            pad_token_id=0,
        )
    )


def internvl() -> nn.Module:
    vision = hf.InternVLVisionConfig(
        **IMAGE | {"image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.5}
    )
    return hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(
            vision_config=vision,
            text_config=hf.Qwen2Config(**GROUPED),
            **TOKEN,
            downsample_ratio=0.5,
        )
    )


def blip2() -> nn.Module:
    text = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        ffn_dim=48,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    )
    return hf.Blip2ForConditionalGeneration(
        hf.Blip2Config(
            vision_config=hf.Blip2VisionConfig(**IMAGE, initializer_range=0.02),
            qformer_config=hf.Blip2QFormerConfig(**TEXT, encoder_hidden_size=32, cross_attention_frequency=2),
            text_config=text,
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
    text = MllamaTextConfig(**GROUPED | {"num_hidden_layers": 3}, cross_attention_layers=[1], rope_parameters=ROPE)
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
        rope_parameters=ROPE,
    )
    text = hf.Llama4TextConfig(**GROUPED, **LOCAL_EXPERTS, head_dim=8, intermediate_size_mlp=48)
    return hf.Llama4ForConditionalGeneration(
        hf.Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    )


def clip() -> nn.Module:
    return hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=32))


def siglip() -> nn.Module:
    return hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=IMAGE))


def text(build: Callable[[], nn.Module], **changes: Any) -> Family:
    return Family(build, **LLAMA | {"layer": "model.language_model.layers.{}"} | changes)


def tower(layer: str, **changes: Any) -> Family:
    return Family(nn.Identity, **CLIP | {"layer": layer} | changes)


SIGLIP = tower("model.vision_tower.encoder.layers.{}")
VISION_MODEL = tower("model.vision_model.encoder.layers.{}")
SIDE_BY_SIDE = tower("vision_model.encoder.layers.{}")
QWEN: dict[str, Any] = {
    "tower": tower("model.visual.blocks.{}", value="attn.qkv", projection="attn.proj", values=part(2)),
    "inputs": qwen_pictures,
    "grids": ((2, 2), (1, 3), (2, 1)),
}
FOUR_BY_FOUR: dict[str, Any] = {"tower": SIGLIP, "inputs": pictures(16), "grids": ((4, 4),) * 3}
POOLED: dict[str, Any] = {"inputs": pictures(4), "grids": ((2, 2),) * 3}
PADDED: dict[str, Any] = {"tower": VISION_MODEL, "inputs": padded_pictures, "grids": ((2, 2),) * 3}
TILED: dict[str, Any] = {"tower": SIGLIP, "inputs": tiled_pictures, "grids": ((4, 4), (4, 8), (4, 4), (8, 4))}

VISION_LANGUAGE = {
    "llava": VisionLanguage(text(llava), **FOUR_BY_FOUR),
    "vip-llava": VisionLanguage(text(vip_llava), **FOUR_BY_FOUR),
    "llava-next": VisionLanguage(text(llava_next), **TILED),
    "llava-onevision": VisionLanguage(text(llava_onevision), **TILED),
    "paligemma": VisionLanguage(text(paligemma), **FOUR_BY_FOUR),
    "gemma3-images": VisionLanguage(text(gemma3, **SANDWICH, gain_offset=1.0), SIGLIP, **POOLED),
    "qwen2-vl": VisionLanguage(text(qwen(hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLConfig, embed_dim=32)), **QWEN),
    "qwen2.5-vl": VisionLanguage(
        text(
            qwen(
                hf.Qwen2_5_VLForConditionalGeneration,
                hf.Qwen2_5_VLConfig,
                out_hidden_size=32,
                intermediate_size=48,
                window_size=8,
                fullatt_block_indexes=[1],
            )
        ),
        **QWEN,
    ),
    "qwen3-vl": VisionLanguage(
        text(
            qwen(
                hf.Qwen3VLForConditionalGeneration,
                hf.Qwen3VLConfig,
                out_hidden_size=32,
                intermediate_size=48,
                deepstack_visual_indexes=[0],
                num_position_embeddings=16,
            )
        ),
        **QWEN,
    ),
    "idefics3": VisionLanguage(
        text(
            idefics3(hf.Idefics3ForConditionalGeneration, hf.Idefics3Config, Idefics3VisionConfig),
            layer="model.text_model.layers.{}",
        ),
        **PADDED,
    ),
    "smolvlm": VisionLanguage(
        text(
            idefics3(hf.SmolVLMForConditionalGeneration, hf.SmolVLMConfig, SmolVLMVisionConfig),
            layer="model.text_model.layers.{}",
        ),
        **PADDED,
    ),
    "internvl": VisionLanguage(
        text(internvl),
        Family(
            nn.Identity,
            **VIT
            | LAMBDA
            | {
                "layer": "model.vision_tower.encoder.layer.{}",
                "value": "attention.v_proj",
                "projection": "attention.projection_layer",
            },
        ),
        **POOLED,
    ),
    "blip-2": VisionLanguage(
        Family(
            blip2,
            "language_model.model.decoder.layers.{}",
            "self_attn.v_proj",
            "self_attn.out_proj",
            "pre-norm",
            causal=True,
            single=True,
        ),
        tower(
            "vision_model.encoder.layers.{}", value="self_attn.qkv", projection="self_attn.projection", values=part(2)
        ),
        pictures(4),
    ),
    "mllama": VisionLanguage(
        text(mllama),
        tower("model.vision_model.transformer.layers.{}", projection="self_attn.o_proj"),
        attended_pictures,
        (0, 2),
    ),
    "llama4-images": VisionLanguage(
        text(llama4, layer="language_model.model.layers.{}", special=("mixture of experts",)),
        tower("vision_model.model.layers.{}", projection="self_attn.o_proj"),
        **POOLED,
    ),
    "clip": VisionLanguage(
        Family(clip, **CLIP | {"layer": "text_model.encoder.layers.{}"}, causal=True), SIDE_BY_SIDE, pairs
    ),
    "siglip": VisionLanguage(Family(siglip, **CLIP | {"layer": "text_model.encoder.layers.{}"}), SIDE_BY_SIDE, pairs),
}
