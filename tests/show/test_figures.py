"""Figures: the numbers drawn, labels and scales; patches over their picture; methods compared; without pyplot."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from captum_norm.errors import InvalidInputError
from captum_norm.show import Panel, draw_heatmaps, draw_patches, figure_bytes
from captum_norm.show.colors import color_of, color_table, shares_of
from tests.lab.comparison.examples import comparison

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
    figure.savefig(tmp_path / "m.png")
    pixels = np.rint(imread(tmp_path / "m.png")[..., :3] * 255).astype(int)
    (axes,) = panels_of(figure)
    for (row, column), color in [((0, 0), 0), ((0, 1), -1), ((1, 0), -1), ((1, 1), 0)]:
        x, y = axes.transData.transform((column, row))
        np.testing.assert_array_equal(pixels[pixels.shape[0] - int(y), int(x)], color_table()[color])


def test_each_panel_has_its_own_scale() -> None:
    panels = maps(3)
    drawn = panels_of(draw_heatmaps(panels, TOKENS))
    tops = [panel.map.max().item() for panel in panels]
    assert [axes.images[0].get_clim()[1] for axes in drawn] == pytest.approx(tops)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 3), (6, 3), (12, 4)])
def test_many_panels_go_in_rows(count: int, columns: int) -> None:
    drawn = panels_of(draw_heatmaps(maps(count), TOKENS))
    assert [axes.get_title() for axes in drawn] == [f"layer {index + 1}" for index in range(count)]
    grid: Any = drawn[0].get_gridspec()
    assert (grid.ncols, grid.nrows) == (columns, count // columns)


def test_long_sequences_thin_their_labels() -> None:
    tokens = [f"t{index}" for index in range(200)]
    (axes,) = panels_of(draw_heatmaps(maps(1, 200, 200), tokens))
    assert labels(axes.xaxis) == tokens[::7]
    assert axes.get_xticks().tolist() == list(range(0, 200, 7))


def test_maps_may_be_zero_of_any_dtype_and_have_a_gradient() -> None:
    (axes,) = panels_of(draw_heatmaps([Panel("zero", torch.zeros(2, 2), "norm")], ["a", "b"]))
    assert axes.images[0].get_clim() == (0.0, 1.0)
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


def picture_of(height: int = 60, width: int = 80) -> Any:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


def heat_of(figure: Any) -> Any:
    """The heat map's picture, which is drawn over the grey one."""
    _, over = figure.axes[:2]
    return over.images[1]


def test_the_heat_map_lies_over_the_picture_patch_by_patch() -> None:
    picture = picture_of()
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
    heat = heat_of(draw_patches(picture_of(), scores))
    colors = heat.cmap(heat.norm(scores.numpy()))[..., :3] * 255
    for place, share in (((0, 0), -0.5), ((1, 0), 0.25), ((1, 1), 1.0)):
        assert np.abs(colors[place] - color_of(share)).max() <= 2  # a step of the table


@pytest.mark.parametrize("form", ["tensor", "tensor of bytes", "rows first", "grey", "fractions"])
def test_a_picture_may_come_in_any_form(form: str) -> None:
    picture = picture_of(6, 8)
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
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(picture: Any, scores: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        draw_patches(picture, scores)


def test_a_comparison_shows_the_scores_and_gains_of_all_methods() -> None:
    compared = comparison()
    names, means = compared.ranking, compared.means()
    figure = compared.plot()
    scores, gains = figure.get_axes()[:2]
    assert labels(scores.yaxis) == names
    counted = compared.removable[0][:5].tolist()
    rows = [shares_of(compared.results[name].scores[0][:5].tolist(), counted) for name in names]
    np.testing.assert_array_equal(scores.images[0].get_array(), rows)
    assert [bar.get_width() for bar in gains.patches] == [means[name]["relevance_gain"] for name in names]  # type: ignore[attr-defined]
    gains.set_xlim(0, 2000)
    figure.canvas.draw()
    assert "10^{3}" in gains.xaxis.get_offset_text().get_text()
    assert compared.signature in [text.get_text() for text in figure.texts]
    colors = scores.images[0].get_cmap()
    np.testing.assert_array_equal(
        np.rint(np.array(colors([0.0, 1.0]))[:, :3] * 255), [color_table(below=True)[-1], color_table()[-1]]
    )


def test_a_figure_is_a_picture_in_notebooks_and_unknown_to_pyplot() -> None:
    figure: Any = draw_heatmaps(maps(1), TOKENS)
    picture = figure._repr_png_()  # what IPython asks for
    assert picture.startswith(b"\x89PNG")
    assert picture == figure_bytes(draw_heatmaps(maps(1), TOKENS))
    pyplot = sys.modules.get("matplotlib.pyplot")
    before = pyplot.get_fignums() if pyplot else []
    figure_bytes(draw_heatmaps(maps(2), TOKENS))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert (pyplot.get_fignums() if pyplot else []) == before


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_savefig_spells_out_what_cannot_be_seen(suffix: str, tmp_path: Path) -> None:
    made = [[draw_heatmaps([Panel("m", [[1.0]], f"a{end}")], ["b"]) for end in ("\u202e", "\\u202e")] for _ in range(2)]
    assert len({figure_bytes(figure, suffix) for figure in made[0]}) == 1
    paths = [tmp_path / f"{name}.{suffix}" for name in ("hidden", "spelled")]
    for figure, path in zip(made[1], paths, strict=True):
        figure.savefig(path)
    if suffix == "png":
        assert paths[0].read_bytes() == paths[1].read_bytes()
