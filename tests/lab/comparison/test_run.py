"""Every number of a comparison, derived once more, one example at a time; frames, JSON and CSV say what was found."""

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from captum.attr import Attribution, InputXGradient, IntegratedGradients, Occlusion, Saliency
from torch import Tensor, nn

import captum_norm
from captum_norm import Difference, InvalidInputError, TokenAttribution, UnsupportedModelError, compare
from captum_norm.lab.comparison import MEASURES, Comparison
from captum_norm.lab.comparison.methods import PROJECTION, seeded
from captum_norm.lab.comparison.results import sign_flip_p, undefeated
from captum_norm.lab.evaluation import FaithfulnessScores, agreement
from captum_norm.methods import METHODS
from captum_norm.results.tables import without_nan
from tests import families
from tests.classifiers import CLS, MASK, SEP, TOKENIZER, classifier, randomized, sentences
from tests.lab.comparison.examples import METHODS as COMPARED
from tests.lab.comparison.examples import TEXTS, comparison, language_model
from tests.lab.test_evaluation import BINS, STEPS, derived, without

LENGTHS = [7, 5, 8]
STANDARD: dict[str, Any] = {"tokenizer": TOKENIZER, "bins": [float(share) for share in BINS], "steps": STEPS}
QUICK = ["norm", "alti", "decompx", "attention-gradient", "weights", "saliency", "occlusion"]


def batch() -> tuple[Any, Tensor, Tensor]:
    return classifier(), *sentences(LENGTHS)


def make(name: str, model: Any, **options: Any) -> Attribution:
    """A method as a user would make it."""
    about: dict[str, Any] = {"tokenizer": TOKENIZER, "keep_special": True, "baseline": "mask", **options}
    made: dict[str, Callable[[], Any]] = {
        "saliency": lambda: TokenAttribution(model, Saliency),
        "input-gradient": lambda: TokenAttribution(model, InputXGradient),
        "integrated-gradients": lambda: TokenAttribution(model, IntegratedGradients, n_steps=30, **about),
        "occlusion": lambda: TokenAttribution(model, Occlusion, **about),
    }
    method: Attribution = made[name]() if name in made else getattr(captum_norm, METHODS[name].class_name)(model)
    return method


def numbers(comparison: Comparison) -> dict[str, Any]:
    """All of it but the times."""
    rows = [
        {name: value for name, value in row.items() if name not in ("seconds", "forward_ratio")}
        for row in comparison.records("methods")
    ]
    return {"methods": rows} | {name: comparison.records(name) for name in ("scores", "agreement", "curves")}


def probability(model: Any, ids: Tensor, target: int, removed: frozenset[int]) -> float:
    """Of a class without some tokens."""
    with torch.no_grad():
        return float(model(**without(model, ids, set(removed), "mask")).logits[0].softmax(0)[target])


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_and_faithfulness_of_each_example_alone(seed: int) -> None:
    model, (ids, mask) = classifier(seed), sentences(LENGTHS, seed)
    names = [name for name, method in METHODS.items() if not method.options and name != "random"]
    names = [*(name for name in names if name != "deeplift"), "integrated-gradients"]
    found = compare(model, ids, mask, methods=names, batch_size=2, **STANDARD)
    assert list(found.results) == names
    assert not found.refused
    expected = agreement({name: result.scores for name, result in found.results.items()}, found.removable)
    torch.testing.assert_close(found.agreement, expected)
    for row, real in enumerate(mask.bool()):
        alone = ids[row, real]
        logits = model(alone[None]).logits[0].log_softmax(0)
        target = int(logits.argmax())
        assert found.outputs[row].name == model.config.id2label[target]
        removable = list(range(1, len(alone) - 1))
        assert found.removable[row, real].nonzero().flatten().tolist() == removable
        assert not found.removable[row, ~real].any()

        output = cache(partial(probability, model, alone, target))

        for name, result in found.results.items():
            scores = make(name, model).attribute(alone[None], target=target)[0]
            torch.testing.assert_close(result.scores[row, real], scores.detach(), rtol=1e-5, atol=1e-9)
            assert not result.scores[row, ~real].any()
            own = result.scores[row, real].tolist()
            for measure, value in derived(lambda gone: output(frozenset(gone)), own, removable, True).items():  # noqa: B023
                actual = getattr(result.faithfulness, measure)[row]
                expected = torch.tensor(value, dtype=torch.float64)
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, equal_nan=True)


