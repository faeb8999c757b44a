"""Draws maps as heatmaps, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.visualization.colors import color_table
from captum_norm.visualization.figures import StandaloneFigure, font_families
from captum_norm.visualization.text import same_length, shortened, thinned

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
        map: (Q, K), not negative; rows are queries, columns are keys.
        unit: the label of the colour bar.
    """

    title: str
    map: Tensor
    unit: str


def draw_heatmaps(
    panels: Sequence[Panel],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    title: str = "",
    shared_scale: bool = False,
) -> Figure:
    """Draw maps side by side, in rows of three or four, queries down and keys across, with colour bars from 0.

    The figure is independent of pyplot; a notebook shows it as the result of a cell.

    Args:
        panels: the maps, all (Q, K).
        query_tokens: Q tokens; if there is no room for all, only every n-th is shown.
        key_tokens: K tokens; the query tokens if None.
        title: the title above all panels.
        shared_scale: use one colour scale for all panels, which must have the same unit.

    Returns:
        The figure; :func:`~captum_norm.visualization.save_figure` writes it.

    Raises:
        InvalidInputError: there is no panel, a map does not fit the tokens, or a shared scale has different units.

    Example:
        >>> import torch
        >>> figure = draw_heatmaps([Panel("layer 1", torch.eye(2), "norm")], ["a", "b"])
        >>> [axes.get_xlabel() for axes in figure.axes][0]
        'key (gives)'
    """
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
    colors = ListedColormap(color_table() / 255, name="captum_norm")
    values = [panel.map.detach().float().cpu().numpy() for panel in panels]
    highest = max(float(value.max()) for value in values)
    for index, (panel, value) in enumerate(zip(panels, values, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        top = highest if shared_scale else float(value.max())
        image = axes.imshow(value, cmap=colors, vmin=0.0, vmax=top or 1.0)
        axes.set_title(panel.title, fontsize="medium", parse_math=False)
        _label(axes.xaxis, KEY_LABEL, keys, width)
        _label(axes.yaxis, QUERY_LABEL, query_tokens, height)
        axes.tick_params(axis="x", rotation=90)
        if not shared_scale or index % columns == columns - 1 or index == len(panels) - 1:
            _color_bar(axes, image, panel.unit)
    return figure


def check_panel(panel: Panel, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Check that a map has a row for each query and a column for each key.

    Raises:
        InvalidInputError: it has not.
    """
    if panel.map.dim() != 2:
        raise InvalidInputError(f"the map {panel.title!r} has shape {tuple(panel.map.shape)}; expected (queries, keys)")
    same_length(queries, panel.map.shape[0], "the queries (rows)")
    same_length(keys, panel.map.shape[1], "the keys (columns)")


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
