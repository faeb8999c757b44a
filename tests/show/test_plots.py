"""Plots: each draws the numbers of its table, labelled, and told apart without colour."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.results import AnalysisResult, Column, Plot, Table
from captum_norm.show.plots import INK, draw_curves, draw_plot, plot_bytes, plot_svg
from tests.lab.analysis.results import HEAT, LAYERS, LINE, RESULT

NAN = math.nan


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def segments(container: ErrorbarContainer) -> list[list[list[float]]]:
    """The ends of the error bars, (N, 2, 2)."""
    ((bars,),) = (container.lines[2],)
    return [segment.tolist() for segment in bars.get_segments()]


def ticks(axis: mpl.axis.Axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def result_of(*columns: tuple[str, list[object]]) -> AnalysisResult:
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    table = Table("t", "T", tuple(Column(name, name) for name, _ in columns), rows)
    return AnalysisResult("a", "d", {}, [table])


def test_lines_go_through_the_values_with_deviations_and_gaps() -> None:
    figure = draw_plot(RESULT, LINE)
    axes = axes_of(figure)
    first, second = (container for container in axes.containers if isinstance(container, ErrorbarContainer))
    np.testing.assert_array_equal(first.lines[0].get_xydata(), [[1, 0.25], [2, 1.0], [3, NAN]])
    np.testing.assert_array_equal(second.lines[0].get_xydata(), [[1, 2.5], [2, 1 / 3], [3, 12.0]])
    np.testing.assert_allclose(segments(first)[0], [[1, 0.125], [1, 0.375]])
    np.testing.assert_allclose(
        segments(second), [[[1, 2.0], [1, 3.0]], [[2, 1 / 12], [2, 7 / 12]], [[3, 10.5], [3, 13.5]]]
    )
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("layer", "‖f(x)‖", "")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["[CLS]", "$x$"]
    assert legend.get_title().get_text() == "category"
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_heat_has_a_field_for_each_place_with_its_value() -> None:
    figure = draw_plot(RESULT, HEAT)
    axes = axes_of(figure)
    (mesh,) = (collection for collection in axes.collections if isinstance(collection, QuadMesh))
    np.testing.assert_array_equal(
        np.ma.filled(np.ma.asarray(mesh.get_array()), NAN), [[-0.5, NAN, -0.25], [0.75, 0.25, 1.0]]
    )
    assert mesh.get_clim() == (-0.5, 1.0)
    assert ticks(axes.xaxis) == ["1", "2", "3"]
    assert ticks(axes.yaxis) == ["[CLS]", "$x$"]
    assert axes.yaxis.get_inverted()
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "−.50", (2, 0): "−.25", (0, 1): ".75", (1, 1): ".25", (2, 1): "1.00"}
    assert figure.axes[1].get_ylabel() == "Spearman’s ρ"


@pytest.mark.parametrize(
    ("values", "limits"), [([2.0, 5.0], (0.0, 5.0)), ([0.0, 0.0], (0.0, 1.0)), ([None, None], (0.0, 1.0))]
)
def test_colours_of_what_is_not_negative_start_at_0(values: list[object], limits: tuple[float, float]) -> None:
    result = result_of(("x", [1, 2]), ("y", [1, 1]), ("v", values))
    axes = axes_of(draw_plot(result, Plot("p", "heat", "P", "t", "x", "y", value="v")))
    assert axes.collections[0].get_clim() == limits


def test_words_along_an_axis_stand_in_the_order_of_their_rows() -> None:
    result = result_of(("x", ["LN", "FF", "LN"]), ("y", [1.0, 2.0, 3.0]), ("s", ["a", "a", "b"]))
    axes = axes_of(draw_plot(result, Plot("p", "line", "P", "t", "x", "y", "s")))
    assert ticks(axes.xaxis) == ["LN", "FF"]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[0, 1], [1, 2]], [[0, 3]]]  # type: ignore[union-attr]


def test_long_labels_are_wrapped() -> None:
    words = "how much of what arrives comes from elsewhere"
    result = result_of(("x", [1]), (words, [1]), ("v", [1.0]))
    line = axes_of(draw_plot(result, Plot("p", "line", "P", "t", "x", words)))
    assert line.get_ylabel() == "how much of what arrives\ncomes from elsewhere"
    heat = draw_plot(result, Plot("p", "heat", "P", "t", "x", "v", value=words))
    assert heat.axes[1].get_ylabel() == "how much of what\narrives comes\nfrom elsewhere"


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (replace(LINE, table="none"), "got the table none"),
        (replace(LINE, y="none"), "got the column none"),
        (replace(LINE, error="none"), "got the column none"),
        (replace(LINE, y="category"), r"got '\[CLS\]' in the column category of layers; expected a number"),
        (replace(HEAT, value=None), "got no value for the heat plot heat"),
        (replace(HEAT, x="category"), "got several values for one position in the plot heat"),
    ],
)
def test_plot_that_does_not_fit_its_table_is_refused(plot: Plot, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        draw_plot(RESULT, plot)


def test_curves_run_from_the_whole_input_to_none_of_it() -> None:
    axes = axes_of(draw_curves([1.0, 0.5, 0.0], [1.0, 0.75, 0.25], (-0.5, 1.0)))
    most, least = (line.get_xydata() for line in axes.lines)
    np.testing.assert_array_equal(most, [[0, 1], [0.5, 0.5], [1, 0]])
    np.testing.assert_array_equal(least, [[0, 1], [0.5, 0.75], [1, 0.25]])
    assert ticks(axes.yaxis) == ["−0.5", "1"]


def test_table_without_rows_is_refused() -> None:
    empty = AnalysisResult("a", "d", {}, [replace(LAYERS, rows=[])])
    with pytest.raises(InvalidInputError, match="got nothing to draw for the plot norms: the table layers has no rows"):
        draw_plot(empty, LINE)


@pytest.fixture
def settings() -> Iterator[None]:
    before = dict.copy(mpl.rcParams)  # their own copy and comparison would choose a backend
    yield
    assert dict.__eq__(mpl.rcParams, before)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("plot", [LINE, HEAT], ids=lambda plot: plot.kind)
@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_same_numbers_give_the_same_bytes(plot: Plot, suffix: str) -> None:
    content = plot_bytes(draw_plot(RESULT, plot), suffix)
    assert content == plot_bytes(draw_plot(RESULT, plot), suffix)
    assert content.startswith({"png": b"\x89PNG", "pdf": b"%PDF"}[suffix])
    assert b"CreationDate" not in content
    assert b"/Type3" not in content.replace(b" ", b"")


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("plot", [LINE, HEAT], ids=lambda plot: plot.kind)
def test_svg_is_as_large_as_its_type_needs_and_takes_the_readers_ink(plot: Plot) -> None:
    figure = draw_plot(RESULT, plot)
    svg = plot_svg(figure)
    root = ET.fromstring(svg)
    assert float(root.attrib["width"]) == round(figure.get_figwidth() * 72 * 1.7)
    assert float(root.attrib["height"]) == round(figure.get_figheight() * 72 * 1.7)
    assert svg.count(INK) == 1
    assert "currentColor" in svg
    assert "date" not in svg
    assert not re.search(r'href="(?!#|data:)|url\([^#]', svg)
    texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert RESULT.table("layers").label(plot.x) in texts