def test_two_runs_give_the_same_numbers_and_leave_no_trace() -> None:
    model, ids, mask = batch()
    methods = ["norm", "attention-gradient", "decompx", "deeplift", "gradient-shap", "shapley", "random"]
    before = families.state_of(model)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    drawn = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first = compare(model, ids, mask, methods=methods, **STANDARD)
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    torch.manual_seed(6)
    second = compare(model, ids, mask, methods=methods, **STANDARD)
    assert str(numbers(first)) == str(numbers(second))
    assert families.state_of(model) == before
    other = compare(model, ids, mask, methods=["shapley", "norm"], seed=1, **STANDARD)
    assert not torch.equal(other.results["shapley"].scores, first.results["shapley"].scores)
    torch.testing.assert_close(other.results["norm"].scores, first.results["norm"].scores)
    assert "|seed:1|" in other.signature
    for result in other.results.values():
        assert result.seconds > 0
        assert result.forward_ratio == result.seconds / other.forward_seconds
    assert other.results["shapley"].seconds > other.results["norm"].seconds


def test_inputs_of_every_form_are_the_same() -> None:
    model, ids, mask = batch()
    forms: list[Any] = [(ids, mask), ((ids, mask), None), ({"input_ids": ids, "attention_mask": mask}, None)]
    methods = ["decompx", "occlusion"]
    first, *others = (compare(model, *form, methods=methods, **STANDARD) for form in forms)
    assert all(str(numbers(other)) == str(numbers(first)) for other in others)
    embeddings = model.get_input_embeddings()(ids).detach()
    bare = {**STANDARD, "keep_special": False}
    one, two = (compare(model, inputs, mask, methods=methods, **bare) for inputs in (ids, embeddings))
    torch.testing.assert_close(one.results["occlusion"].scores, two.results["occlusion"].scores)
    assert two.tokens[0] == [str(place) for place in range(ids.shape[1])]


def test_targets_of_each_example_and_differences() -> None:
    model, ids, mask = batch()
    found = compare(model, ids, mask, methods=["decompx", "occlusion"], target=[2, 0, 1], **STANDARD)
    assert [output.name for output in found.outputs] == ["LABEL_2", "LABEL_0", "LABEL_1"]
    for row, target in enumerate([2, 0, 1]):
        alone = ids[row : row + 1, mask[row].bool()]
        expected = make("decompx", model).attribute(alone, target=target)
        torch.testing.assert_close(
            found.results["decompx"].scores[row, mask[row].bool()], expected[0], rtol=1e-8, atol=1e-12
        )
        assert found.results["occlusion"].faithfulness.morf[row, 0] == pytest.approx(
            float(model(alone).logits[0].softmax(0)[target].detach()), abs=1e-12
        )

    pairs = Difference([2, 0, 1], 0)
    pair = compare(model, ids, mask, methods=["decompx", "saliency"], target=pairs, batch_size=2, **STANDARD)
    assert pair.explained == "logit"
    assert [output.name for output in pair.outputs] == ["LABEL_2 − LABEL_0", "LABEL_0 − LABEL_0", "LABEL_1 − LABEL_0"]
    for row, first in enumerate([2, 0, 1]):
        logits = model(ids[row : row + 1, mask[row].bool()]).logits[0].detach()
        whole = pair.results["decompx"].faithfulness.morf[row, 0]
        assert float(whole) == pytest.approx(float(logits[first] - logits[0]), abs=1e-12)
    assert pair.means()["decompx"]["log_odds"] != pair.means()["decompx"]["log_odds"]


def test_of_a_multi_label_classifier_the_logit_is_watched() -> None:
    model, ids, mask = batch()
    model.config.problem_type = "multi_label_classification"
    found = compare(model, ids, mask, methods=["norm"], **STANDARD)
    assert found.explained == found.facts()["observed"] == "logit"
    assert "|output:logit|" in found.signature
    logits = torch.stack([model(ids[row : row + 1, real]).logits[0].max() for row, real in enumerate(mask.bool())])
    torch.testing.assert_close(found.results["norm"].faithfulness.morf[:, 0], logits.detach())
    with pytest.raises(InvalidInputError, match="multi-label classifier, whose probability is the sigmoid of one"):
        compare(model, ids, mask, methods=["norm"], output="probability", **STANDARD)


