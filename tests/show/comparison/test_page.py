"""The page has the numbers of the comparison, in their order, with the right cells marked."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from captum_norm import Comparison
from captum_norm.lab.comparison import MEASURES
from captum_norm.show import render_comparison
from captum_norm.show.pages import comparison_page
from tests.lab.comparison.examples import HOSTILE, TEXTS, comparison

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=["classifier", "causal"], name="found", scope="module")
def either(request: pytest.FixtureRequest) -> Comparison:
    return comparison(request.param)


def test_the_table_has_every_number_and_marks_the_best(found: Comparison) -> None:
    table, means = comparison_page(found).tables[0], found.means()
    shown = [measure for measure in MEASURES if found.explained != "logit" or measure.name != "log_odds"]
    assert [column.name for column in table.columns[1:-2]] == [f"{one.title} {one.arrow}" for one in shown]
    for name, row in zip(found.ranking, table.rows, strict=True):
        result = found.results[name]
        expected = [means[name][one.name] for one in shown]
        assert row == [name, *expected, result.seconds, result.forward_ratio]
    for at, measure in enumerate(shown, 1):
        marked = [found.ranking[row] for row, where in table.strong if where == at]
        assert set(marked) == found.best()[measure.name]


def test_agreement_refusals_and_signatures_are_tables(found: Comparison) -> None:
    tables = {table.title: table for table in comparison_page(found).tables}
    order = [list(found.results).index(name) for name in found.ranking]
    values = [row[1:] for row in tables["Agreement"].rows]
    np.testing.assert_array_equal(np.array(values, dtype=float), found.agreement.numpy()[order][:, order])
    assert [column.meaning for column in tables["Agreement"].columns[1:]] == found.ranking
    assert {row[0]: row[1] for row in tables["Signatures"].rows} == {
        name: one.signature for name, one in found.results.items()
    }
    refused = tables.get("Methods that were refused")
    assert {row[0]: row[1] for row in (refused.rows if refused else [])} == dict(found.refused)


def test_texts_have_every_method_and_only_removable_tokens_count(found: Comparison) -> None:
    page = comparison_page(found)
    for index, example in enumerate(page.examples):
        real = found.real[index]
        assert list(example.inputs.texts) == [
            text for text, one in zip(TEXTS[index], real.tolist(), strict=True) if one
        ]
        assert example.counted == found.removable[index][real].tolist()
        assert [scores.method for scores in example.scores] == found.ranking
        for name, scores in zip(found.ranking, example.scores, strict=True):
            np.testing.assert_allclose(scores.values, found.results[name].scores[index][real], rtol=1e-6)
            assert scores.signed == (scores.values < 0).any()


def test_curves_run_from_the_whole_input_to_none_of_it(found: Comparison) -> None:
    curves = {
        name: (result.faithfulness.morf.mean(0).tolist(), result.faithfulness.lerf.mean(0).tolist())
        for name, result in found.results.items()
    }
    values = [value for pair in curves.values() for curve in pair for value in curve]
    low, high = min(values), max(values)
    for name, figure in zip(found.ranking, comparison_page(found).figures, strict=True):
        assert figure.title.startswith(name)
        paths = {path.get("class"): path.get("d", "") for path in ET.fromstring(figure.svg).iter(f"{SVG}path")}
        for kind, curve in zip(("most", "least"), curves[name], strict=True):
            points = [tuple(map(float, point.split())) for point in paths[kind][1:].split("L")]
            for step, ((x, y), value) in enumerate(zip(points, curve, strict=True)):
                assert x == pytest.approx(34 + 160 * step / 10, abs=0.051)
                assert y == pytest.approx(100 - 94 * (value - low) / (high - low), abs=0.051)


def test_everything_given_is_escaped() -> None:
    page = render_comparison(comparison())
    assert HOSTILE not in page
    assert len(re.findall("<script", page)) == 2
