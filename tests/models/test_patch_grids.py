"""The patches of vision models: a patch that changes changes the embedding of its own token, and of no other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import InformationFlow, NormAttribution, NormMeter
from captum_norm.models.pictures import PREFIXES
from captum_norm.results.maps import Patches
from tests import oracle
from tests.families import randomized
from tests.families.family import new
from tests.families.further_signals import FURTHER_VISION
from tests.families.vision import IMAGE, VISION

PLAIN: dict[str, tuple[Any, str]] = {
    name: (family.build, family.layer.format(0))
    for name, family in (VISION | FURTHER_VISION).items()
    if family.signal == (3, 16, 16) and name != "pixtral-vision"  # whose pictures are one sequence
} | {
    "dinov3-vit with registers": (new("DINOv3ViTModel", **IMAGE, num_register_tokens=3), "model.layer.0"),
    "metaclip-2": (new("MetaClip2VisionModel", **IMAGE), "encoder.layers.0"),
    "vit classifier": (new("ViTForImageClassification", **IMAGE), "vit.layers.0"),
    "deit classifier": (new("DeiTForImageClassificationWithTeacher", **IMAGE), "deit.layers.0"),
    "clip classifier": (new("CLIPForImageClassification", vision_config=IMAGE), "vision_model.encoder.layers.0"),
    "siglip classifier": (new("SiglipForImageClassification", vision_config=IMAGE), "vision_model.encoder.layers.0"),
}


def embedded(model: nn.Module, layer: str, pixels: Tensor, **further: Any) -> Tensor:
    """What the first layer reads."""
    with torch.no_grad(), oracle.watched(model, {"": (layer, "input")}) as seen:
        model(pixels, **further)
    return seen[""][0]  # type: ignore[no-any-return]


def check(model: nn.Module, layer: str, pixels: Tensor, side: int, found: list[Patches], **further: Any) -> None:
    """Change each patch in turn, and see which tokens change."""
    before = embedded(model, layer, pixels, **further)
    assert [(one.example, one.picture) for one in found] == [(index, index) for index in range(len(pixels))]
    rows, columns = (length // side for length in pixels.shape[-2:])
    for one in found:
        assert one.positions.shape == (rows, columns)
        for row in range(rows):
            for column in range(columns):
                changed = pixels.clone()
                changed[one.picture, :, side * row : side * (row + 1), side * column : side * (column + 1)] += 1
                differs = (embedded(model, layer, changed, **further) != before).any(-1)
                assert differs.nonzero().tolist() == [[one.example, int(one.positions[row, column])]]


@pytest.mark.parametrize("name", PLAIN)
def test_a_patch_changes_its_own_token_alone(name: str) -> None:
    build, layer = PLAIN[name]
    model: Any = randomized(build, 0, torch.float64)
    pixels = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    check(model, layer, pixels, 4, list(NormAttribution(model).maps(pixels).patches))


def test_every_family_known_is_tested() -> None:
    def kinds(config: Any) -> set[str]:
        return {config.model_type} | ({config.vision_config.model_type} if hasattr(config, "vision_config") else set())

    assert set(PREFIXES) <= set().union(*(kinds(build().config) for build, _ in PLAIN.values()))


@pytest.mark.parametrize(
    ("name", "further"), [("vit", {"interpolate_pos_encoding": True}), ("dinov2-with-registers", {})]
)
def test_pictures_need_not_be_square(name: str, further: dict[str, Any]) -> None:
    build, layer = PLAIN[name]
    model: Any = randomized(build, 1, torch.float64)
    pixels = torch.rand(1, 3, 12, 20, dtype=torch.float64)
    maps = NormAttribution(model).maps({"pixel_values": pixels, **further})
    check(model, layer, pixels, 4, list(maps.patches), **further)


def test_all_results_have_them() -> None:
    model: Any = randomized(PLAIN["vit"][0], 0, torch.float64)
    pixels = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    expected = 1 + torch.arange(16).reshape(4, 4)
    maps = InformationFlow(model).maps(pixels)
    measured = NormMeter(model).measure(pixels, weights=True)
    for found in (maps.patches, maps[1].patches, measured["encoder"].patches):
        assert all(torch.equal(one.positions, expected) for one in found)
    assert [one.picture for one in maps[1].patches] == [0]
    assert [one.picture for one in measured["encoder"].patches] == [0, 1]


@pytest.mark.parametrize(
    "build",
    [
        new("ViTMAEModel", **IMAGE),  # drops patches
        new("YolosModel", **IMAGE | {"image_size": [16, 16]}),  # has tokens behind the patches
    ],
    ids=["vit-mae", "yolos"],
)
def test_other_sequences_have_none(build: Any) -> None:
    maps = NormAttribution(build().eval()).maps(torch.rand(1, 3, 16, 16))
    assert list(maps.patches) == []


def test_a_sequence_of_another_length_has_none() -> None:
    model: Any = randomized(PLAIN["vit"][0], 0, torch.float64)
    model.config.patch_size = 8  # no longer what the model was built with
    assert list(NormAttribution(model).maps(torch.rand(1, 3, 16, 16, dtype=torch.float64)).patches) == []
