"""Figures of results without pyplot: maps as heat maps side by side, patches over their picture, methods compared.

Each type of result has its function, registered with :data:`captum_norm.results.make_figure`; those of analyses are
drawn by :mod:`captum_norm.show.plots`.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from torch import Tensor

from captum_norm.attr.measurements import Measurements
from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError
from captum_norm.explanation import Explanation
from captum_norm.generation.result import GenerationResult
from captum_norm.lab.answers import AnswerComparison
from captum_norm.lab.comparison import Comparison
from captum_norm.results import make_figure, make_file
from captum_norm.results.components import NUMBERED, ComponentScores, edge_ends
from captum_norm.results.maps import AttributionMaps
from captum_norm.show import text
from captum_norm.show.colors import BLUE, ORANGE, color_map, shares_of
from captum_norm.text.characters import spelled_lines

# Fallbacks for scripts that matplotlib's own font lacks.
_FURTHER_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Noto Sans Arabic", "Noto Sans Devanagari")

QUERY_LABEL = "query (receives)"
KEY_LABEL = "key (gives)"

# In inches.
_LABEL_HEIGHT = 0.24
_MOST = 7.5
_MOST_OF_MANY = 5.0
_PICTURE = 4.0
_ROW = 0.27

_LABEL_WIDTH = 14
_MOST_TOKENS = 40


class StandaloneFigure(Figure):
    """A figure without pyplot that a notebook shows as the result of a cell, with unprintable characters spelled out.

    Notebooks show other figures only if pyplot created them. matplotlib's ``savefig`` writes it.

    Args:
        options: arguments of :class:`matplotlib.figure.Figure`.

    Example:
        >>> StandaloneFigure(figsize=(2, 1))._repr_png_()[1:4]
        b'PNG'
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        FigureCanvasAgg(self)

    def draw(self, renderer: Any) -> None:
        """Spell out unprintable characters, then draw."""
        for label in self.findobj(Text):
            if (shown := spelled_lines(label.get_text())) != label.get_text():
                label.set_text(shown)
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """Render the figure for IPython."""
        return figure_bytes(self)


@make_file.register
def figure_bytes(figure: Figure, suffix: str = "png") -> bytes:
    """Render a figure as "png", "svg" or "pdf"; equal figures give equal bytes.

    Args:
        figure: any matplotlib figure.
        suffix: the format.
    """
    suffix = suffix.removeprefix(".")
    dates = {"svg": "Date", "pdf": "CreationDate"}
    metadata: dict[str, str | None] | None = {dates[suffix]: None} if suffix in dates else None
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "captum_norm"}):  # ids that are not random
        figure.savefig(buffer, format=suffix, metadata=metadata)
    return buffer.getvalue()


@cache
def font_families() -> list[str]:
    """Return the default font of figures and the installed fallbacks for other scripts."""
    installed = set(fontManager.get_font_names())
    return ["sans-serif", *(name for name in _FURTHER_FONTS if name in installed)]


def name_ticks(axis: Axis, names: Sequence[str], places: Sequence[int] | None = None) -> None:
    """Label the ticks of an axis literally, since a token may hold ``$``; at 0, 1, … without places."""
    axis.set_ticks(range(len(names)) if places is None else places, list(names))
    for label in axis.get_ticklabels():
        label.set(parse_math=False, fontsize=8, fontfamily=font_families())


@dataclass(frozen=True)
class Panel:
    """One map of a figure.

    Attributes:
        title: the title above the map.
        map: (Q, K), a tensor, an array or lists; rows are queries, columns are keys.
        unit: the label of the colour bar.
    """

    title: str
    map: text.Numbers
    unit: str


