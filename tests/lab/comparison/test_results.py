"""Frames, JSON and CSV say what was found."""

import csv
import io
import json
import math
import sys
from contextlib import suppress
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from captum_norm import InvalidInputError
from captum_norm.lab.comparison import MEASURES, Comparison
from captum_norm.lab.comparison.methods import seeded
from captum_norm.lab.comparison.results import sign_flip_p, undefeated
from captum_norm.lab.evaluation import FaithfulnessScores
from captum_norm.results.tables import without_nan
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
    content = json.loads(found.file_bytes(".json"))
    assert content["signature"] == found.signature
    assert (content["model"], content["explained"], content["examples"]) == (found.model, found.explained, 2)
    assert content["forward_seconds"] == found.forward_seconds
    assert [output["name"] for output in content["outputs"]] == [output.name for output in found.outputs]
    tables: tuple[Any, ...] = ("methods", "scores", "agreement", "curves")
    for table in tables:
        assert content[table] == without_nan(found.records(table))
    rows = without_nan(found.records())
    texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
    assert list(csv.DictReader(io.StringIO(found.file_bytes(".csv").decode()))) == texts
    with pytest.raises(InvalidInputError, match="got table='means'; expected one of methods, scores, agreement, curv"):
        found.records("means")  # type: ignore[arg-type]


def test_methods_are_ranked_and_facts_stated(found: Comparison) -> None:
    gains = [found.means()[name]["relevance_gain"] for name in found.ranking]
    assert gains == sorted(gains, reverse=True)
    assert set(found.ranking) == set(METHODS)
    facts = found.facts()
    assert facts["signature"] == found.signature
    assert facts["examples"] == "2"


def test_without_pandas_frames_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'captum-norm\[tables\]'"):
        comparison().frame()
    assert comparison().file_bytes(".csv").startswith(b"method,relevance_gain,")


GAIN = MEASURES[0]

BY_NAME = {measure.name: measure for measure in MEASURES}


def noisy(center: float, seed: int, count: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return center + 0.1 * torch.randn(count, generator=generator)


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_the_share_of_flips(seed: int) -> None:
    differences = np.random.default_rng(seed).normal(0.3, 1, 9)
    sums = [abs(float(np.dot(signs, differences))) for signs in product((1, -1), repeat=9)]
    expected = np.mean([one >= sums[0] - 1e-12 for one in sums])
    assert sign_flip_p(torch.tensor(differences)) == pytest.approx(expected, abs=1e-12)
    many = torch.tensor(np.random.default_rng(seed).normal(0.0, 1, 60))
    assert 0 < sign_flip_p(many) == sign_flip_p(-many)
    assert sign_flip_p(noisy(1.0, seed)) < 0.001


def test_only_differences_that_are_seen_and_tell_something_are_marked() -> None:
    found = {"a": noisy(0.5, 0), "b": noisy(0.5, 1), "c": noisy(0.0, 2)}
    assert undefeated(found, GAIN) == {"a", "b"}
    assert undefeated({name: -one for name, one in found.items()}, BY_NAME["sufficiency"]) == {"a", "b"}
    assert undefeated({"a": noisy(0.5, 0), "b": noisy(0.5, 1)}, GAIN) == set(), "no method is worse"
    flat = {name: torch.full((20,), 1e-4 * place) for place, name in enumerate("abcd", 1)}
    assert undefeated(flat, GAIN) == set()
    assert undefeated({"a": torch.ones(5), "b": torch.zeros(5)}, GAIN) == set()
    assert undefeated({"a": torch.ones(6), "b": torch.zeros(6)}, GAIN) == {"a"}


def test_nan_is_left_out_and_flat_comparisons_say_so() -> None:
    nan = torch.full((6,), torch.nan)
    half = torch.ones(8).index_fill(0, torch.tensor([3]), torch.nan)
    assert undefeated({"a": nan}, GAIN) == set()
    assert undefeated({"a": half, "b": torch.zeros(8), "c": torch.full((8,), torch.nan)}, GAIN) == {"a"}
    found = comparison()
    assert len(found) == 2
    assert "no method differs" in found.facts()["flat"]
    assert not any(found.best().values())


def test_every_score_but_the_curves_is_a_measure() -> None:
    scores = {field.name for field in fields(FaithfulnessScores)} - {"morf", "lerf"}
    assert {measure.name for measure in MEASURES} == scores


def drawn() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand())]  # noqa: NPY002


def test_draws_follow_from_the_seed_alone() -> None:
    inside, model = [], nn.Linear(1, 1)
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    outside = [drawn(), drawn()]
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    for expected in outside:
        with suppress(RuntimeError), seeded(model, 1):
            inside.append(drawn())
            raise RuntimeError
        assert drawn() == expected
    assert inside[0] == inside[1]
