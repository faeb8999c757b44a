"""The colour scale: even steps, falling lightness, readable ink."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from captum_norm.show.colors import color_of, color_table, hex_of, ink_on, shares_of


def linear(colors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    encoded = colors / 255
    decoded: npt.NDArray[Any] = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    return decoded


CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def oklab(colors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """OKLab from 8-bit sRGB by the published forward matrices, not by the inverse that the library uses."""
    lab: npt.NDArray[Any] = np.cbrt(linear(colors) @ np.transpose(CONES)) @ np.transpose(LAB)
    return lab


@pytest.mark.parametrize("below", [False, True])
def test_luminance_falls_in_steps_that_look_equal(below: bool) -> None:
    luminance = linear(color_table(below=below).astype(float)) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(luminance[::4]) < 0).all()
    assert luminance[0] > 0.95
    assert luminance[-1] < 0.02
    steps = np.linalg.norm(np.diff(oklab(color_table(below=below)[::15].astype(float)), axis=0), axis=1)
    assert steps.max() / steps.min() < 1.1


@pytest.mark.parametrize("share", np.linspace(-1, 1, 41).tolist())
def test_ink_is_readable_on_every_ground(share: float) -> None:
    ground = color_of(share)
    luminances = linear(np.array([ground, ink_on(ground)], dtype=float)) @ np.array([0.2126, 0.7152, 0.0722])
    contrast = (luminances.max() + 0.05) / (luminances.min() + 0.05)
    assert contrast >= 4.5  # WCAG 2.2, level AA


def test_ends_of_the_scale_and_the_hue_below_zero() -> None:
    assert color_of(0) == tuple(color_table()[0])
    assert color_of(1) == color_of(7) == tuple(color_table()[-1])
    assert color_of(-1) == color_of(-7) == tuple(color_table(below=True)[-1])
    assert hex_of((0, 171, 255)) == "#00abff"
    blue, orange = oklab(np.array([color_of(0.5), color_of(-0.5)], dtype=float))[:, 2]
    assert blue < -0.05 < 0.05 < orange


def test_shares_are_of_the_largest_score_that_counts() -> None:
    assert shares_of([1.0, -4.0, 0.0]) == [0.25, -1.0, 0.0]
    assert shares_of([9.0, -2.0, 1.0], [False, True, True]) == [0.0, -1.0, 0.5]
    assert shares_of([0.0, 3.0], [True, False]) == [0.0, 0.0]
    assert shares_of([]) == []
