"""Finds the patches of pictures in the sequence of a vision model that reads nothing else."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from captum_norm.results.maps import Patches

# The tokens before the patches, by the configuration's ``model_type``: their numbers, or the settings that have these.
# The patches follow row by row, and nothing follows them.
PREFIXES: Mapping[str, tuple[int | str, ...]] = MappingProxyType(
    {
        "aimv2_vision_model": (),
        "beit": (1,),
        "blip_vision_model": (1,),
        "chinese_clip_vision_model": (1,),
        "clip_vision_model": (1,),
        "data2vec-vision": (1,),
        "deit": (1, 1),  # the class and the distillation token
        "dinov2": (1,),
        "dinov2_with_registers": (1, "num_register_tokens"),
        "dinov3_vit": (1, "num_register_tokens"),
        "dpt": (1,),
        "ijepa": (),
        "internvl_vision": (1,),
        "metaclip_2_vision_model": (1,),
        "pixio": ("n_cls_tokens",),
        "qianfan_ocr_vision": (1,),
        "sapiens2": (1, "num_register_tokens"),
        "siglip_vision_model": (),
        "tipsv2_vision_model": (1, "num_register_tokens"),
        "vit": (1,),
        "vit_msn": (1,),
    }
)


def find_patches(config: Any, pixels: Tensor) -> tuple[list[Patches], int] | None:
    """Find the patches of a batch of pictures, one for each example.

    Args:
        config: the model's configuration.
        pixels: its pixel values, (B, channels, height, width).

    Returns:
        The patches, and the number of positions that the model then has; None if this is not known of the family.
    """
    # A classifier of CLIP's pictures has the configuration of both towers.
    configs = (config, getattr(config, "vision_config", None))
    own = next((one for one in configs if getattr(one, "model_type", None) in PREFIXES), None)
    if own is None or pixels.dim() != 4:
        return None
    before = sum(part if isinstance(part, int) else getattr(own, part) for part in PREFIXES[own.model_type])
    side = own.patch_size
    sides = (side, side) if isinstance(side, int) else side
    rows, columns = (length // step for length, step in zip(pixels.shape[-2:], sides, strict=True))
    grid = before + torch.arange(rows * columns, device="cpu").reshape(rows, columns)
    return [Patches(example, example, grid) for example in range(len(pixels))], before + rows * columns
