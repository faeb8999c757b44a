"""Frames, JSON and CSV say what was found."""

import csv
import io
import json
import math
import sys
from typing import Any

import pytest

from captum_norm import Comparison, InvalidInputError
from captum_norm.lab.comparison import MEASURES
from tests.lab.comparison.examples import METHODS, TEXTS, comparison

NAMES = [measure.name for measure in MEASURES]


@pytest.fixture(params=["classifier", "causal"], name="found")
def either(request: pytest.FixtureRequest) -> Comparison:
    return comparison(request.param)


def test_the_frame_has_a_row_for_each_method_and_the_reason_of_the_refused() -> None:
    pytest.importorskip("pandas", reason="the extra tables is not installed")
    found = comparison("causal")
    frame = found.frame()
    assert list(frame.index) == [*METHODS, "globenc"]
    assert list(frame.columns) == [*NAMES, "seconds", "forward_ratio", "signature", "refused"]
    means = found.means()
    for name, result in found.results.items():
        row: Any = frame.loc[name]
        assert math.isnan(row["log_odds"])
        assert row["aopc"] == means[name]["aopc"] == float(result.faithfulness.aopc.mean())
        assert (row["seconds"], row["forward_ratio"]) == (result.seconds, result.forward_ratio)
        assert row["signature"] == result.signature
    assert frame["refused"].isna().tolist() == [True] * len(METHODS) + [False]
    refused: Any = frame.loc["globenc"]
    assert refused["refused"] == found.refused["globenc"]
    assert math.isnan(refused["aopc"])


def test_further_frames() -> None:
    pytest.importorskip("pandas", reason="the extra tables is not installed")
    found = comparison()
    scores = found.frame("scores")
    assert scores["token"].tolist() == TEXTS[0][:5] + TEXTS[1]
    assert scores["removable"].sum() == 3 + 5
    assert scores["example"].tolist() == [0] * 5 + [1] * 7
    for name, result in found.results.items():
        assert scores[name].tolist() == result.scores[found.real].tolist()
    agreement = found.frame("agreement")
    assert list(agreement.index) == list(agreement.columns) == METHODS
    assert agreement.to_numpy().tolist() == found.agreement.tolist()
    curves = found.frame("curves")
    assert len(curves) == 11 * len(METHODS)
    decompx = curves[curves["method"] == "decompx"]
    assert decompx["morf"].tolist() == found.results["decompx"].faithfulness.morf.mean(0).tolist()
    assert decompx["removed"].tolist() == [step / 10 for step in range(11)]


def test_json_and_csv_hold_every_table(found: Comparison) -> None:
    content = json.loads(found.to_json())
    assert content["signature"] == found.signature
    assert (content["model"], content["explained"], content["examples"]) == (found.model, found.explained, 2)
    assert (content["forward_seconds"], content["targets"]) == (found.forward_seconds, list(found.targets))
    tables: tuple[Any, ...] = ("methods", "scores", "agreement", "curves")
    for table in tables:
        rows = [{name: None if value != value else value for name, value in row.items()} for row in found._rows(table)]
        assert content[table] == rows
        texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
        assert list(csv.DictReader(io.StringIO(found.to_csv(table)))) == texts
    with pytest.raises(InvalidInputError, match="got table='means'; expected one of methods, scores, agreement, curv"):
        found.to_csv("means")  # type: ignore[arg-type]


def test_methods_are_ranked_by_relevance_gain(found: Comparison) -> None:
    gains = [found.means()[name]["relevance_gain"] for name in found.ranking]
    assert gains == sorted(gains, reverse=True)
    assert set(found.ranking) == set(METHODS)


def test_every_fact_is_stated(found: Comparison) -> None:
    facts = found.facts()
    assert facts["signature"] == found.signature
    assert facts["examples"] == "2"


def test_without_pandas_frames_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'captum-norm\[tables\]'"):
        comparison().frame()
    assert comparison().to_csv().startswith("method,relevance_gain,")
