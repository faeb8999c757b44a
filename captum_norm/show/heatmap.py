"""Draws maps as heatmaps side by side, and scores of patches over their picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from captum_norm.attr.measurements import Measurements
from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError
from captum_norm.explanation import Explanation
from captum_norm.generation.result import GenerationResult
from captum_norm.results import make_figure
from captum_norm.results.maps import AttributionMaps
from captum_norm.results.stacks import MapStack
from captum_norm.show.colors import color_map
from captum_norm.show.figures import StandaloneFigure, font_families
from captum_norm.show.text import Numbers, as_array, same_length, shortened, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.image import AxesImage

QUERY_LABEL = "query (receives)"
KEY_LABEL = "key (gives)"

_LABEL_INCHES = 0.24
_MOST_INCHES = 7.5
_MOST_INCHES_OF_MANY = 5.0
_LABEL_WIDTH = 14
_PICTURE_INCHES = 4.0


@dataclass(frozen=True)
class Panel:
    """One map of a figure.

    Attributes:
        title: the title above the map.
        map: (Q, K), a tensor, an array or lists; rows are queries, columns are keys.
        unit: the label of the colour bar.
    """

    title: str
    map: Numbers
    unit: str


def draw_heatmaps(
    panels: Sequence[Panel | Numbers] | Numbers | AttributionMaps,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    title: str = "",
    shared_scale: bool = False,
) -> Figure:
    """Draw maps side by side, in rows of three or four, queries down and keys across, with colour bars from 0.

    The figure is independent of pyplot; a notebook shows it as the result of a cell. Negative entries are orange.

    Args:
        panels: the maps, (Q, K) each: :class:`Panel`, tensors, arrays or lists; one of these; a stack of layers
            (L, Q, K); or the :class:`captum_norm.AttributionMaps` of one example.
        query_tokens: Q tokens; if there is no room for all, only every n-th is shown. None: their numbers, or the
            tokens of the maps.
        key_tokens: K tokens; the query tokens if None.
        title: the title above all panels.
        shared_scale: use one colour scale for all panels, which must have the same unit.

    Returns:
        The figure; :func:`~captum_norm.show.save_figure` writes it.

    Raises:
        InvalidInputError: there is no panel, a map does not fit the tokens, or a shared scale has different units.

    Example:
        >>> import torch
        >>> figure = draw_heatmaps([Panel("layer 1", torch.eye(2), "norm")], ["a", "b"])
        >>> [axes.get_xlabel() for axes in figure.axes][0]
        'key (gives)'
        >>> len(draw_heatmaps([[1.0, 0.5], [0.0, 2.0]]).axes)
        1
    """
    if isinstance(panels, AttributionMaps):
        return draw_stacks(panels.stacks(), query_tokens, key_tokens, title=title, shared_scale=shared_scale)
    panels = _panels(panels)
    values = [as_array(panel.map, f"the map {panel.title!r}") for panel in panels]
    if query_tokens is None and values and values[0].ndim == 2:
        query_tokens = [str(index) for index in range(len(values[0]))]
        key_tokens = [str(index) for index in range(values[0].shape[1])] if key_tokens is None else key_tokens
    query_tokens = query_tokens or []
    keys = query_tokens if key_tokens is None else key_tokens
    _check(panels, query_tokens, keys, shared_scale)
    columns = len(panels) if len(panels) <= 3 else 3 if len(panels) <= 9 else 4
    rows = -(-len(panels) // columns)
    most = _MOST_INCHES if len(panels) == 1 else _MOST_INCHES_OF_MANY
    width, height = _inches(len(keys), most), _inches(len(query_tokens), most)
    size = ((width + 1.9) * columns, (height + 1.7) * rows)
    figure = StandaloneFigure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(wspace=0.08))
    if title:
        figure.suptitle(title, parse_math=False)
    signed = any(bool((value < 0).any()) for value in values)
    highest = max(float(abs(value).max()) for value in values)
    for index, (panel, value) in enumerate(zip(panels, values, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        top = (highest if shared_scale else float(abs(value).max())) or 1.0
        below = signed and (shared_scale or bool((value < 0).any()))
        image = axes.imshow(value, cmap=color_map(signed=below), vmin=-top if below else 0.0, vmax=top)
        axes.set_title(panel.title, fontsize="medium", parse_math=False)
        _label(axes.xaxis, KEY_LABEL, keys, width)
        _label(axes.yaxis, QUERY_LABEL, query_tokens, height)
        axes.tick_params(axis="x", rotation=90)
        if not shared_scale or index % columns == columns - 1 or index == len(panels) - 1:
            _color_bar(axes, image, panel.unit)
    return figure


def draw_stacks(
    stacks: Sequence[MapStack],
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    title: str = "",
    shared_scale: bool = False,
) -> Figure:
    """Draw the maps of all layers of the only example, with the same rows and columns, by :func:`draw_heatmaps`."""
    if not stacks or len(stacks[0].values) != 1 or len({stack.side for stack in stacks}) != 1:
        raise InvalidInputError(
            "got maps of several examples or stacks; draw those of one example, maps[0], and of one stack by "
            "draw_heatmaps"
        )
    panels = []
    for stack in stacks:
        name = "" if len(stacks) == 1 else f"{stack.name}, "
        panels += _layer_panels(stack.of(0), stack.layers, stack.unit, name)
    rows, columns = query_tokens or stacks[0].rows(0), key_tokens or query_tokens or stacks[0].columns(0)
    return draw_heatmaps(panels, rows, columns, title=title, shared_scale=shared_scale)


def _layer_panels(maps: Tensor, layers: Sequence[int], unit: str, name: str = "") -> list[Panel]:
    """Return a panel for each layer of maps, (L, [H,] Q, K), those with heads as their mean."""
    mean, maps = ("", maps) if maps.dim() == 3 else (", mean of heads", maps.mean(1))
    titled = zip(layers, maps, strict=True)
    return [Panel(f"{name}layer {layer}{mean}", layer_map, unit) for layer, layer_map in titled]


@make_figure.register(AttributionMaps)
@make_figure.register(Measurements)
def _draw_maps(result: AttributionMaps | Measurements) -> Figure:
    return draw_stacks(result.stacks())


@make_figure.register
def draw_explanation(explanation: Explanation) -> Figure:
    """Draw the maps of the only text of an explanation."""
    if explanation.maps is None:
        raise InvalidInputError(f"the method {explanation.method} has no maps to draw; show the page, or write scores")
    if len(explanation) != 1:
        raise InvalidInputError(
            f"got an explanation of {len(explanation)} texts; take one for its maps: explanation[0]"
        )
    only = explanation[0]
    panels = _layer_panels(cast(Tensor, only.squares)[0], only.layers, only.map_unit)
    return draw_heatmaps(panels, only.tokens[0], title=f"{only.facts()['method']}, {only.model}")


@make_figure.register
def draw_answer(result: GenerationResult) -> Figure:
    """Draw the scores of each output token, or of the whole, as a heat map.

    Args:
        result: of :class:`captum_norm.GenerationAttribution`.

    Returns:
        The figure; :func:`captum_norm.show.save_figure` writes it.
    """
    scores = result.seq_attr[None] if result.token_attr is None else result.token_attr
    rows = [result.explained.answer] if result.token_attr is None else result.output_tokens
    return draw_heatmaps([Panel(result.explained.method, scores, result.explained.unit)], rows, result.input_tokens)


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
        raise InvalidInputError(f"got opacity={quoted(opacity)}; expected a number from 0 to 1")
    height, width = pixels.shape[:2]
    size = (2 * _PICTURE_INCHES + 1.2, _PICTURE_INCHES * min(max(height / width, 0.4), 2.0) + (0.9 if title else 0.6))
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


def _panels(given: Any) -> list[Panel]:
    """Make panels of what may be drawn."""
    if isinstance(given, Sequence) and all(isinstance(one, Panel) for one in given):
        return list(given)
    if isinstance(given, Sequence) and any(isinstance(one, Panel | Tensor | np.ndarray) for one in given):
        maps = list(given)
    else:
        found = as_array(given, "maps")
        maps = [found] if found.ndim == 2 else list(found)
    unnamed = [""] if len(maps) == 1 else [f"map {index}" for index in range(len(maps))]
    return [
        one if isinstance(one, Panel) else Panel(name, one, "entry") for name, one in zip(unnamed, maps, strict=True)
    ]


def _check(panels: Sequence[Panel], queries: Sequence[str], keys: Sequence[str], shared_scale: bool) -> None:
    if not panels:
        raise InvalidInputError("no map to draw: give at least one panel")
    for panel in panels:
        shape = as_array(panel.map, f"the map {panel.title!r}").shape
        if len(shape) != 2:
            raise InvalidInputError(f"the map {panel.title!r} has shape {shape}; expected (queries, keys)")
        same_length(queries, shape[0], "the queries (rows)")
        same_length(keys, shape[1], "the keys (columns)")
    units = {panel.unit for panel in panels}
    if shared_scale and len(units) > 1:
        raise InvalidInputError(f"one colour scale cannot show several units: {', '.join(sorted(units))}")


def _inches(count: int, most: float) -> float:
    """The size of an axis: room for every label, up to a maximum."""
    return min(max(_LABEL_INCHES * count, 2.6), most)


def _label(axis: "Axis", title: str, tokens: Sequence[str], inches: float) -> None:
    axis.set_label_text(title)
    shown = thinned(len(tokens), int(inches / _LABEL_INCHES) + 1)
    axis.set_ticks(shown, [shortened(tokens[index], _LABEL_WIDTH) for index in shown])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)  # a token may hold $
        text.set_fontsize(8)
        text.set_fontfamily(font_families())


def _color_bar(axes: "Axes", image: "AxesImage", unit: str) -> None:
    # In the coordinates of the panel, which makes the bar as high as the map.
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0.0, 0.04, 1.0)))
    bar.set_label(unit, parse_math=False)
    bar.ax.tick_params(labelsize=8)


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
        raise InvalidInputError(f"got a picture {quoted(picture)}; expected an array (height, width, 3)") from error
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
