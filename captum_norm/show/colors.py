"""Maps numbers to colours, for the terminal, figures and pages.

The scale runs from near-white (0) through blue to dark navy (1), in equal steps in OKLab, where distances approximate
perceived differences. Lightness decreases all the way, so the order survives greyscale printing and colour blindness of
any kind. Negative numbers have a scale through orange, which is never confused with blue.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap

Rgb = tuple[int, int, int]

STEPS = 256

# The colours of Okabe & Ito [2008, "Color universal design"], distinct for every kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"

# OKLab (lightness, green-red, blue-yellow): near-white, blue, dark navy.
_ANCHORS = ((0.985, -0.004, -0.006), (0.66, -0.055, -0.110), (0.27, -0.010, -0.105))
_ANCHORS_BELOW = ((0.985, -0.004, -0.006), (0.72, 0.070, 0.125), (0.27, 0.065, 0.055))

# OKLab to linear sRGB [Ottosson 2020, "A perceptual color space for image processing"].
_LAB_TO_CONES = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_CONES_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def color_of(share: float) -> Rgb:
    """Return the colour of a share of the largest absolute score, between -1 and 1; clipped outside."""
    red, green, blue = color_table(below=share < 0)[round(min(abs(share), 1.0) * (STEPS - 1))].tolist()
    return red, green, blue


def ink_on(background: Rgb) -> Rgb:
    """Black or white, whichever stands out more from a background [WCAG 2.2, contrast ratio]."""
    encoded = np.array(background) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    luminance = float(np.dot((0.2126, 0.7152, 0.0722), linear))
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 0.05 * 1.05 else (255, 255, 255)


def hex_of(color: Rgb) -> str:
    """``#rrggbb``."""
    return f"#{bytes(color).hex()}"


def shares_of(scores: Sequence[float], counted: Sequence[bool] | None = None) -> list[float]:
    """Divide scores by the largest absolute one, or by the largest that counts; 0 for scores that do not count."""
    values = [score if counted is None or counted[place] else 0.0 for place, score in enumerate(scores)]
    top = max(map(abs, values), default=0.0)
    return [value / top if top > 0 else 0.0 for value in values]


@cache
def color_table(*, below: bool = False) -> npt.NDArray[np.uint8]:
    """Return the whole scale, (256, 3), lightest first; ``below``: the scale of negative numbers."""
    anchors = _ANCHORS_BELOW if below else _ANCHORS
    path = np.concatenate([np.linspace(start, end) for start, end in pairwise(anchors)])
    travelled = np.concatenate([[0.0], np.linalg.norm(np.diff(path, axis=0), axis=1).cumsum()])
    even = np.linspace(0, travelled[-1], STEPS)
    lab = np.stack([np.interp(even, travelled, path[:, axis]) for axis in range(3)], axis=1)
    linear = ((lab @ _LAB_TO_CONES.T) ** 3 @ _CONES_TO_RGB.T).clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    table: npt.NDArray[np.uint8] = np.rint(encoded * 255).astype(np.uint8)
    table.setflags(write=False)  # the table is cached and shared
    return table


def color_map(*, signed: bool) -> ListedColormap:
    """Return the colours of numbers: from white to blue, and if they may be negative from orange over white to blue."""
    colors = [color_table(below=True)[::-1], color_table()] if signed else [color_table()]
    return ListedColormap(np.concatenate(colors) / 255, name="captum_norm")
