"""Draws the scores of a picture's patches over the picture."""

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError
from captum_norm.show.arrays import Numbers, as_array, color_map
from captum_norm.show.figures import StandaloneFigure

_INCHES = 4.0


def draw_patches(
    picture: Any, scores: Numbers, *, unit: str = "score", title: str = "", opacity: float = 0.6
) -> Figure:
    """Draw a picture, and beside it the picture in grey under a heat map of its patches.

    The colours run from white at 0 to blue at the largest score; negative scores are orange. The figure is independent
    of pyplot; a notebook shows it as the result of a cell.

    Args:
        picture: the picture as the user has it: anything that numpy makes an array (height, width[, 3]) of, such as a
            picture of PIL, or a tensor (3, height, width); whole numbers from 0 to 255, or others from 0 to 1. If the
            processor cropped it, pass the part that it kept.
        scores: a score for each patch, (rows, columns): a tensor, as :meth:`captum_norm.Patches.scores` selects, an
            array or lists.
        unit: the label of the colour bar.
        title: the title above both.
        opacity: of the heat map, from 0 to 1.

    Returns:
        The figure; :func:`~captum_norm.show.save_figure` writes it.

    Raises:
        InvalidInputError: if the picture or the scores have another shape, numbers outside their range, or NaN.

    Example:
        >>> import torch
        >>> figure = draw_patches(torch.rand(3, 24, 32), torch.rand(3, 4), unit="share of rollout")
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ['picture', 'scores of its 3 × 4 patches']
    """
    pixels, values = pixels_of(picture), _values(scores)
    if not 0 <= opacity <= 1:
        raise InvalidInputError(f"got opacity={shown(opacity)}; expected a number from 0 to 1")
    height, width = pixels.shape[:2]
    size = (2 * _INCHES + 1.2, _INCHES * min(max(height / width, 0.4), 2.0) + (0.9 if title else 0.6))
    figure = StandaloneFigure(figsize=size, dpi=150, layout="constrained")
    if title:
        figure.suptitle(title, parse_math=False)
    for index, name in enumerate(("picture", f"scores of its {values.shape[0]} × {values.shape[1]} patches")):
        axes = figure.add_subplot(1, 2, index + 1)
        axes.set_title(name, fontsize="medium")
        axes.set_axis_off()
        axes.imshow(pixels if index == 0 else _grey(pixels), extent=(0, width, height, 0))
    top = float(np.abs(values).max()) or 1.0
    signed = bool((values < 0).any())
    heat = axes.imshow(
        values,
        cmap=color_map(signed=signed),
        norm=Normalize(-top if signed else 0.0, top),
        alpha=opacity,
        extent=(0, width, height, 0),
        interpolation="nearest",
    )
    figure.colorbar(heat, ax=axes, fraction=0.046, pad=0.03).set_label(unit, parse_math=False)
    return figure


def pixels_of(picture: Any) -> npt.NDArray[np.float64]:
    """Return a picture as (height, width, 3), from 0 to 1."""
    if isinstance(picture, Tensor):
        picture = picture.detach().cpu()
        if picture.dim() == 3 and picture.shape[0] == 3:
            picture = picture.permute(1, 2, 0)
    try:
        given = np.asarray(picture)
        pixels = given.astype(np.float64) / (255 if np.issubdtype(given.dtype, np.integer) else 1)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"got a picture {shown(picture)}; expected an array (height, width, 3)") from error
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InvalidInputError(
            f"got a picture of shape {given.shape}; expected (height, width, 3), (height, width) or a tensor "
            "(3, height, width)"
        )
    if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
        raise InvalidInputError(
            f"got a picture with numbers from {given.min()} to {given.max()}; expected integers from 0 to 255 or other "
            "numbers from 0 to 1: the picture itself, not the pixel values that a processor normalised"
        )
    return pixels


def _grey(pixels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A picture in light shades of grey [ITU-R BT.601], so that neither colours nor shadows look like scores."""
    return np.repeat(0.4 + 0.6 * (pixels @ (0.299, 0.587, 0.114))[..., None], 3, axis=2)


def _values(scores: Any) -> npt.NDArray[np.float64]:
    values = as_array(scores, "scores")
    if values.ndim != 2 or values.size == 0:
        raise InvalidInputError(f"got scores {values.shape}; expected (rows, columns), a score for each patch")
    if not np.isfinite(values).all():
        raise InvalidInputError("got scores with NaN or infinity; expected finite numbers")
    return values