def draw_heatmaps(
    panels: Sequence[Panel],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw maps side by side, in rows of three or four, queries down and keys across, with colour bars from 0.

    The figure is independent of pyplot; a notebook shows it as the result of a cell. Negative entries are orange.

    Args:
        panels: the maps, (Q, K) each.
        query_tokens: Q tokens; if there is no room for all, only every n-th is shown.
        key_tokens: K tokens; the query tokens if None.
        title: the title above all panels.

    Returns:
        The figure; ``figure.savefig("maps.png")`` writes it.

    Raises:
        InvalidInputError: there is no panel, or a map does not fit the tokens.

    Example:
        >>> import torch
        >>> figure = draw_heatmaps([Panel("layer 1", torch.eye(2), "norm")], ["a", "b"])
        >>> [axes.get_xlabel() for axes in figure.axes][0]
        'key (gives)'
    """
    if not panels:
        raise InvalidInputError("no map to draw: give at least one panel")
    keys = query_tokens if key_tokens is None else key_tokens
    across = len(panels) if len(panels) <= 3 else 3 if len(panels) <= 9 else 4
    down = -(-len(panels) // across)
    most = _MOST if len(panels) == 1 else _MOST_OF_MANY
    # Room for every label, up to a maximum.
    width, height = (min(max(_LABEL_HEIGHT * len(labels), 2.6), most) for labels in (keys, query_tokens))
    size = ((width + 1.9) * across, (height + 1.7) * down)
    figure = StandaloneFigure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(wspace=0.08))
    if title:
        figure.suptitle(title, parse_math=False)
    for index, panel in enumerate(panels, 1):
        values = text.as_array(panel.map, f"the map {panel.title!r}")
        if values.ndim != 2:
            raise InvalidInputError(f"the map {panel.title!r} has shape {values.shape}; expected (queries, keys)")
        text.check_length(query_tokens, values.shape[0], "the queries (rows)")
        text.check_length(keys, values.shape[1], "the keys (columns)")
        axes = figure.add_subplot(down, across, index)
        image = axes.imshow(values, **_scale(values))
        axes.set_title(panel.title, fontsize="medium", parse_math=False)
        _label(axes.xaxis, KEY_LABEL, keys, width)
        _label(axes.yaxis, QUERY_LABEL, query_tokens, height)
        axes.tick_params(axis="x", rotation=90)
        # In the coordinates of the panel, which makes the bar as high as the map.
        bar = figure.colorbar(image, cax=axes.inset_axes((1.03, 0.0, 0.04, 1.0)))
        bar.set_label(panel.unit, parse_math=False)
        bar.ax.tick_params(labelsize=8)
    return figure


def _scale(values: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The colours of values: from 0 to the largest, or around 0 if some are negative."""
    top, signed = float(np.abs(values).max()) or 1.0, bool((values < 0).any())
    return {"cmap": color_map(signed=signed), "vmin": -top if signed else 0.0, "vmax": top}


def _label(axis: Axis, title: str, tokens: Sequence[str], inches: float) -> None:
    """Label an axis of a map, with every n-th token if there is no room for all."""
    axis.set_label_text(title)
    step = max(1, -(-len(tokens) // (int(inches / _LABEL_HEIGHT) + 1)))
    places = range(0, len(tokens), step)
    name_ticks(axis, [text.shortened(tokens[place], _LABEL_WIDTH) for place in places], places)


@make_figure.register(AttributionMaps)
@make_figure.register(Measurements)
def _draw_maps(result: AttributionMaps | Measurements) -> Figure:
    """Draw the maps of all layers of the only example, with the same rows and columns."""
    stacks = result.stacks()
    if not stacks or len(stacks[0].values) != 1 or len({stack.side for stack in stacks}) != 1:
        raise InvalidInputError(
            "got maps of several examples or stacks; draw those of one example, maps[0], and of one stack by "
            "draw_heatmaps"
        )
    panels = []
    for stack in stacks:
        name = "" if len(stacks) == 1 else f"{stack.name}, "
        panels += _layer_panels(stack.of(0), stack.layers, stack.unit, name)
    return draw_heatmaps(panels, stacks[0].rows(0), stacks[0].columns(0))


def _layer_panels(maps: Tensor, layers: Sequence[int], unit: str, name: str = "") -> list[Panel]:
    """Return a panel for each layer of maps, (L, [H,] Q, K), those with heads as their mean."""
    mean, maps = ("", maps) if maps.dim() == 3 else (", mean of heads", maps.mean(1))
    return [Panel(f"{name}layer {layer}{mean}", of_layer, unit) for layer, of_layer in zip(layers, maps, strict=True)]


@make_figure.register
def _draw_explanation(explanation: Explanation) -> Figure:
    """Draw the maps of the only text of an explanation."""
    squares = explanation.squares
    if squares is None:
        raise InvalidInputError(f"the method {explanation.method} has no maps to draw; show the page, or write scores")
    if len(explanation) != 1:
        raise InvalidInputError(f"got an explanation of {len(explanation)} texts; draw that of one: explanation[0]")
    panels = _layer_panels(squares[0], explanation.layers, explanation.map_unit)
    title = "; ".join([*map(str, explanation.outputs), f"{explanation.facts()['method']}, {explanation.model}"])
    return draw_heatmaps(panels, explanation.tokens[0], title=title)


@make_figure.register
def _draw_components(scores: ComponentScores) -> Figure:
    """Draw layers, upwards, for each kind, by heads, experts or positions; neurons by descending score; edges' ends."""
    if len(scores) != 1:
        raise InvalidInputError(f"got the components of {len(scores)} examples; draw those of one: scores[0]")
    parts = {kind: scores[0].totals(kind) if kind in NUMBERED else part for kind, part in scores[0].parts.items()}
    panels = [(kind, stack, text.as_array(part[0])) for kind, stacks in parts.items() for stack, part in stacks.items()]
    figure = StandaloneFigure(figsize=(_MOST_OF_MANY * len(panels), _MOST_OF_MANY), dpi=150, layout="constrained")
    figure.suptitle(f"{scores.outputs[0]}; {scores.method}, {scores.model}", parse_math=False)
    for axes, (kind, stack, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = -np.sort(-values) if kind == "neurons" else values
        image = axes.imshow(rows, origin="lower", aspect="auto", interpolation="nearest", **_scale(rows))
        axes.set_title(f"{text.noun_of(kind)}s, {stack}", fontsize="medium")
        figure.colorbar(image, ax=axes).set_label(scores.unit)
        layers, places = ([str(index) for index in range(size)] for size in rows.shape)
        if kind == "edges":
            layers, places = edge_ends(*rows.shape)
        elif kind not in NUMBERED:
            places = [*text.component_tokens(scores[0], stack)]
        across = {"neurons": "rank", "edges": "target"}.get(kind, "number" if kind in NUMBERED else "position")
        _label(axes.xaxis, across, places, 0.7 * _MOST_OF_MANY)
        _label(axes.yaxis, "source" if kind == "edges" else "layer", layers, 0.7 * _MOST_OF_MANY)
        axes.tick_params(axis="x", rotation=90)
    return figure


@make_figure.register
def _draw_answer(result: GenerationResult) -> Figure:
    """Draw the scores of each output token, or of the whole, as a heat map."""
    scores = result.seq_attr[None] if result.token_attr is None else result.token_attr
    rows = [result.explained.answer] if result.token_attr is None else result.output_tokens
    return draw_heatmaps([Panel(result.explained.method, scores, result.explained.unit)], rows, result.input_tokens)


@make_figure.register
def _draw_comparison(comparison: Comparison) -> Figure:
    """Draw the scores of the first example's tokens and the relevance gain, with a row for each method."""
    names, means = comparison.ranking, comparison.means()
    tokens, removable, scores = text.example_scores(comparison, 0)
    figure = StandaloneFigure(figsize=(13, max(_ROW * len(names), 1.4) + 1.9), dpi=150, layout="constrained")
    figure.suptitle(f"{comparison.model}: {comparison.explained}", parse_math=False)
    texts, gain = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    shares = np.array([shares_of(row, removable) for row in scores])[:, :_MOST_TOKENS]
    image = texts.imshow(shares, cmap=color_map(signed=True), vmin=-1, vmax=1, aspect="auto")
    name_ticks(texts.yaxis, names)
    name_ticks(texts.xaxis, [text.shortened(token, _LABEL_WIDTH) for token in tokens[:_MOST_TOKENS]])
    texts.tick_params(axis="x", rotation=90)
    rest = f", the first {_MOST_TOKENS} tokens" if len(tokens) > _MOST_TOKENS else ""
    texts.set_title(f"scores, {text.example_title(comparison, 0)}{rest}", fontsize="medium", parse_math=False)
    figure.colorbar(image, ax=texts, fraction=0.02, pad=0.01).set_label("share of the method's largest", fontsize=8)
    gains = [means[name]["relevance_gain"] for name in names]
    gain.barh(range(len(gains)), gains, color=[BLUE if value >= 0 else ORANGE for value in gains], height=0.7)
    gain.axvline(0, color="0.5", linewidth=0.8)
    gain.locator_params(axis="x", nbins=5)
    gain.ticklabel_format(axis="x", scilimits=(-3, 3), useMathText=True)
    count = f"{len(comparison)} example{'s' * (len(comparison) != 1)}"
    gain.set_title(f"relevance gain, mean of {count}", fontsize="medium")
    figure.supxlabel(comparison.signature, fontsize=6, color="0.4", parse_math=False)
    return figure


@make_figure.register
def _draw_answer_comparison(comparison: AnswerComparison) -> Figure:
    """Draw each method's LDS with its interval, and beside it what it costs."""
    rows = [row for row in comparison.records() if not np.isnan(row["lds"])]
    figure = StandaloneFigure(figsize=(7, max(_ROW * len(rows), 1.4) + 1), dpi=150, layout="constrained")
    axes = figure.subplots()
    values = np.array([[row["lds"], row["lds"] - row["lds_low"], row["lds_high"] - row["lds"]] for row in rows]).T
    axes.barh(range(len(rows)), values[0], xerr=np.abs(values[1:]), color=BLUE, height=0.7)
    axes.axvline(0, color="0.5", linewidth=0.8)
    name_ticks(axes.yaxis, [f"{row['method']} ({text.decimal(row['forward_ratio'], 1)} ×)" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("LDS: agreement with random ablations")
    axes.set_ylabel("method, and its time ÷ that of forward passes")
    return figure


def draw_patches(picture: Any, scores: text.Numbers, *, unit: str = "score", title: str = "") -> Figure:
    """Draw a picture, and beside it the picture in grey under a heat map of its patches.

    The colours run from white at 0 to blue at the largest score; negative scores are orange. The figure is independent
    of pyplot; a notebook shows it as the result of a cell.

    Args:
        picture: the picture as the user has it: anything that numpy makes an array (height, width[, 3]) of, such as a
            picture of PIL, or a tensor (3, height, width); whole numbers from 0 to 255, or others from 0 to 1. If the
            processor cropped it, pass the part that it kept.
        scores: a score for each patch, (rows, columns): a tensor, as :meth:`captum_norm.results.maps.Patches.scores`
            selects, an array or lists.
        unit: the label of the colour bar.
        title: the title above both.

    Returns:
        The figure; ``figure.savefig("maps.png")`` writes it.

    Raises:
        InvalidInputError: if the picture or the scores have another shape, numbers outside their range, or NaN.

    Example:
        >>> import torch
        >>> figure = draw_patches(torch.rand(3, 24, 32), torch.rand(3, 4), unit="share of rollout")
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ['picture', 'scores of its 3 × 4 patches']
    """
    pixels, values = pixels_of(picture), text.as_array(scores, "scores")
    if values.ndim != 2 or values.size == 0:
        raise InvalidInputError(f"got scores {values.shape}; expected (rows, columns), a score for each patch")
    height, width = pixels.shape[:2]
    # Light shades of grey [ITU-R BT.601], so that neither colours nor shadows look like scores.
    grey = np.repeat(0.4 + 0.6 * (pixels @ (0.299, 0.587, 0.114))[..., None], 3, axis=2)
    size = (2 * _PICTURE + 1.2, _PICTURE * min(max(height / width, 0.4), 2.0) + (0.9 if title else 0.6))
    figure = StandaloneFigure(figsize=size, dpi=150, layout="constrained")
    if title:
        figure.suptitle(title, parse_math=False)
    names = ("picture", f"scores of its {values.shape[0]} × {values.shape[1]} patches")
    for axes, name, ground in zip(figure.subplots(1, 2), names, (pixels, grey), strict=True):
        axes.set_title(name, fontsize="medium")
        axes.set_axis_off()
        axes.imshow(ground, extent=(0, width, height, 0))
    heat = axes.imshow(values, **_scale(values), alpha=0.6, extent=(0, width, height, 0), interpolation="nearest")
    figure.colorbar(heat, ax=axes, fraction=0.046, pad=0.03).set_label(unit, parse_math=False)
    return figure


def pixels_of(picture: Any) -> npt.NDArray[np.float64]:
    """Return a picture as (height, width, 3), from 0 to 1."""
    if isinstance(picture, Tensor):
        picture = picture.detach().cpu()
        if picture.dim() == 3 and picture.shape[0] == 3:
            picture = picture.permute(1, 2, 0)
    try:
        array = np.asarray(picture)
        pixels = array.astype(np.float64) / (255 if np.issubdtype(array.dtype, np.integer) else 1)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"got a picture {quoted(picture)}; expected an array (height, width, 3)") from error
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InvalidInputError(
            f"got a picture of shape {array.shape}; expected (height, width, 3), (height, width) or a tensor "
            "(3, height, width)"
        )
    if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
        raise InvalidInputError(
            f"got a picture with numbers from {array.min()} to {array.max()}; expected integers from 0 to 255 or other "
            "numbers from 0 to 1: the picture itself, not the pixel values that a processor normalised"
        )
    return pixels
