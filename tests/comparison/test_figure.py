"""The figure: rows in the order of the ranking, and the numbers that were found."""

import io

import numpy as np
from matplotlib.image import imread

from captum_norm.visualization.colors import color_table, signed_shares_of
from tests.comparison.examples import comparison


def test_panels_show_what_was_found() -> None:
    found = comparison()
    names, means = found.ranking, found.means()
    figure = found.figure()
    scores, _, gains, costs, agreement = figure.get_axes()
    titles = [found.results[name].title for name in names]
    assert [label.get_text() for label in scores.get_yticklabels()] == titles
    assert [label.get_text() for label in gains.get_yticklabels()] == titles
    counted = found.removable[0][:5].tolist()
    rows = [signed_shares_of(found.results[name].scores[0][:5].tolist(), counted) for name in names]
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
    colors = comparison().figure().get_axes()[0].images[0].get_cmap()
    np.testing.assert_array_equal(
        np.rint(np.array(colors([0.0, 1.0]))[:, :3] * 255), [color_table(below=True)[-1], color_table()[-1]]
    )


def test_the_file_is_a_picture() -> None:
    picture = imread(io.BytesIO(comparison("causal").to_png()), format="png")
    assert picture.shape[1] == 13 * 150
    assert picture.std() > 0.05
