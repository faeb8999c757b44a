"""Pipelines, and texts as inputs, are explained as the model and the tokenizer's output are."""

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from captum.attr import IntegratedGradients
from sentence_transformers import CrossEncoder

from captum_norm import AttentionWeights, DecompX, NormAttribution, NormMeter, TokenAttribution, ValueZeroing, compare
from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis import contextualization_change
from captum_norm.lab.evaluation import Perturbation
from tests.lab.analysis.small import randomized
from tests.tiny import bert_config, save_tiny, tokenizer

TEXTS = ["the dog sees a cat", "a cat runs ."]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    torch.manual_seed(0)
    model = randomized(transformers.BertForSequenceClassification(bert_config()), torch.float64)
    return transformers.pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")


def make(kind: str, model: Any, **options: Any) -> Any:
    if kind == "gradients":
        return TokenAttribution(model, IntegratedGradients, n_steps=3, **options)
    return {"norm": NormAttribution, "decompx": DecompX, "zeroing": ValueZeroing, "weights": AttentionWeights}[kind](
        model, **options
    )


@pytest.mark.parametrize("kind", ["norm", "decompx", "zeroing", "weights", "gradients"])
def test_texts_are_explained_as_what_the_tokenizer_returns(pipeline: Any, kind: str) -> None:
    model, given = pipeline.model, tokenizer()
    target = {"target": 1} if kind in ("decompx", "gradients") else {}
    for texts in (TEXTS, TEXTS[1]):
        inputs = given(texts, padding=isinstance(texts, list), return_tensors="pt")
        known = {"tokenizer": given} if kind == "gradients" else {}
        expected = make(kind, model, **known).attribute(inputs, **target)
        for method in (make(kind, pipeline), make(kind, model, tokenizer=given)):
            assert torch.equal(method.attribute(texts, **target), expected)


def test_pairs_of_texts_are_explained_for_a_cross_encoder_too(pipeline: Any, tmp_path: Path) -> None:
    pairs = [("the dog", "a cat runs"), ("a dog", "the cat")]
    model = deepcopy(pipeline.model).float()
    encoder = CrossEncoder(str(save_tiny(model, tmp_path)), device="cpu")
    expected = NormAttribution(model).attribute(tokenizer()(pairs, padding=True, return_tensors="pt"))
    assert torch.equal(NormAttribution(encoder).attribute(pairs), expected)
    assert torch.equal(NormAttribution(model, tokenizer=tokenizer()).attribute(pairs), expected)


def test_maps_of_texts_name_their_tokens(pipeline: Any) -> None:
    maps = NormAttribution(pipeline).maps(TEXTS)
    assert maps.tokens == [
        ["[CLS]", "the", "dog", "sees", "a", "cat", "[SEP]"],
        ["[CLS]", "a", "cat", "runs", ".", "[SEP]", "[PAD]"],
    ]


def test_whatever_takes_a_model_takes_a_pipeline_and_texts(pipeline: Any) -> None:
    model, given = pipeline.model, tokenizer()
    inputs = given(TEXTS, padding=True, return_tensors="pt")
    options: dict[str, Any] = {"methods": ["norm", "saliency"], "target": 1}
    found, expected = compare(pipeline, TEXTS, **options), compare(model, inputs, tokenizer=given, **options)
    for name in expected.results:
        assert torch.equal(found.results[name].scores, expected.results[name].scores)
        assert torch.equal(
            found.results[name].faithfulness.comprehensiveness, expected.results[name].faithfulness.comprehensiveness
        )
    assert found.tokens == expected.tokens
    changes = contextualization_change(pipeline, TEXTS).per_example, contextualization_change(model, inputs).per_example
    torch.testing.assert_close(*changes, rtol=0, atol=0, equal_nan=True)
    measured = NormMeter(pipeline).measure(TEXTS, scopes=["attn"])["encoder"].norms["attn"]
    assert torch.equal(measured, NormMeter(model).measure(inputs, scopes=["attn"])["encoder"].norms["attn"])
    bound = Perturbation(pipeline, "zero").bind(TEXTS), Perturbation(model, "zero", tokenizer=given).bind(inputs)
    assert torch.equal(bound[0].removable, bound[1].removable)


@pytest.mark.parametrize(("attribute", "value"), [("padding_side", "left"), ("pad_token", None)])
def test_texts_padded_on_the_left_or_without_a_padding_token_are_explained_as_alone(attribute: str, value: Any) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=14, n_embd=8, n_layer=2, n_head=2, n_positions=12)
    given = tokenizer()
    setattr(given, attribute, value)
    method = NormAttribution(randomized(transformers.GPT2Model(config), torch.float64), tokenizer=given)
    both = method.attribute(TEXTS)
    real = slice(1, None) if value == "left" else slice(-1)
    torch.testing.assert_close(both[1, real], method.attribute(TEXTS[1])[0], rtol=1e-12, atol=1e-12)
    assert not both[1, 0 if value == "left" else -1]


def test_what_cannot_be_tokenized_is_one_sentence(pipeline: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"got the text 'the dog sees a cat' and no tokenizer; create the meth"):
        NormAttribution(pipeline.model).attribute(TEXTS)
    with pytest.raises(InvalidInputError, match=r"got a sequence of 14 positions; BertForSeq.* allows at most 12"):
        NormAttribution(pipeline).attribute("the dog " * 6)
    for inputs in cast(list[Any], ([], [3], ["a", 3])):
        with pytest.raises(InvalidInputError, match=r"expected a tensor, such as torch\.tensor\(ids\), a tuple"):
            NormAttribution(pipeline).attribute(inputs)
    for kind in ("norm", "gradients"):
        with pytest.raises(InvalidInputError, match=r"type dict; expected a torch.nn.Module, a pipeline of transf"):
            make(kind, {})
