"""Whatever the user gives is right, or an error in one sentence, for every method and each of its arguments."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from captum.attr import FeatureAblation, IntegratedGradients

import captum_norm
import captum_norm as cn
from captum_norm.checks import quoted_name
from captum_norm.forward.session import MeterOptions
from captum_norm.lab.evaluation import Faithfulness, Perturbation, agreement
from captum_norm.methods import METHODS
from tests import tiny
from tests.classifiers import classifier, randomized
from tests.models.test_outputs import build
from tests.torch_models import Classifier

IDS = torch.tensor([[1, 7, 9], [1, 8, 2]])
EMBEDDED = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
CLASSES = [named.class_name for named in METHODS.values() if named.package == "captum_norm"]


def test_names_in_messages_are_whole_enough_to_be_found() -> None:
    path = f"/home/somebody/{'/'.join(f'folder {number}' for number in range(10))}/words.txt"
    assert 80 < len(path) < 240
    assert quoted_name(path) == path
    long = quoted_name(f"/home/{'deep/' * 100}words.txt")
    assert len(long) < 260
    assert (long[:15], long[-15:]) == ("/home/deep/deep", "/deep/words.txt")
    assert [quoted_name(name) for name in ("", "a\nb")] == ["''", r"'a\nb'"]


def absurd() -> Iterator[Any]:
    """Values that mean nothing, or hardly anything, wherever they stand."""
    yield from (math.nan, math.inf, -1, 2**31, 2**63, 2**70, -(2**70), True, "x", "", b"x", 1.5, 1j)
    yield from ([], [0], ["a"], [None], [math.nan], [2**70], [[0]], [-1, 5], {}, {"a": 1}, set(), {"encoder"}, (0,))
    yield from (object(), object, lambda: 0, (name for name in ["encoder"]), range(2))
    yield from (np.int64(1), np.array([1, 2]), np.array(math.nan), np.array(["a"]), np.float32(1))
    yield from (torch.tensor(1), torch.tensor([1.5]), torch.tensor([2**40]), torch.tensor([[1, 2]]), torch.empty(0))
    yield from (torch.tensor([1j]), torch.empty(2, device="meta"), torch.tensor([1, 1], dtype=torch.uint16))
    yield from (cn.Difference(0, 1), cn.Difference([0], 2**70), cn.Difference("a", None))  # type: ignore[arg-type]


def odd_inputs() -> Iterator[Any]:
    """Token ids and embeddings of other dtypes and shapes than usual."""
    dtypes = (torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float16)
    yield from (IDS.to(dtype) for dtype in (*dtypes, torch.float32, torch.complex64))
    yield from (torch.empty(0, 5).long(), torch.empty(2, 0).long(), IDS[0], IDS[None], torch.tensor(3))
    yield from (IDS - 5, IDS + 99, torch.randn(2, 3, 8, 8), torch.ones(1, 1, 1, 1, 1))
    yield from (IDS.T, IDS[:1].expand(2, 3), IDS[:, ::2], IDS[:, :1])
    yield from (EMBEDDED.double(), EMBEDDED.half(), EMBEDDED.to(torch.complex64), EMBEDDED.to(torch.float8_e4m3fn))
    yield from (EMBEDDED.transpose(0, 1).contiguous().transpose(0, 1), EMBEDDED[:1].expand(2, 3, 32), EMBEDDED[..., :3])
    yield from (EMBEDDED * math.nan, EMBEDDED[:0], EMBEDDED[:, :, :0])
    yield from ((), (IDS, None), {}, {"input_ids": None}, [1, 2], None, "text", np.array([[1, 2]]))


def answered(work: Callable[[], Any]) -> bool:
    """Whether there is an answer; if not, the refusal must be one of ours, in one sentence."""
    try:
        work()
    except cn.CaptumNormError as error:
        message = str(error)
    else:
        return True
    assert message
    assert "\n" not in message
    return False


@pytest.fixture(name="model", scope="module")
def shared_model() -> Any:
    return classifier(dtype=torch.float32)


QUIET = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:.*parse")


KINDS = ("NormAttribution", "AttentionTimesGradient", "DecompX", "ALTILogit")
"""Classes that read their arguments in ways of their own; the others take theirs."""


@pytest.mark.few
@QUIET
@pytest.mark.parametrize(
    "class_name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.long) for name in CLASSES]
)
def test_arguments_of_methods(class_name: str, model: Any) -> None:
    method = getattr(captum_norm, class_name)(model)
    answers = [
        answered(partial(method.attribute, IDS, **{name: value}))
        for name in ("target", "position", "layer", "return_convergence_delta")
        for value in absurd()
    ]
    assert answers.count(True) > 10
    assert answers.count(False) > 50
    for value in absurd():
        assert not answered(partial(method.scores, value))
        for name in ("layers", "per_head", "stacks", "additional_forward_args"):
            answered(partial(method.maps, IDS, **{name: value}))
        answered(partial(method.maps, {"input_ids": IDS, "attention_mask": value}))
    assert {answered(partial(method.attribute, inputs)) for inputs in odd_inputs()} == {True, False}


@pytest.mark.parametrize("class_name", [*CLASSES, "NormMeter", "TokenAttribution"])
def test_arguments_of_constructors(class_name: str, model: Any) -> None:
    kind = getattr(captum_norm, class_name)
    further = (IntegratedGradients,) if class_name == "TokenAttribution" else ()
    names = ["scope", "aggregation", "bias", "propagate", "baseline", "keep_special", "reduction", "batch_size"]
    names += ["accumulate", "memory_budget", "differentiable"]
    taken = set(signature(kind).parameters)
    if "options" in taken and class_name != "TokenAttribution":  # whose options go to Captum's method
        taken |= MeterOptions.__annotations__.keys()
    for value in absurd():
        assert not answered(partial(kind, value, *further))
        for name in names:
            unknown = f"(got an unexpected keyword|has no further) argument '{name}'"
            if name in taken:
                answered(partial(kind, model, *further, **{name: value}))
                continue
            with pytest.raises((TypeError, cn.InvalidInputError), match=unknown):
                kind(model, *further, **{name: value})


def test_further_arguments(model: Any) -> None:
    meter, parts, tokens = cn.NormMeter(model), cn.DecompX(model), cn.TokenAttribution(model, FeatureAblation)
    translator = randomized(hf.MarianMTModel(tiny.marian_config(50)), 0, torch.float32)
    pair = {"input_ids": IDS, "decoder_input_ids": IDS}
    stacks = cn.NormAttribution(translator)
    for value in absurd():
        for name in ("scopes", "weights", "per_head", "head_norms", "maps", "layers", "stacks"):
            answered(partial(meter.measure, IDS, **{"scopes": ["attn"], name: value}))
        answered(partial(parts.maps, IDS, layers=value))
        for name in ("target", "position"):
            for explain in (parts.decompose, tokens.attribute):
                answered(partial(explain, IDS, **{name: value}))
        answered(partial(stacks.maps, pair, stacks=value))
        answered(partial(stacks.maps, pair | {"decoder_attention_mask": value}))
        answered(partial(stacks.maps, pair | {"decoder_input_ids": value}))


@QUIET
def test_arguments_of_measures(model: Any) -> None:
    perturbation = Perturbation(model, "zero", keep_special=False)
    scores = {name: torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) for name in "ab"}
    faithfulness, removable = Faithfulness(perturbation, bins=[0.5], steps=2), perturbation.bind(IDS).removable
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (Perturbation, {"model": model, "removal": "zero", "keep_special": False, "output": "logit", "batch_size": 4}),
        (perturbation.bind, {"inputs": IDS, "target": 1, "position": None}),
        (Faithfulness, {"perturbation": perturbation, "bins": [0.5], "steps": 2}),
        (faithfulness.evaluate, {"inputs": IDS, "scores": scores, "target": 1}),
        (agreement, {"scores": scores, "compared": removable, "coefficient": "kendall"}),
    ]
    for function, given in calls:
        assert answered(partial(function, **given))
        for name in given:
            answers = [answered(partial(function, **given | {name: value})) for value in absurd()]
            assert not all(answers), name


def test_any_sequence_of_names_is_one(model: Any) -> None:
    """A generator's names are not lost by looking at them."""
    (measured,) = cn.NormMeter(model).measure(IDS, scopes=(s for s in ["attn", "atb"])).values()  # type: ignore[arg-type]
    assert list(measured.norms) == ["attn", "atb"]
    expected = cn.NormAttribution(model).maps(IDS, layers=[1, 0]).encoder
    for layers in (torch.tensor([1, 0]), np.array([1, 0]), (1, 0), (layer for layer in [1, 0])):
        found = cn.NormAttribution(model).maps(IDS, layers=layers).encoder  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bias", ["apart", "absdot"])