def test_next_token_of_a_causal_model_at_a_position() -> None:
    model, (ids, mask) = language_model(), sentences([6, 8])
    for position in (None, [4, -1]):
        found = compare(
            model, ids, mask, methods=["norm", "decompx", "occlusion", "globenc"], position=position, **STANDARD
        )
        assert "post-norm" in found.refused["globenc"]
        for row, real in enumerate(mask.bool()):
            place = -1 if position is None else position[row] - int(real.nonzero()[0]) * (position[row] >= 0)
            alone = ids[row : row + 1, real]
            target = int(model(alone).logits[0, place].argmax())
            assert found.outputs[row].name == str(target)
            expected = captum_norm.NormAttribution(model).attribute(alone, position=place)
            torch.testing.assert_close(found.results["norm"].scores[row, real], expected[0], rtol=1e-8, atol=1e-12)


def pooled(model: Any, ids: Tensor) -> Tensor:
    states: Tensor = model(ids[None]).last_hidden_state[0].mean(0).detach()
    return states


def test_without_a_head_the_projection_on_its_own_direction_is_explained() -> None:
    model = randomized(hf.BertModel(hf.BertConfig(**families.TEXT)), 0)
    ids, mask = sentences(LENGTHS)
    found = compare(model, ids, mask, methods=[*QUICK, "globenc"], batch_size=2, **STANDARD)
    assert found.explained == PROJECTION
    assert found.facts()["observed"] == PROJECTION
    assert {output.name for output in found.outputs} == {PROJECTION}
    assert not found.refused
    for row, real in enumerate(mask.bool()):
        alone = ids[row, real]
        whole = pooled(model, alone)
        direction = whole / whole.norm()
        curves = found.results["occlusion"].faithfulness.morf
        torch.testing.assert_close(curves[row, 0], whole.norm())
        for place in range(1, len(alone) - 1):
            hidden = alone.clone()
            hidden[place] = MASK
            drop = whole.norm() - pooled(model, hidden) @ direction
            actual = found.results["occlusion"].scores[row, real][place]
            torch.testing.assert_close(actual, drop.to(actual), rtol=1e-5, atol=1e-7)

        def project(output: Any, real: Tensor, direction: Tensor = direction) -> Tensor:  # noqa: ARG001
            number: Tensor = output.last_hidden_state.mean(1) @ direction
            return number

        decompx = captum_norm.DecompX(model, readout=project).attribute(alone[None])
        torch.testing.assert_close(found.results["decompx"].scores[row, real], decompx[0], rtol=1e-7, atol=1e-10)
        norms = captum_norm.NormAttribution(model).attribute(alone[None], position="mean")
        torch.testing.assert_close(found.results["norm"].scores[row, real], norms[0], rtol=1e-7, atol=1e-10)
    with pytest.raises(InvalidInputError, match="BertModel has no head, so it has no target"):
        compare(model, ids, mask, target=1, **STANDARD)


def test_a_readout_says_what_is_explained() -> None:
    model, ids, mask = batch()

    def spread(output: Any, real: Tensor) -> Tensor:  # noqa: ARG001
        numbers: Tensor = output.logits.std(1)
        return numbers

    found = compare(model, ids, mask, methods=["norm", "saliency"], readout=spread, **STANDARD)
    assert (found.explained, {output.name for output in found.outputs}) == ("readout", {"the only number"})
    for row, real in enumerate(mask.bool()):
        expected = model(ids[row : row + 1, real]).logits.std()
        torch.testing.assert_close(found.results["norm"].faithfulness.morf[row, 0], expected.detach())


class Constant(Attribution):
    """A user's own method, of some value."""

    def __init__(self, model: Any, value: float, width: int = 0) -> None:
        super().__init__(model)
        self.value, self.width = value, width

    def attribute(self, inputs: Mapping[str, Tensor], target: Any = None) -> Tensor:  # noqa: ARG002
        ids = inputs["input_ids"]
        return torch.full((len(ids), self.width or ids.shape[1]), self.value) * torch.arange(self.width or ids.shape[1])


def test_methods_of_the_user_and_their_names() -> None:
    model, ids, mask = batch()
    methods: dict[str, str | Attribution] = {
        "ALTI": "alti",
        "norms, last block": captum_norm.NormAttribution(model, "attn_res_ln", "mean"),
        "from left": Constant(model, -1.0),
        "nan": Constant(model, float("nan")),
        "wide": Constant(model, 1.0, width=3),
    }
    found = compare(model, ids, mask, methods=methods, **STANDARD)
    assert list(found.results) == ["ALTI", "norms, last block", "from left"]
    signature = "attribution:NormAttribution|scope:attn_res_ln|aggregation:mean"
    assert found.results["norms, last block"].signature == signature
    assert found.results["from left"].scores[0, :3].tolist() == [0, -1, -2]
    assert found.refused["nan"] == "Constant gives NaN or infinity for these inputs"
    assert found.refused["wide"].startswith("Constant gives (1, 3); expected a score for each token, (1, ")


