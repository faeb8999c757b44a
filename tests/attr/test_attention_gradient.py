"""Gradient-weighted attention against the model's own eager attention, and against differences of the output."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.bert import modeling_bert

from captum_norm import AttentionTimesGradient, Difference, InvalidInputError, UnsupportedModelError
from tests import encoder_decoders, families, oracle
from tests.classifiers import classifier, randomized


def products(model: Any, ids: Tensor, chosen: Any) -> Tensor:
    """α ⊙ ∂t/∂α of the model's own eager attention, (B, L, H, Q, K)."""
    with oracle.eager(model), torch.enable_grad():
        output = model(ids, output_attentions=True)
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
        # The expected maps are those of the file's own eager attention, whose softmax is in float32.
        torch.testing.assert_close(maps, expected, rtol=1e-6, atol=1e-8)
        whole = torch.stack([rolled(m) for m in expected])[:, row]
        torch.testing.assert_close(method.attribute(ids, 7, position=position), whole, rtol=1e-6, atol=1e-8)


def test_gradients_are_what_a_changed_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = classifier(), families.inputs("bert", batch=1)
    model.set_attn_implementation("eager")
    own, step, calls = modeling_bert.eager_attention_forward, 1e-6, [0]
    maps: Any = AttentionTimesGradient(model).maps(ids, target=2, per_head=True).encoder

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


def weighted_by_gradients(model: Any, inputs: dict[str, Tensor], chosen: Any) -> list[Tensor]:
    """Ā of the encoder, the decoder and cross-attention by the model's own eager attention, (L, B, Q, K) each."""
    with oracle.eager(model), torch.enable_grad():
        output = model(**inputs, output_attentions=True, use_cache=False)
    stacks = [output.encoder_attentions, output.decoder_attentions, output.cross_attentions]
    weights = [layer for stack in stacks for layer in stack]
    gradients = iter(torch.autograd.grad(chosen(output.logits).sum(), weights))
    return [torch.stack([(layer * next(gradients)).clamp(min=0).mean(1).detach() for layer in s]) for s in stacks]


def rules(encoder: Tensor, decoder: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """One example, Ā (L, Q, K) of each stack: what the paper's equations 6 to 11 make of it, (T, S) and (T, T)."""

    def normalized(relevance: Tensor) -> Tensor:
        result = torch.eye(len(relevance), dtype=relevance.dtype)  # eq. 8, 9
        for row in range(len(relevance)):
            own = relevance[row].clone()
            own[row] -= 1
            if own.sum() > 0:
                result[row] += own / own.sum()
        return result

    targets, sources = cross.shape[1:]
    r_ss, r_tt = (torch.eye(count, dtype=cross.dtype) for count in (sources, targets))
    r_ts, r_st = torch.zeros(targets, sources).to(cross), torch.zeros(sources, targets).to(cross)
    for layer in encoder:
        r_ss, r_st = r_ss + layer @ r_ss, r_st + layer @ r_st  # eq. 6, 7
    for own, across in zip(decoder, cross, strict=True):
        r_tt, r_ts = r_tt + own @ r_tt, r_ts + own @ r_ts  # eq. 6, 7
        r_ts, r_tt = r_ts + normalized(r_tt).T @ across @ normalized(r_ss), r_tt + across @ r_st  # eq. 10, 11
    assert not r_st.any()  # the encoder reads nothing of the decoder's
    return r_ts, r_tt


@pytest.mark.parametrize(("seed", "name"), [(0, "bart"), (1, "bart"), (2, "t5"), (3, "m2m100"), (4, "whisper")])
def test_encoder_decoders_equal_the_papers_equations(seed: int, name: str) -> None:
    if name == "bart":
        config = hf.BartConfig(**encoder_decoders.BART | {"encoder_layers": 3})
        model = randomized(hf.BartForConditionalGeneration(config), seed)
    else:
        model = encoder_decoders.build(name, seed, torch.float64)
    inputs, method = encoder_decoders.inputs(name, seed, dtype=torch.float64), AttentionTimesGradient(model)
    for position, target, rows, columns in (
        (None, 7, [-1, -1], [7, 7]),
        ([2, 4], Difference(9, [5, 6]), [2, 4], [9, 9]),
    ):

        def chosen(logits: Tensor, rows: Any = rows, columns: Any = columns, target: Any = target) -> Tensor:
            value = logits[[0, 1], rows, columns]
            return value - logits[[0, 1], rows, target.other] if isinstance(target, Difference) else value

        stacks = weighted_by_gradients(model, inputs, chosen)
        maps = method.maps(inputs, target=target, position=position)
        for found, stack in zip((maps.encoder, maps.decoder, maps.cross), stacks, strict=True):
            torch.testing.assert_close(found, stack.transpose(0, 1), rtol=1e-6, atol=1e-12)
        scores = method.attribute(inputs, target, position=position)
        for example in range(2):
            both = rules(*(stack[:, example] for stack in stacks))
            for found, expected in zip(scores, both, strict=True):
                assert expected[rows[example]].abs().max() > 1e-6
                torch.testing.assert_close(found[example], expected[rows[example]], rtol=1e-6, atol=1e-12)


def test_stacks_layers_and_gradients_of_an_encoder_decoder() -> None:
    model, inputs = encoder_decoders.build("bart", dtype=torch.float64), encoder_decoders.inputs("bart")
    method = AttentionTimesGradient(model, differentiable=True)
    whole: Any = method.maps(inputs, target=3)
    chosen: Any = method.maps(inputs, target=3, stacks=["cross"], layers=[-1])
    assert chosen.encoder is None
    assert torch.equal(chosen.cross[:, 0], whole.cross[:, 1])
    (gradient,) = torch.autograd.grad(whole.encoder.sum(), model.lm_head.weight)
    assert gradient.abs().max() > 0
    for found, stack in zip(method.attribute(inputs, 3, layer=0, position=2), ("cross", "decoder"), strict=True):
        own = getattr(method.maps(inputs, target=3, position=2), stack)[:, 0, 2]
        assert torch.equal(found, own)


def test_what_is_not_supported_is_refused() -> None:
    model = encoder_decoders.build("bart")
    with pytest.raises(InvalidInputError, match=r"got no input of the decoder; pass decoder_input_ids in a mapping"):
        AttentionTimesGradient(model).attribute(encoder_decoders.inputs("bart")["input_ids"], 1, position=2)
    with pytest.raises(InvalidInputError, match="got position 6; the sequence has 6 positions"):
        AttentionTimesGradient(model).attribute(encoder_decoders.inputs("bart"), 1, position=6)
    with pytest.raises(UnsupportedModelError, match="returns no logits"):
        AttentionTimesGradient(model.model).attribute(encoder_decoders.inputs("bart"), 1)
