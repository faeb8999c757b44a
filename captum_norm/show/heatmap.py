"""Draws maps as heatmaps, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from captum_norm.attr.measurements import Measurements
from captum_norm.errors import InvalidInputError
from captum_norm.explanation import Explanation
from captum_norm.results import make_figure
from captum_norm.results.maps import AttributionMaps
from captum_norm.results.stacks import MapStack
from captum_norm.show.arrays import Numbers, as_array, color_map
from captum_norm.show.figures import StandaloneFigure, font_families
from captum_norm.show.text import same_length, shortened, thinned

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
    """Draw the maps of all layers of the only example, those with heads as their mean.

    Args:
        stacks: maps with the same rows and columns, such as those of one stack.
        query_tokens: names of the rows; None for those of the maps.
        key_tokens: names of the columns; None for those of the maps.
        title: see :func:`draw_heatmaps`.
        shared_scale: see :func:`draw_heatmaps`.

    Raises:
        InvalidInputError: there are several examples, or stacks of different sizes.
    """
    if not stacks or len(stacks[0].values) != 1 or len({stack.side for stack in stacks}) != 1:
        raise InvalidInputError(
            "got maps of several examples or stacks; draw those of one example, maps[0], and of one stack by "
            "draw_heatmaps"
        )
    panels = []
    for stack in stacks:
        values = stack.of(0)
        mean, values = ("", values) if values.dim() == 3 else (", mean of heads", values.mean(1))
        name = "" if len(stacks) == 1 else f"{stack.name}, "
        titled = zip(stack.layers, values, strict=True)
        panels += [Panel(f"{name}layer {layer}{mean}", one, stack.unit) for layer, one in titled]
    rows, columns = query_tokens or stacks[0].rows(0), key_tokens or query_tokens or stacks[0].columns(0)
    return draw_heatmaps(panels, rows, columns, title=title, shared_scale=shared_scale)


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
    values, mean = cast(Tensor, only.squares)[0], ""
    if values.dim() == 4:
        values, mean = values.mean(1), ", mean of heads"
    panels = [
        Panel(f"layer {layer}{mean}", layer_map, only.map_unit)
        for layer, layer_map in zip(only.layers, values, strict=True)
    ]
    return draw_heatmaps(panels, only.tokens[0], title=f"{only.facts()['method']}, {only.model}")


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


def check_panel(panel: Panel, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Check that a map has a row for each query and a column for each key.

    Raises:
        InvalidInputError: it has not.
    """
    shape = as_array(panel.map, f"the map {panel.title!r}").shape
    if len(shape) != 2:
        raise InvalidInputError(f"the map {panel.title!r} has shape {shape}; expected (queries, keys)")
    same_length(queries, shape[0], "the queries (rows)")
    same_length(keys, shape[1], "the keys (columns)")


def _check(panels: Sequence[Panel], queries: Sequence[str], keys: Sequence[str], shared_scale: bool) -> None:
    if not panels:
        raise InvalidInputError("no map to draw: give at least one panel")
    for panel in panels:
        check_panel(panel, queries, keys)
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
