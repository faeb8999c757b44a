"""Heatmaps: the numbers drawn, the labels, the scales."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from captum_norm.show import Panel, draw_heatmaps, save_figure
from captum_norm.show.colors import color_table

TOKENS = ["[CLS]", "$\\frac$", "b", "a-very-long-token-name"]


def maps(count: int, queries: int = 4, keys: int = 4) -> list[Panel]:
    generator = torch.Generator().manual_seed(count)
    return [
        Panel(f"layer {index + 1}", (index + 1) * torch.rand(queries, keys, generator=generator), "norm")
        for index in range(count)
    ]


def panels_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


def labels(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def test_axes_carry_the_map_its_labels_and_its_unit() -> None:
    panel = maps(1)[0]
    figure = draw_heatmaps([panel], TOKENS, title="a title")
    (axes,) = panels_of(figure)
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), panel.map.numpy())
    assert axes.images[0].get_clim() == pytest.approx((0.0, panel.map.max().item()))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key (gives)", "query (receives)")
    assert axes.get_title() == "layer 1"
    assert labels(axes.xaxis) == labels(axes.yaxis) == ["[CLS]", "$\\frac$", "b", "a-very-long-t…"]
    assert figure.get_suptitle() == "a title"
    (bar,) = axes.child_axes
    assert bar.get_ylabel() == "norm"


def test_queries_go_down_and_keys_go_across() -> None:
    panel = Panel("cross", torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "norm")
    (axes,) = panels_of(draw_heatmaps([panel], ["q0", "q1"], ["k0", "k1", "k2"]))
    assert labels(axes.yaxis) == ["q0", "q1"]
    assert labels(axes.xaxis) == ["k0", "k1", "k2"]
    assert axes.yaxis.get_inverted()


def test_pixels_have_the_scale_s_colours(tmp_path: Path) -> None:
    figure = draw_heatmaps([Panel("m", torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "norm")], ["a", "b"])
    path = save_figure(figure, tmp_path / "m.png")
    pixels = np.rint(imread(path)[..., :3] * 255).astype(int)
    (axes,) = panels_of(figure)
    for (row, column), color in [((0, 0), 0), ((0, 1), -1), ((1, 0), -1), ((1, 1), 0)]:
        x, y = axes.transData.transform((column, row))
        np.testing.assert_array_equal(pixels[pixels.shape[0] - int(y), int(x)], color_table()[color])


def test_each_panel_has_its_own_scale_or_all_share_one() -> None:
    panels = maps(3)
    tops = [panel.map.max().item() for panel in panels]
    own = panels_of(draw_heatmaps(panels, TOKENS))
    assert [axes.images[0].get_clim()[1] for axes in own] == pytest.approx(tops)
    assert [len(axes.child_axes) for axes in own] == [1, 1, 1]
    shared = panels_of(draw_heatmaps(panels, TOKENS, shared_scale=True))
    assert [axes.images[0].get_clim()[1] for axes in shared] == pytest.approx([max(tops)] * 3)
    assert [len(axes.child_axes) for axes in shared] == [0, 0, 1]


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 3), (6, 3), (12, 4)])
def test_many_panels_go_in_rows(count: int, columns: int) -> None:
    drawn = panels_of(draw_heatmaps(maps(count), TOKENS))
    assert [axes.get_title() for axes in drawn] == [f"layer {index + 1}" for index in range(count)]
    grid = drawn[0].get_gridspec()
    assert grid is not None
    assert (grid.ncols, grid.nrows) == (columns, count // columns)


def test_long_sequences_thin_their_labels() -> None:
    tokens = [f"t{index}" for index in range(200)]
    (axes,) = panels_of(draw_heatmaps(maps(1, 200, 200), tokens))
    assert labels(axes.xaxis) == tokens[::7]
    assert axes.get_xticks().tolist() == list(range(0, 200, 7))


def test_map_of_zeros_is_light_and_not_an_error() -> None:
    (axes,) = panels_of(draw_heatmaps([Panel("zero", torch.zeros(2, 2), "norm")], ["a", "b"]))
    assert axes.images[0].get_clim() == (0.0, 1.0)


def test_maps_may_be_of_any_dtype_and_have_a_gradient() -> None:
    panel = Panel("half", torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True), "norm")
    (axes,) = panels_of(draw_heatmaps([panel], ["a", "b"]))
    assert axes.images[0].get_clim() == (0.0, 1.0)


@pytest.mark.parametrize(
    ("panels", "tokens", "message"),
    [
        ([], ["a"], "no map to draw"),
        ([Panel("heads", torch.ones(3, 2, 2), "norm")], ["a", "b"], "'heads' has shape \\(3, 2, 2\\)"),
        ([Panel("m", torch.ones(3, 2), "norm")], ["a", "b"], "2 tokens do not fit the queries \\(rows\\) of 3"),
        ([Panel("m", torch.ones(2, 3), "norm")], ["a", "b"], "2 tokens do not fit the keys \\(columns\\) of 3"),
    ],
)
def test_maps_that_do_not_fit_are_named(panels: list[Panel], tokens: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_heatmaps(panels, tokens)


def test_one_scale_for_two_units_is_refused() -> None:
    panels = [Panel("a", torch.ones(1, 1), "norm"), Panel("b", torch.ones(1, 1), "weight")]
    with pytest.raises(ValueError, match="several units: norm, weight"):
        draw_heatmaps(panels, ["a"], shared_scale=True)