def test_what_is_refused_altogether() -> None:
    model, ids, mask = batch()
    wide = {"wide": Constant(model, 1.0, width=3)}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"methods": "alti"}, "got methods='alti'; expected a list"),
        ({"methods": []}, "got no methods"),
        ({"methods": ["alti", "magic"]}, "got the method 'magic'; expected a method of Captum or one of norm, "),
        ({"methods": wide}, "no method supports the model and these inputs; wide: Constant"),
        ({"seed": -1}, "got the seed -1; expected 0 to 4294967295"),
        ({"seed": 2**32}, "got the seed 4294967296; expected 0 to 4294967295"),
        ({"seed": 1.5}, r"got the seed 1\.5; expected an integer"),
        ({"tokenizer": None}, "keep_special=True without a tokenizer"),
    ]
    for options, message in refusals:
        with pytest.raises(InvalidInputError, match=message):
            compare(model, ids, mask, **{"methods": ["alti"], **STANDARD, **options})
    with pytest.raises(InvalidInputError, match="example 1 has no token that may be removed"):
        compare(model, torch.tensor([[CLS, 7, SEP], [CLS, MASK, SEP]]), methods=["alti"], **STANDARD)
    config = hf.T5Config(vocab_size=40, d_model=16, d_kv=4, num_heads=4, num_layers=1, d_ff=16)
    with pytest.raises(UnsupportedModelError, match="encoder–decoder"):
        compare(hf.T5ForConditionalGeneration(config), ids, **STANDARD)
    spans = randomized(hf.BertForQuestionAnswering(hf.BertConfig(**families.TEXT)), 0)
    for target in (None, 1):
        with pytest.raises(UnsupportedModelError, match="BertForQuestionAnswering returns neither logits nor a last"):
            compare(spans, ids, mask, methods=["norm"], target=target, **STANDARD)


def test_lime_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, mask = batch()
    monkeypatch.setattr("captum_norm.lab.comparison.methods.find_spec", lambda _: None)
    found = compare(model, ids, mask, methods=["lime", "norm"], **STANDARD)
    assert found.refused == {"lime": "lime needs scikit-learn, which is not installed: pip install scikit-learn"}


def test_the_signature_says_every_choice() -> None:
    model, ids, mask = batch()
    found = compare(model, ids, mask, methods=["occlusion", "weights"], removal="mean", keep_special=False, seed=4)
    assert found.signature.startswith(
        "removal:mean|special:removed|output:probability|bins:0.01,0.05,0.1,0.2,0.5|steps:10|batch:32|seed:4|captum-norm:"
    )
    for package in ("captum", "torch", "transformers"):
        assert f"|{package}:" in found.signature
    assert found.results["occlusion"].signature == "attribution:Occlusion|baseline:mean|special:replaced"
    deleted = compare(model, ids, mask, methods=["occlusion"], removal="delete", **STANDARD)
    assert deleted.signature.startswith("removal:delete|special:kept|")
    assert deleted.results["occlusion"].signature == f"attribution:Occlusion|baseline:mask:{MASK}|special:kept"


NAMES = [measure.name for measure in MEASURES]


@pytest.fixture(params=["classifier", "causal"], name="found")
def either(request: pytest.FixtureRequest) -> Comparison:
    return comparison(request.param)


def test_the_frame_has_a_row_for_each_method_and_the_reason_of_the_refused() -> None:
    pytest.importorskip("pandas", reason="the extra tables is not installed")
    found = comparison("causal")
    frame = found.frame()
    assert list(frame.index) == [*COMPARED, "globenc"]
    assert list(frame.columns) == [*NAMES, "seconds", "forward_ratio", "signature", "refused"]
    means = found.means()
    for name, result in found.results.items():
        row: Any = frame.loc[name]
        assert math.isnan(row["log_odds"])
        assert row["aopc"] == means[name]["aopc"] == float(result.faithfulness.aopc.mean())
        assert (row["seconds"], row["forward_ratio"]) == (result.seconds, result.forward_ratio)
        assert row["signature"] == result.signature
    assert frame["refused"].isna().tolist() == [True] * len(COMPARED) + [False]
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
    assert list(agreement.index) == list(agreement.columns) == COMPARED
    assert agreement.to_numpy().tolist() == found.agreement.tolist()
    curves = found.frame("curves")
    assert len(curves) == 11 * len(COMPARED)
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
    assert set(found.ranking) == set(COMPARED)
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
