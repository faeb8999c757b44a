"""Pages of pictures: each patch has its own score, picture and name."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from captum_norm import AttributionMaps, InvalidInputError, Patches
from captum_norm.show.pages import patches_page, render_patches

PICTURES = [np.full((4, 6, 3), shade) for shade in (0.25, 0.5, 1.0)]
PATCHES = [
    Patches(0, 0, torch.tensor([[1, 2, 3], [4, 5, 6]])),
    Patches(1, 1, torch.tensor([[2], [3]])),
    Patches(1, 2, torch.tensor([[5, 4]])),
]
SCORES = torch.arange(14.0).reshape(2, 7) - 9
TOKENS = [["[CLS]", *"------"], ["a", "b", *"----", "c"]]


def page(**changes: Any) -> Any:
    stack = torch.rand(2, 3, 7, 7)
    maps = AttributionMaps(None, stack, None, None, None, torch.ones(2, 7, dtype=torch.bool), TOKENS)
    given: dict[str, Any] = {"pictures": PICTURES, "scores": SCORES, "patches": PATCHES, "maps": maps, "tokens": None}
    return maps, patches_page(**given | {"method": "m", "unit": "u", "title": "t"} | changes)


def test_patches_and_words_have_their_scores_names_and_maps() -> None:
    maps, made = page()
    first, second = made.examples
    assert list(first.inputs.texts) == ["[CLS]", *(f"patch {row}, {column}" for row in (1, 2) for column in (1, 2, 3))]
    assert list(second.inputs.texts) == [
        "a", "b", "picture 1, patch 1, 1", "picture 1, patch 2, 1", "picture 2, patch 1, 2", "picture 2, patch 1, 1",
        "c",
    ]  # fmt: skip
    for number, example in enumerate(made.examples):
        np.testing.assert_array_equal(example.scores[0].values, SCORES[number])
        np.testing.assert_array_equal(example.maps[0].values, maps.decoder[number])
        assert example.scores[0].signed == bool((SCORES[number] < 0).any())
    assert [picture.positions for picture in second.pictures] == [[[2], [3]], [[5, 4]]]


def test_each_picture_is_its_own_and_large_ones_are_thinned() -> None:
    _, made = page()
    shades = [imread(io.BytesIO(one.png))[0, 0, 0] for example in made.examples for one in example.pictures]
    np.testing.assert_allclose(shades, [0.25, 0.5, 1.0], atol=0.005)
    _, large = page(pictures=[np.zeros((1601, 90, 3), np.uint8), *PICTURES[1:]])
    assert imread(io.BytesIO(large.examples[0].pictures[0].png)).shape[:2] == (534, 30)


def test_scores_alone_have_numbers_for_names() -> None:
    _, made = page(maps=None)
    assert (made.examples[1].maps, made.examples[1].inputs.texts[:2]) == ([], ["0", "1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pictures": PICTURES[:2]}, "got 2 pictures and the patches of 3"),
        ({"patches": []}, "got 3 pictures and the patches of 0"),
        ({"scores": SCORES[:, :4]}, r"got scores of shape \(2, 4\)"),
        ({"tokens": [["a"], ["b"]]}, "got 1 tokens and scores of 7 positions"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        page(**changes)


def test_equal_pictures_give_equal_bytes() -> None:
    assert render_patches(PICTURES, SCORES, PATCHES) == render_patches(PICTURES, SCORES, PATCHES)
