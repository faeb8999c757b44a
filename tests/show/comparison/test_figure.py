"""The figure: rows in the order of the ranking, and the numbers that were found."""

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.image import imread

from captum_norm import Comparison
from captum_norm.show import draw_comparison
from captum_norm.show.canvas import figure_bytes
from captum_norm.show.colors import color_table, shares_of
from tests.lab.comparison.examples import comparison


def test_panels_show_what_was_found() -> None:
    found = comparison()
    names, means = found.ranking, found.means()
    figure = draw_comparison(found)
    scores, _, gains, costs, agreement = figure.get_axes()
    assert [label.get_text() for label in scores.get_yticklabels()] == names
    assert [label.get_text() for label in gains.get_yticklabels()] == names
    counted = found.removable[0][:5].tolist()
    rows = [shares_of(found.results[name].scores[0][:5].tolist(), counted) for name in names]
    np.testing.assert_array_equal(scores.images[0].get_array(), rows)
    assert [bar.get_width() for bar in gains.patches] == [means[name]["relevance_gain"] for name in names]  # type: ignore[attr-defined]
    places = costs.collections[0].get_offsets()
    assert np.asarray(places)[:, 0].tolist() == [found.results[name].forward_ratio for name in names]
    order = [list(found.results).index(name) for name in names]
    np.testing.assert_array_equal(agreement.images[0].get_array(), found.agreement[order][:, order])
    texts = [text.get_text() for text in agreement.texts]
    assert texts[:: len(names) + 1] == ["100"] * len(names)
    assert found.signature in [text.get_text() for text in figure.texts]


def test_the_colours_are_those_of_the_page() -> None:
    colors = draw_comparison(comparison()).get_axes()[0].images[0].get_cmap()
    np.testing.assert_array_equal(
        np.rint(np.array(colors([0.0, 1.0]))[:, :3] * 255), [color_table(below=True)[-1], color_table()[-1]]
    )


def scaled(gain: float, ratios: Sequence[float]) -> Comparison:
    """The comparison with smaller gains, and other costs."""
    found = comparison()
    results = {
        name: replace(
            result,
            faithfulness=replace(result.faithfulness, relevance_gain=gain * result.faithfulness.relevance_gain),
            forward_ratio=ratio,
        )
        for (name, result), ratio in zip(found.results.items(), ratios, strict=True)
    }
    return replace(found, results=results)


@pytest.mark.parametrize("gain", [1, 1e-3, 1e-6])
@pytest.mark.parametrize(
    "ratios", [(3.1, 4.4, 3.2, 3.3, 4), (0.9, 8, 2, 3, 4), (2, 2, 2, 2, 2), (9, 11, 9, 9, 9), (0.3, 4000, 20, 50, 3)]
)
def test_numbers_of_the_axes_are_apart(gain: float, ratios: Sequence[float]) -> None:
    figure = draw_comparison(scaled(gain, ratios))
    figure.draw_without_rendering()
    for axes in figure.get_axes()[2:4]:
        low, high = axes.get_xlim()
        ticks = [
            label
            for which in (False, True)
            for label in axes.get_xticklabels(minor=which)
            if label.get_text() and low <= label.get_position()[0] <= high
        ]
        assert len(ticks) >= 2
        assert not any("10^" in label.get_text() for label in ticks)
        edges = sorted((label.get_window_extent().x0, label.get_window_extent().x1) for label in ticks)
        assert all(right + 5 < left for (_, right), (left, _) in pairwise(edges))


def test_the_file_is_a_picture() -> None:
    picture = imread(io.BytesIO(figure_bytes(draw_comparison(comparison("causal")))), format="png")
    assert picture.shape[1] == 13 * 150
    assert picture.std() > 0.05
