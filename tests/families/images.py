"""Vision-language models: a tower reads pictures, and the text model reads their patches among its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.families.decoders import OPT
from tests.families.family import BERT, LLAMA, Family, part
from tests.families.llamas import SANDWICH
from tests.families.picture_inputs import (
    attended_pictures,
    padded_pictures,
    pairs,
    pictures,
    questions,
    qwen_pictures,
    sized_pictures,
    tiled_pictures,
)
from tests.families.picture_models import PICTURES
from tests.families.vision import CLIP, LAMBDA, VIT


@dataclass(frozen=True)
class VisionLanguage:
    """One family: the layers of its text model, which makes the whole, and of its vision tower, and two examples.

    ``layers`` of the text model attend to its own sequence; ``grids`` are the rows and columns of patches that each
    picture has there, if any.
    """

    text: Family
    tower: Family
    inputs: Callable[[], dict[str, Any]]
    layers: tuple[int, ...] = (0, 1)
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def build(self) -> Callable[[], nn.Module]:
        return self.text.build


def text(name: str, **changes: Any) -> Family:
    return Family(PICTURES[name], **LLAMA | {"layer": "model.language_model.layers.{}"} | changes)


def tower(layer: str, **changes: Any) -> Family:
    return Family(nn.Identity, **CLIP | {"layer": layer} | changes)


SIGLIP = tower("model.vision_tower.encoder.layers.{}")
VISION_MODEL = tower("model.vision_model.encoder.layers.{}")
PIXTRAL = tower(
    "model.vision_tower.transformer.layers.{}", value="attention.v_proj", projection="attention.o_proj", centered=False
)
WINDOW = ("grouped queries", "sliding window")
BLIP_TOWER = tower(
    "vision_model.encoder.layers.{}", value="self_attn.qkv", projection="self_attn.projection", values=part(2)
)
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

INSIDE: dict[str, Any] = {"layer": "model.text_model.layers.{}"}
OPT_INSIDE = OPT | {"layer": "language_model.model.decoder.layers.{}"}
CLIP_TEXT = CLIP | {"layer": "text_model.encoder.layers.{}"}
AIM: dict[str, Any] = {"value": "attention.v_proj", "projection": "attention.out_proj", "centered": False}
INTERN: dict[str, Any] = {
    "layer": "model.vision_tower.encoder.layer.{}",
    "value": "attention.v_proj",
    "projection": "attention.projection_layer",
}
PARALLEL: dict[str, Any] = {"style": "parallel", "special": WINDOW}

VISION_LANGUAGE = {
    "llava": VisionLanguage(text("llava"), **FOUR_BY_FOUR),
    "vip-llava": VisionLanguage(text("vip-llava"), **FOUR_BY_FOUR),
    "llava-next": VisionLanguage(text("llava-next"), **TILED),
    "llava-onevision": VisionLanguage(text("llava-onevision"), **TILED),
    "paligemma": VisionLanguage(text("paligemma"), **FOUR_BY_FOUR),
    "gemma3-images": VisionLanguage(text("gemma3-images", **SANDWICH, gain_offset=1.0), SIGLIP, **POOLED),
    "qwen2-vl": VisionLanguage(text("qwen2-vl"), **QWEN),
    "qwen2.5-vl": VisionLanguage(text("qwen2.5-vl"), **QWEN),
    "qwen3-vl": VisionLanguage(text("qwen3-vl"), **QWEN),
    "idefics3": VisionLanguage(text("idefics3", **INSIDE), **PADDED),
    "smolvlm": VisionLanguage(text("smolvlm", **INSIDE), **PADDED),
    "internvl": VisionLanguage(text("internvl"), Family(nn.Identity, **VIT | LAMBDA | INTERN), **POOLED),
    "blip-2": VisionLanguage(Family(PICTURES["blip-2"], **OPT_INSIDE), BLIP_TOWER, pictures(4)),
    "instruct-blip": VisionLanguage(Family(PICTURES["instruct-blip"], **OPT_INSIDE), BLIP_TOWER, questions),
    "blip": VisionLanguage(
        Family(PICTURES["blip"], **BERT | {"layer": "text_decoder.bert.encoder.layer.{}"}, causal=True),
        BLIP_TOWER,
        pairs,
    ),
    "aimv2": VisionLanguage(
        Family(PICTURES["aimv2"], **CLIP_TEXT | AIM, causal=True), tower("vision_model.encoder.layers.{}", **AIM), pairs
    ),
    "mllama": VisionLanguage(
        text("mllama"),
        tower("model.vision_model.transformer.layers.{}", projection="self_attn.o_proj"),
        attended_pictures,
        (0, 2),
    ),
    "llama4-images": VisionLanguage(
        text("llama4-images", layer="language_model.model.layers.{}", special=("mixture of experts",)),
        tower("vision_model.model.layers.{}", projection="self_attn.o_proj"),
        **POOLED,
    ),
    "pixtral": VisionLanguage(text("pixtral"), PIXTRAL, sized_pictures(1), grids=((4, 4), (4, 2), (2, 4))),
    "mistral3": VisionLanguage(text("mistral3"), PIXTRAL, sized_pictures(2), grids=((2, 2), (2, 1), (1, 2))),
    "aya-vision": VisionLanguage(text("aya-vision", **PARALLEL), SIGLIP, **POOLED),
    "cohere2-vision": VisionLanguage(text("cohere2-vision", **PARALLEL), SIGLIP, **POOLED),
    "idefics2": VisionLanguage(text("idefics2", **INSIDE), VISION_MODEL, padded_pictures),
    "metaclip2": VisionLanguage(Family(PICTURES["metaclip2"], **CLIP_TEXT, causal=True), SIDE_BY_SIDE, pairs),
    "alt-clip": VisionLanguage(
        Family(PICTURES["alt-clip"], **BERT | {"layer": "text_model.roberta.encoder.layers.{}"}), SIDE_BY_SIDE, pairs
    ),
    "clip": VisionLanguage(Family(PICTURES["clip"], **CLIP_TEXT, causal=True), SIDE_BY_SIDE, pairs),
    "siglip": VisionLanguage(Family(PICTURES["siglip"], **CLIP_TEXT), SIDE_BY_SIDE, pairs),
}
