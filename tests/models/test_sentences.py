"""A SentenceTransformer is explained as its Transformer is at the pooled positions; its similarities are targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import Saliency
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from torch import Tensor
from torch.nn import functional as F

import captum_norm as cn
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from tests.sentences import sentence_transformer

TEXTS = ["the dog sees a cat", "a cat runs ."]
OTHERS = ["a dog runs", "the cat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(3)
    modules = Pooling(8, "mean"), Dense(8, 6), Normalize()
    return sentence_transformer(tmp_path_factory.mktemp("model"), *modules)


def tokens(model: Any, texts: list[str] = TEXTS) -> Any:
    return model.tokenizer(texts, padding=True, return_tensors="pt")


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
def test_the_default_position_is_the_pooling(tmp_path: Path, pooling: str) -> None:
    model = sentence_transformer(tmp_path, Pooling(8, pooling))
    found = cn.NormAttribution(model).attribute(TEXTS)
    method, inputs = cn.NormAttribution(model[0].auto_model), tokens(model)
    for example, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        places = range(length)
        alone = {name: value[example : example + 1, :length] for name, value in inputs.items()}
        rows = torch.cat([method.attribute(alone, position=place) for place in places])
        # What the pooling makes of each position: its features are the positions themselves.
        features = {"token_embeddings": torch.eye(length).double()[None], "attention_mask": torch.ones(1, length)}
        weights = model[1](features)["sentence_embedding"][0]
        expected = weights / weights.sum() @ rows
        torch.testing.assert_close(found[example, :length], expected, rtol=1e-12, atol=1e-12)
        assert not found[example, length:].any()


@pytest.mark.parametrize("pooling", ["max", ("cls", "mean")])
def test_a_pooling_of_no_one_position_needs_one(tmp_path: Path, pooling: Any) -> None:
    model = sentence_transformer(tmp_path, Pooling(8, pooling))
    with pytest.raises(InvalidInputError, match="got no position, and the head of SentenceEncoder reads neither"):
        cn.NormAttribution(model).attribute(TEXTS)
    expected = cn.NormAttribution(model[0].auto_model).attribute(tokens(model), position=1)
    assert torch.equal(cn.NormAttribution(model).attribute(TEXTS, position=1), expected)


@pytest.mark.parametrize(
    ("modules", "options"),
    [
        ([Pooling(8, "mean"), Dense(8, 6), Normalize()], {}),
        ([Pooling(8, "max")], {"truncate_dim": 5}),
        ([Pooling(8, "cls"), Normalize()], {"similarity_fn_name": "dot"}),
        ([Pooling(8, ("cls", "mean"))], {"prompts": {"query": "the cat"}, "default_prompt_name": "query"}),
        ([Pooling(8, "mean", include_prompt=False)], {"prompts": {"query": "a"}, "default_prompt_name": "query"}),
    ],
)
def test_similarities_are_those_of_the_model_and_decomposed_exactly(
    tmp_path: Path, modules: list[Any], options: dict[str, Any]
) -> None:
    model = sentence_transformer(tmp_path, *modules, **options)
    embedded = model.encode(TEXTS, convert_to_tensor=True), model.encode(OTHERS, convert_to_tensor=True)
    expected = model.similarity(*embedded)
    near = cn.SentenceSimilarity(model, *OTHERS)
    for target in (0, 1):
        parts = cn.DecompX(near).decompose(TEXTS, target=target)
        torch.testing.assert_close(parts.number, expected[:, target], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.scores.sum(1) + parts.bias, expected[:, target], rtol=1e-10, atol=1e-10)
    if modules[0].pooling_mode == "max":  # each part has a maximum of its own
        return
    parts = cn.DecompX(near, propagate=True).decompose(TEXTS, target=cn.Difference(0, 1))
    torch.testing.assert_close(parts.number, expected[:, 0] - expected[:, 1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.scores.sum(1) + parts.bias, parts.number, rtol=1e-10, atol=1e-10)


def similarity(model: Any, pooled: Tensor, other: str) -> Tensor:
    """The cosine of an embedding before normalisation to that of another text."""
    return F.cosine_similarity(model[2].linear(pooled).tanh(), model.encode([other], convert_to_tensor=True).clone())


def test_a_similarity_is_explained_as_by_a_readout_of_the_transformer(model: Any) -> None:
    inner, inputs = model[0].auto_model, tokens(model)
    real = inputs["attention_mask"].double()

    def pooled(states: Tensor, real: Tensor) -> Tensor:
        return (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    near = cn.SentenceSimilarity(model, *OTHERS)
    embedding = inner.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    output = inner(**{**inputs, "input_ids": None, "inputs_embeds": embedding})
    total = similarity(model, pooled(output.last_hidden_state, real), OTHERS[1])
    (gradient,) = torch.autograd.grad(total.sum(), embedding)
    found = cn.TokenAttribution(near, Saliency, reduction="l2").attribute(TEXTS, target=1)
    torch.testing.assert_close(found, gradient.norm(dim=-1) * real, rtol=1e-10, atol=1e-12)

    # With the length of the embedding and the slopes of its activation frozen.
    with torch.no_grad():
        dense = model[2].linear(pooled(inner(**inputs).last_hidden_state, real))
        slopes, size = dense.tanh() / dense, dense.tanh().norm(dim=1)
        other = model.encode([OTHERS[1]], convert_to_tensor=True)[0].clone()

    def readout(output: Any, real: Tensor) -> Tensor:
        # Its bias is a part of its own.
        embedded = pooled(output.last_hidden_state, real.double()) @ model[2].linear.weight.T
        found: Tensor = (embedded * slopes @ other) / size
        return found

    expected = cn.DecompX(inner, readout=readout).decompose(inputs)
    parts = cn.DecompX(near).decompose(TEXTS, target=1)
    torch.testing.assert_close(parts.scores, expected.scores, rtol=1e-10, atol=1e-12)
    maps = cn.AttentionTimesGradient(near).maps(TEXTS, target=1)
    by_hand = cn.AttentionTimesGradient(
        inner,
        readout=lambda output, real: similarity(model, pooled(output.last_hidden_state, real.double()), OTHERS[1]),
    ).maps(inputs)
    torch.testing.assert_close(maps.self_attention, by_hand.self_attention, rtol=1e-9, atol=1e-12)


def test_methods_are_compared_on_a_similarity(model: Any) -> None:
    comparison = cn.compare(
        cn.SentenceSimilarity(model, *OTHERS), TEXTS, target=cn.Difference(0, 1), methods=["norm", "decompx"]
    )
    assert [output.name for output in comparison.outputs] == ["a dog runs − the cat"] * 2
    assert comparison.explained == "logit"
    assert comparison.tokens[1] == ["[CLS]", "a", "cat", "runs", ".", "[SEP]", "[PAD]"]
    assert not comparison.refused
    assert cn.NormAttribution(model).maps(TEXTS).tokens == comparison.tokens


def test_the_model_is_left_as_it_was(model: Any) -> None:
    model.train()
    names = {name: type(module) for name, module in model.named_modules()}
    before = model.encode(TEXTS)
    near = cn.SentenceSimilarity(model, *OTHERS)
    model.train()
    cn.DecompX(near).attribute(TEXTS, target=0)
    with pytest.raises(InvalidInputError):
        cn.DecompX(near).attribute(TEXTS, target=2)
    assert all(module.training for module in model.modules())
    assert {name: type(module) for name, module in model.named_modules()} == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert (model.encode(TEXTS) == before).all()


def test_what_has_no_similarity_is_refused(model: Any, tmp_path: Path) -> None:
    for attribute in (cn.DecompX(model).decompose, cn.AttentionTimesGradient(model).attribute):
        with pytest.raises(UnsupportedModelError, match=r"no logits; compare it with texts: SentenceSimilarity\(model"):
            attribute(TEXTS, target=0)
    with pytest.raises(InvalidInputError, match="got a model of type BertModel; expected a SentenceTransformer"):
        cn.SentenceSimilarity(model[0].auto_model, "a")
    for texts in ((), ("a", ""), (["a"],)):
        with pytest.raises(InvalidInputError, match="expected texts to compare with"):
            cn.SentenceSimilarity(model, *texts)
    far = sentence_transformer(tmp_path, Pooling(8, "mean"), similarity_fn_name="euclidean")
    with pytest.raises(UnsupportedModelError, match="whose similarity is euclidean; expected cosine or dot"):
        cn.SentenceSimilarity(far, "a")
    far = type(model)(modules=list(model)[1:])
    with pytest.raises(UnsupportedModelError, match="a SentenceTransformer that begins with Pooling; expected a Trans"):
        cn.NormAttribution(far)
