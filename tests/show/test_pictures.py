"""A heat map over a picture: every patch's colour stands where the patch is."""

from typing import Any

import numpy as np
import pytest
import torch

from captum_norm.errors import InvalidInputError
from captum_norm.show import draw_patches, figure_bytes
from captum_norm.show.colors import color_of


def landscape(height: int = 60, width: int = 80) -> Any:
    """A picture that looks like a photo: a sun in a sky above hills, with a little noise."""
    y, x = np.mgrid[0:height, 0:width] / height
    sky = np.stack([0.45 + 0.3 * y, 0.65 + 0.2 * y, 0.95 - 0.1 * y], -1)
    sun = np.exp(-((x - 1.0) ** 2 + (y - 0.25) ** 2) / 0.01)[..., None]
    hills = y > 0.65 + 0.08 * np.sin(6 * x) + 0.04 * np.sin(17 * x)
    picture = np.where(hills[..., None], np.stack([0.2 + 0 * y, 0.55 - 0.2 * y, 0.2 + 0 * y], -1), sky)
    picture = picture * (1 - sun) + sun * np.array([1.0, 0.95, 0.7])
    noise = np.random.default_rng(0).normal(0, 0.02, picture.shape)
    return np.rint((picture + noise).clip(0, 1) * 255).astype(np.uint8)


def heat_of(figure: Any) -> Any:
    """The heat map's picture, which is drawn over the grey one."""
    _, over = figure.axes[:2]
    return over.images[1]


def test_the_heat_map_lies_over_the_picture_patch_by_patch() -> None:
    picture = landscape()
    scores = torch.arange(12.0).reshape(3, 4)
    figure = draw_patches(picture, scores, unit="share", title="what the answer reads")
    axes: list[Any] = figure.axes
    plain, over = axes[:2]
    assert np.allclose(plain.images[0].get_array(), picture / 255)
    grey = over.images[0].get_array()
    assert np.allclose(grey[..., 0], 0.4 + 0.6 * (picture / 255) @ (0.299, 0.587, 0.114))
    heat = heat_of(figure)
    assert np.array_equal(heat.get_array(), scores.numpy())
    # Rows from the top, columns from the left, to the edges of the picture below.
    assert [list(image.get_extent()) for image in over.images] == [[0, 80, 60, 0]] * 2
    assert heat.origin == plain.images[0].origin == "upper"
    assert heat.get_alpha() == 0.6
    colors = heat.cmap(heat.norm(scores.numpy()))
    assert np.allclose(colors[2, 3, :3] * 255, color_of(1.0))
    assert np.allclose(colors[0, 0, :3] * 255, color_of(0.0))
    assert figure.axes[2].get_ylabel() == "share"
    assert figure_bytes(figure)[1:4] == b"PNG"


def test_negative_scores_have_a_scale_of_their_own() -> None:
    scores = torch.tensor([[-2.0, 0.0], [1.0, 4.0]])
    heat = heat_of(draw_patches(landscape(), scores))
    colors = heat.cmap(heat.norm(scores.numpy()))[..., :3] * 255
    for place, share in (((0, 0), -0.5), ((1, 0), 0.25), ((1, 1), 1.0)):
        assert np.abs(colors[place] - color_of(share)).max() <= 2  # a step of the table


@pytest.mark.parametrize("form", ["tensor", "tensor of bytes", "rows first", "grey", "fractions"])
def test_a_picture_may_come_in_any_form(form: str) -> None:
    picture = landscape(6, 8)
    forms = {
        "tensor": torch.tensor(picture / 255).permute(2, 0, 1),
        "tensor of bytes": torch.tensor(picture).permute(2, 0, 1),
        "rows first": torch.tensor(picture),
        "grey": picture[..., 0],
        "fractions": picture / 255,
    }
    drawn: Any = draw_patches(forms[form], torch.ones(1, 2)).axes[0].images[0].get_array()
    expected = np.repeat(picture[..., :1], 3, axis=2) if form == "grey" else picture
    assert np.allclose(drawn, expected / 255)


@pytest.mark.parametrize(
    ("picture", "scores", "message"),
    [
        (np.zeros((4, 4, 2)), torch.ones(2, 2), r"picture of shape \(4, 4, 2\)"),
        (np.full((4, 4, 3), -1.5), torch.ones(2, 2), "not the pixel values that a processor normalised"),
        (np.full((4, 4, 3), np.nan), torch.ones(2, 2), "numbers from nan"),
        ("photo.png", torch.ones(2, 2), "expected an array"),
        (np.zeros((4, 4, 3)), torch.ones(4), r"got scores \(4,\); expected \(rows, columns\)"),
        (np.zeros((4, 4, 3)), torch.full((2, 2), torch.inf), "NaN or infinity"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(picture: Any, scores: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        draw_patches(picture, scores)


def test_scores_all_zero_are_drawn() -> None:
    assert heat_of(draw_patches(landscape(), torch.zeros(2, 2))).norm.vmax == 1
