"""What is best, by measure."""

from dataclasses import fields

from captum_norm.lab.comparison import MEASURES
from captum_norm.lab.evaluation import FaithfulnessScores


def test_the_best_are_equal_to_three_decimals_and_nan_is_none() -> None:
    measures = {measure.name: measure for measure in MEASURES}
    values = {"a": 0.5, "b": 0.4998, "c": -1.0, "d": float("nan")}
    assert measures["aopc"].best(values) == {"a", "b"}
    assert measures["sufficiency"].best(values) == {"c"}
    assert measures["log_odds"].best({"d": float("nan")}) == set()
    assert (measures["aopc"].arrow, measures["sufficiency"].arrow) == ("↑", "↓")


def test_every_score_but_the_curves_is_a_measure() -> None:
    scores = {field.name for field in fields(FaithfulnessScores)} - {"morf", "lerf"}
    assert {measure.name for measure in MEASURES} == scores
