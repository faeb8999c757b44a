"""Videos in vision-language models: the frames' patches stand in the text where their pixels go."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import InvalidInputError, NormAttribution
from tests.families import randomized
from tests.families.images import VISION_LANGUAGE
from tests.families.picture_inputs import END, IMAGE_TOKEN, QWEN_PATCH, START, VIDEO_TOKEN, pixels, sequences
from tests.test_images import merged_inputs

QWEN = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
# Frames, rows and columns of patches of each video, in the order of the examples; every 2 × 2 take one place.
GRIDS = [[2, 4, 4], [3, 2, 4]]


def videos(name: str) -> dict[str, Any]:
    """A video of two frames; a picture, and a video of three. Qwen3-VL reads each frame between words of its own."""
    apart = name == "qwen3-vl"
    first = [START, VIDEO_TOKEN, *[VIDEO_TOKEN] * 3, END, 30] * 2 if apart else [START, *[VIDEO_TOKEN] * 8, END]
    second = [START, *[VIDEO_TOKEN] * 2, END, 31] * 3 if apart else [START, *[VIDEO_TOKEN] * 6, END]
    found = sequences([1, 7, *first, 9, 11], [1, START, -4, END, 5, *second, 8, 21])
    ids = found["input_ids"]
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    grid = torch.tensor(GRIDS)
    return found | {
        "pixel_values": pixels(16, QWEN_PATCH).double(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values_videos": pixels(int(grid.prod(1).sum()), QWEN_PATCH).double(),
        "video_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def single(name: str, example: int) -> dict[str, Any]:
    """One example without padding."""
    whole = videos(name)
    real = whole["attention_mask"][example].bool()
    found: dict[str, Any] = {
        key: whole[key][example : example + 1, real] for key in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    if example:
        found |= {key: whole[key] for key in ("pixel_values", "image_grid_thw")}
    start, end = (0, 32) if example == 0 else (32, 56)
    return found | {
        "pixel_values_videos": whole["pixel_values_videos"][start:end],
        "video_grid_thw": whole["video_grid_thw"][example : example + 1],
    }


@pytest.fixture(scope="module", params=QWEN)
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, randomized(VISION_LANGUAGE[request.param].build, 0, torch.float64)


def test_every_position_has_its_modality(family: tuple[str, Any]) -> None:
    name, model = family
    inputs = videos(name)
    maps = NormAttribution(model).maps(inputs)
    assert maps.modality is not None
    kinds = {IMAGE_TOKEN: "image", VIDEO_TOKEN: "video"}
    for ids, modality in zip(inputs["input_ids"].tolist(), maps.modality, strict=True):
        assert list(modality) == [kinds.get(token, "text") for token in ids]
    for example in range(2):
        alone = NormAttribution(model).maps(single(name, example))
        length = alone.self_attention.shape[-1]
        torch.testing.assert_close(
            maps.self_attention[example, :, :length, :length], alone.self_attention[0], rtol=1e-6, atol=1e-9
        )
        own = [patches.positions.tolist() for patches in maps.patches if patches.example == example]
        assert own == [patches.positions.tolist() for patches in alone.patches]


def test_a_patch_of_a_frame_stands_where_its_pixels_go(family: tuple[str, Any]) -> None:
    name, model = family
    with torch.no_grad():
        for index in range(2):
            layer = VISION_LANGUAGE[name].tower.layer.format(index)
            model.get_submodule(f"{layer}.{VISION_LANGUAGE[name].tower.projection}").weight.zero_()
    inputs = videos(name)
    maps = NormAttribution(model).maps(inputs)
    frames = [grid for grid in maps.patches if inputs["input_ids"][grid.example, grid.positions[0, 0]] == VIDEO_TOKEN]
    assert [tuple(grid.positions.shape) for grid in frames] == [(2, 2)] * 2 + [(1, 2)] * 3
    assert [grid.example for grid in frames] == [0] * 2 + [1] * 3
    before = embedded(model, inputs)
    start = 0
    for grid in frames:
        rows, columns = grid.positions.shape
        for row, column in ((0, 0), (rows - 1, columns - 1)):
            changed = videos(name)
            first = start + 4 * (row * columns + column)
            changed["pixel_values_videos"][first : first + 4] += 1
            moved = (embedded(model, changed) != before).any(-1).nonzero().tolist()
            assert moved == [[grid.example, int(grid.positions[row, column])]]
        start += 4 * rows * columns


def embedded(model: Any, inputs: dict[str, Any]) -> Tensor:
    return merged_inputs(model, inputs)[1]["inputs_embeds"]  # type: ignore[no-any-return]


def test_frames_that_do_not_fit_the_text_are_refused_in_a_sentence(family: tuple[str, Any]) -> None:
    name, model = family
    inputs = videos(name)
    inputs["input_ids"][0, inputs["input_ids"][0].eq(VIDEO_TOKEN).nonzero()[0]] = 7
    with pytest.raises(InvalidInputError) as caught:
        NormAttribution(model).maps(inputs)
    assert len(str(caught.value)) <= 400
    assert "\n" not in str(caught.value)
