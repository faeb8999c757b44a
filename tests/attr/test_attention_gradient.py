"""Gradient-weighted attention against the model's own eager attention, and against differences of the output."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.bert import modeling_bert

from captum_norm import AttentionTimesGradient, Difference, InvalidInputError, UnsupportedModelError
from tests import encoder_decoders, families
from tests.families import TEXT


def classifier(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT | {"num_labels": 3}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.double().train(False)


def products(model: Any, ids: Tensor, chosen: Any) -> Tensor:
    """α ⊙ ∂t/∂α of the model's own eager attention, (B, L, H, Q, K)."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True)
    model.set_attn_implementation(implementation)
    gradients = torch.autograd.grad(chosen(output.logits).sum(), output.attentions)
    return torch.stack([weights * g for weights, g in zip(output.attentions, gradients, strict=True)], 1).detach()


def rolled(maps: Tensor) -> Tensor:
    """(L, Q, K) -> (Q, K)."""
    total = torch.eye(maps.shape[-1], dtype=maps.dtype)
    for layer in maps:
        total = total + layer @ total
    return total


TARGETS: list[tuple[Any, Any]] = [
    (1, lambda logits: logits[:, 1]),
    (torch.tensor([2, 0, 1]), lambda logits: logits[[0, 1, 2], [2, 0, 1]]),
    ([2, 0, 1], lambda logits: logits[[0, 1, 2], [2, 0, 1]]),
    (Difference(0, 2), lambda logits: logits[:, 0] - logits[:, 2]),
    (Difference([0, 1, 2], 1), lambda logits: logits[[0, 1, 2], [0, 1, 2]] - logits[:, 1]),
    (None, lambda logits: logits.amax(1)),
]


@pytest.mark.parametrize("case", range(len(TARGETS)))
def test_a_classifier_equals_its_own_eager_attention(case: int) -> None:
    target, chosen = TARGETS[case]
    model, ids = classifier(case), families.inputs("bert", case)
    expected = products(model, ids, chosen).clamp(min=0)
    method = AttentionTimesGradient(model)
    with torch.no_grad():
        torch.testing.assert_close(method.maps(ids, target=target, per_head=True).encoder, expected)
        torch.testing.assert_close(method.maps(ids, target=target).encoder, expected.mean(2))
        scores = method.attribute(ids, target)
    whole = torch.stack([rolled(maps) for maps in expected.mean(2)])
    torch.testing.assert_close(scores, whole[:, 0])
    torch.testing.assert_close(method.attribute(ids, target, layer=1), expected.mean(2)[:, 1, 0])
    torch.testing.assert_close(
        AttentionTimesGradient(model, "mean").attribute(ids, target), expected.mean((1, 2))[:, 0]
    )


def test_a_readout_says_what_is_explained() -> None:
    model, ids = classifier(), families.inputs("bert")
    method = AttentionTimesGradient(model, readout=lambda output, _: output.logits[:, 1] - output.logits[:, 0])
    torch.testing.assert_close(method.attribute(ids), AttentionTimesGradient(model).attribute(ids, Difference(1, 0)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_next_words_logit_is_that_of_the_position_explained(name: str) -> None:
    model, ids = families.build(name, dtype=torch.float64), families.inputs(name)
    method = AttentionTimesGradient(model)
    for position, row in ((None, -1), (4, 4)):
        expected = products(model, ids, lambda logits, row=row: logits[:, row, 7]).clamp(min=0).mean(2)
        maps = method.maps(ids, target=7, position=position).decoder
        torch.testing.assert_close(maps, expected, rtol=1e-6, atol=1e-9)
        whole = torch.stack([rolled(m) for m in expected])[:, row]
        torch.testing.assert_close(method.attribute(ids, 7, position=position), whole, rtol=1e-6, atol=1e-9)


def test_gradients_are_what_a_changed_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = classifier(), families.inputs("bert", batch=1)
    model.set_attn_implementation("eager")
    own, step, calls = modeling_bert.eager_attention_forward, 1e-6, [0]
    maps = AttentionTimesGradient(model).maps(ids, target=2, per_head=True).encoder
    assert maps is not None

    def changed(layer: int, place: tuple[int, ...], change: float) -> float:
        calls[0] = 0

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            output, weights = own(module, query, key, value, *args, **kwargs)
            if calls[0] == layer:
                _, head, row, column = place
                output = output.clone()
                output[0, row, head] += change * value[0, head, column]
            calls[0] += 1
            return output, weights

        monkeypatch.setattr(modeling_bert, "eager_attention_forward", attend)
        with torch.no_grad():
            number = float(model(ids).logits[0, 2])
        monkeypatch.setattr(modeling_bert, "eager_attention_forward", own)
        return number

    weights = [layer.detach() for layer in model(ids, output_attentions=True).attentions]
    for layer, place in ((0, (0, 1, 2, 3)), (0, (0, 3, 5, 5)), (1, (0, 2, 0, 6)), (1, (0, 0, 0, 0))):
        slope = (changed(layer, place, step) - changed(layer, place, -step)) / (2 * step)
        expected = max(0.0, slope * float(weights[layer][place]))
        assert float(maps[0, layer, place[1], place[2], place[3]]) == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_padding_and_batching_change_nothing(name: str, side: str) -> None:
    model = classifier().float() if name == "bert" else families.build(name)
    examples = [families.inputs(name, seed, 1, length) for seed, length in enumerate((9, 5))]
    batch, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, example in enumerate(examples):
        filled = slice(0, example.shape[1]) if side == "right" else slice(9 - example.shape[1], 9)
        batch[row, filled], mask[row, filled] = example[0], 1
    method = AttentionTimesGradient(model)
    scores = method.attribute(batch, 2, mask)
    for row, example in enumerate(examples):
        places = mask[row].bool()
        torch.testing.assert_close(scores[row, places], method.attribute(example, 2)[0], rtol=1e-4, atol=1e-5)
        assert not scores[row, ~places].any()


def test_frozen_parameters_inference_mode_and_embeddings_change_nothing() -> None:
    model, ids = classifier(), families.inputs("bert")
    method = AttentionTimesGradient(model)
    expected = method.attribute(ids, 1)
    with torch.inference_mode():
        torch.testing.assert_close(method.attribute(ids.clone(), 1), expected)
        torch.testing.assert_close(method.attribute(model.bert.embeddings.word_embeddings(ids), 1), expected)
    model.requires_grad_(requires_grad=False)
    torch.testing.assert_close(method.attribute(ids, 1), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_gradients_flow_when_asked_for() -> None:
    model, ids = classifier(), families.inputs("bert")
    maps = AttentionTimesGradient(model, differentiable=True).maps(ids, target=1).self_attention
    (gradient,) = torch.autograd.grad(maps.sum(), model.classifier.weight)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (3, "got the target 3; expected 0 to 2"),
        (True, "got target=True for 3 examples"),
        ((0, 1), r"got target=\(0, 1\) for 3 examples"),
        ([0, 1], r"got target=\[0, 1\] for 3 examples"),
        ("positive", "got target='positive' for 3 examples"),
        (Difference(0, 3), "got the target 3; expected 0 to 2"),
    ],
)
def test_wrong_targets_are_refused(target: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        AttentionTimesGradient(classifier()).attribute(families.inputs("bert"), target)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="pass the encoder alone"):
        AttentionTimesGradient(encoder_decoders.build("bart")).maps(encoder_decoders.inputs("bart"), target=1)
