"""Vision models, and the text towers that come with some of them."""

from typing import Any

import transformers as hf

from tests.families.family import BERT, HEADS, TEXT, Family, part

IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
# Where the choice is made for good when a model is built, and only this one gives its attention weights away.
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
SCALED = IMAGE | {"layer_scale_init_value": 0.5}
VIT: dict[str, Any] = {
    "layer": "layers.{}",
    "value": "attention.v_proj",
    "projection": "attention.o_proj",
    "style": "pre-norm",
    "signal": (3, 16, 16),
    "single": True,
}
LAMBDA = {"branch_factor": "lambda_1", "special": ("layer scale",)}
DINO = VIT | {
    "layer": "encoder.layer.{}",
    "branch_factor": "layer_scale1.lambda1",
    "special": ("layer scale",),
}
CLIP = VIT | {"layer": "encoder.layers.{}", "value": "self_attn.v_proj", "projection": "self_attn.out_proj"}
CLIP_TEXT = CLIP | {"signal": ()}

VISION = {
    "vit": Family(lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), **VIT),
    "deit": Family(lambda: hf.DeiTModel(hf.DeiTConfig(**IMAGE)), **VIT),
    "ijepa": Family(lambda: hf.IJepaModel(hf.IJepaConfig(**IMAGE)), **VIT),
    "beit": Family(
        lambda: hf.BeitModel(hf.BeitConfig(**SCALED, use_relative_position_bias=True)),
        **VIT | LAMBDA | {"positions": "relative"},
    ),
    "data2vec-vision": Family(
        lambda: hf.Data2VecVisionModel(
            hf.Data2VecVisionConfig(**SCALED, **EAGER, use_shared_relative_position_bias=True)
        ),
        **VIT
        | LAMBDA
        | {
            "layer": "encoder.layer.{}",
            "value": "attention.attention.value",
            "projection": "attention.output.dense",
            "positions": "relative",
        },
    ),
    "dinov2": Family(lambda: hf.Dinov2Model(hf.Dinov2Config(**IMAGE, layerscale_value=0.5)), **DINO),
    "dinov2-with-registers": Family(
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**IMAGE, layerscale_value=0.5)), **DINO
    ),
    "dinov3-vit": Family(
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**IMAGE, layerscale_value=0.5)),
        **DINO | {"layer": "model.layer.{}", "positions": "rotary"},
    ),
    "clip-vision": Family(lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGE)), **CLIP),
    "clip-text": Family(lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), **CLIP_TEXT, causal=True),
    "chinese-clip-text": Family(lambda: hf.ChineseCLIPTextModel(hf.ChineseCLIPTextConfig(**TEXT)), **BERT, single=True),
    "siglip-vision": Family(lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGE)), **CLIP),
    "siglip-text": Family(lambda: hf.SiglipTextModel(hf.SiglipTextConfig(**TEXT)), **CLIP_TEXT),
    "aimv2-vision": Family(
        lambda: hf.Aimv2VisionModel(hf.Aimv2VisionConfig(**IMAGE)),
        **CLIP | {"value": "attention.v_proj", "projection": "attention.out_proj"},
    ),
    "blip-vision": Family(
        lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**IMAGE, initializer_range=0.02)),
        **CLIP | {"value": "self_attn.qkv", "projection": "self_attn.projection", "values": part(2)},
    ),
    "dpt": Family(
        lambda: hf.DPTModel(hf.DPTConfig(**IMAGE)),
        **VIT
        | {
            "layer": "encoder.layer.{}",
            "value": "attention.attention.value",
            "projection": "attention.output.dense",
        },
    ),
}