def test_embeddings_may_lie_in_memory_as_they_like(bias: Any) -> None:
    """A model takes views of what its norms give, as GPT-2's linear maps do."""
    embeddings = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    strided = embeddings.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    method = cn.DecompX(build("gpt2", "GPT2LMHeadModel").double(), bias)
    for target in (None, 1):
        expected = method.attribute(embeddings.double(), target)
        torch.testing.assert_close(method.attribute(strided.double(), target), expected)


def test_two_outputs_of_a_difference_are_no_two_positions(model: Any) -> None:
    """Beside the two targets an example of one token in a row of two lost one."""
    method = cn.TokenAttribution(model, FeatureAblation)
    alone = method.attribute(torch.tensor([[7]]), cn.Difference(0, 1))
    padded = {"input_ids": torch.tensor([[7, 0]]), "attention_mask": torch.tensor([[1, 0]])}
    torch.testing.assert_close(method.attribute(padded, cn.Difference(0, 1))[:, :1], alone)


def test_what_torch_refuses_inside_of_a_models_code_is_the_models_refusal() -> None:
    """Also where functions of torch are watched: in code that computes its attention itself, and by DecompX."""
    model = randomized(Classifier(batch_first=True), 0, torch.float32)
    narrow = EMBEDDED[..., :3]
    for method in (cn.NormAttribution(build("bloom", "BloomForSequenceClassification")), cn.DecompX(classifier())):
        with pytest.raises(cn.InvalidInputError, match="does not accept these inputs"):
            method.attribute(narrow)
    with pytest.raises(cn.InvalidInputError, match="does not accept these inputs"):
        cn.NormAttribution(model).attribute(EMBEDDED)
