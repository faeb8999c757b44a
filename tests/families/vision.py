"""Vision models, and the text towers that come with some of them."""

from typing import Any

from tests.families.family import BERT, TEXT, Family, new, part

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
IMAGE: dict[str, Any] = {key: TEXT[key] for key in SIZES} | {"image_size": 16, "patch_size": 4}
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
DINO = VIT | {"layer": "encoder.layer.{}", "branch_factor": "layer_scale1.lambda1", "special": ("layer scale",)}
DPT = VIT | {"layer": "encoder.layer.{}", "value": "attention.attention.value", "projection": "attention.output.dense"}
CLIP = VIT | {"layer": "encoder.layers.{}", "value": "self_attn.v_proj", "projection": "self_attn.out_proj"}
CLIP_TEXT = CLIP | {"signal": ()}

VISION = {
    "vit": Family(new("ViTModel", **IMAGE), **VIT),
    "deit": Family(new("DeiTModel", **IMAGE), **VIT),
    "ijepa": Family(new("IJepaModel", **IMAGE), **VIT),
    "beit": Family(
        new("BeitModel", **SCALED, use_relative_position_bias=True), **VIT | LAMBDA | {"positions": "relative"}
    ),
    "data2vec-vision": Family(
        new("Data2VecVisionModel", **SCALED, **EAGER, use_shared_relative_position_bias=True),
        **DPT | LAMBDA | {"positions": "relative"},
    ),
    "dinov2": Family(new("Dinov2Model", **IMAGE, layerscale_value=0.5), **DINO),
    "dinov2-with-registers": Family(new("Dinov2WithRegistersModel", **IMAGE, layerscale_value=0.5), **DINO),
    "dinov3-vit": Family(
        new("DINOv3ViTModel", **IMAGE, layerscale_value=0.5),
        **DINO | {"layer": "model.layer.{}", "positions": "rotary"},
    ),
    "clip-vision": Family(new("CLIPVisionModel", **IMAGE), **CLIP),
    "clip-text": Family(new("CLIPTextModel", **TEXT), **CLIP_TEXT, causal=True),
    "chinese-clip-text": Family(new("ChineseCLIPTextModel", **TEXT), **BERT, single=True),
    "siglip-vision": Family(new("SiglipVisionModel", **IMAGE), **CLIP),
    "siglip-text": Family(new("SiglipTextModel", **TEXT), **CLIP_TEXT),
    "aimv2-vision": Family(
        new("Aimv2VisionModel", **IMAGE), **CLIP | {"value": "attention.v_proj", "projection": "attention.out_proj"}
    ),
    "blip-vision": Family(
        new("BlipVisionModel", **IMAGE, initializer_range=0.02),
        **CLIP | {"value": "self_attn.qkv", "projection": "self_attn.projection", "values": part(2)},
    ),
    "dpt": Family(new("DPTModel", **IMAGE), **DPT),
}
