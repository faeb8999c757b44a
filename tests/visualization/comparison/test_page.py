"""The page: escaped, self-contained, and with the right numbers and colours."""

import re

import pytest

from captum_norm import Comparison
from captum_norm.visualization import render_comparison
from captum_norm.visualization.colors import hex_of, ink_on, signed_color_of, signed_shares_of
from tests.comparison.examples import HOSTILE, comparison
from tests.visualization.test_page import Outline


@pytest.fixture(params=["classifier", "causal"], name="found")
def either(request: pytest.FixtureRequest) -> Comparison:
    return comparison(request.param)


def test_everything_given_is_escaped_and_nothing_is_loaded(found: Comparison) -> None:
    page = render_comparison(found)
    outline = Outline(page)
    assert "<script" not in page
    assert HOSTILE in outline.of("li")
    assert not re.search(r"""https?:|@import|url\(|(src|href)\s*=|<(script|link|img|iframe|object)""", page)
    assert {"viewport"} <= {attributes.get("name") for tag, attributes in outline.tags if tag == "meta"}


def test_the_table_has_every_number_and_marks_the_best(found: Comparison) -> None:
    page, means = render_comparison(found), found.means()
    rows = re.findall(r'<tr><td class="name">(.*?)</td>(.*?)</tr>', page)
    assert [title for title, _ in rows] == [found.results[name].title for name in found.ranking]
    shown = ["relevance_gain", "aopc", "comprehensiveness", "sufficiency", "log_odds", "spearman", "kendall"]
    if found.explained == "logit":
        shown.remove("log_odds")
    for name, (_, cells) in zip(found.ranking, rows, strict=True):
        texts = re.findall(r">([^<]+)</td>", cells)
        assert texts[: len(shown)] == [f"{means[name][one]:.3f}".replace("-", "−") for one in shown]
        assert texts[-2:] == [f"{found.results[name].seconds:.2f}", f"{found.results[name].forward_ratio:.1f}"]
        best = "number best" in cells.split("</td>")[0]
        assert best == (texts[0] == f"{means[found.ranking[0]]['relevance_gain']:.3f}".replace("-", "−"))
    assert found.signature in page
    for result in found.results.values():
        assert result.signature in page
    for reason in found.refused.values():
        assert reason.replace('"', "&#34;") in page


def test_tokens_have_the_colours_of_their_shares(found: Comparison) -> None:
    outline = Outline(render_comparison(found))
    items = iter([attributes for tag, attributes in outline.tags if tag == "li"])
    for example in range(2):
        real = found.real[example]
        counted = found.removable[example][real].tolist()
        for name in found.ranking:
            scores = found.results[name].scores[example][real].tolist()
            for score, share, one in zip(scores, signed_shares_of(scores, counted), counted, strict=True):
                item, ground = next(items), signed_color_of(share)
                assert item["title"] == f"{score:.4g}"
                expected = f"background: {hex_of(ground)}; color: {hex_of(ink_on(ground))}"
                assert item.get("style") == (expected if one else None)
    assert next(items, None) is None


def test_curves_run_from_the_whole_input_to_none_of_it(found: Comparison) -> None:
    figures = re.findall(r"<figure>(.*?)</figure>", render_comparison(found), re.DOTALL)
    curves = {
        name: (result.faithfulness.morf.mean(0).tolist(), result.faithfulness.lerf.mean(0).tolist())
        for name, result in found.results.items()
    }
    values = [value for pair in curves.values() for curve in pair for value in curve]
    low, high = min(values), max(values)
    for name, figure in zip(found.ranking, figures, strict=True):
        assert found.results[name].title in figure
        for kind, curve in zip(("most", "least"), curves[name], strict=True):
            path = re.search(rf'class="{kind}" d="M(.*?)"', figure)
            assert path is not None
            points = [tuple(map(float, point.split())) for point in path[1].split("L")]
            for step, ((x, y), value) in enumerate(zip(points, curve, strict=True)):
                assert x == pytest.approx(34 + 160 * step / 10, abs=0.051)
                assert y == pytest.approx(100 - 94 * (value - low) / (high - low), abs=0.051)


def test_the_matrix_is_that_of_agreement(found: Comparison) -> None:
    matrix = render_comparison(found).partition('<table class="matrix">')[2]
    cells = re.findall(r'<td style="background: (#\w+); color: #\w+" title=".*?">(.*?)</td>', matrix)
    names = list(found.results)
    values = [float(found.agreement[names.index(a), names.index(b)]) for a in found.ranking for b in found.ranking]
    assert cells == [(hex_of(signed_color_of(value)), f"{value:.2f}".replace("-", "−")) for value in values]
