"""Calls of every method that explains an output: padding, batches, modes, the number, and what is left on the model."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captum.attr import Saliency

import captum_norm as cn
from tests import encoder_decoders, families
from tests.attr.frozen.test_decompx import REFUSED
from tests.attr.test_alti_logit import head_of_means
from tests.classifiers import alone, classifier, sentences
from tests.families import FAMILIES, TEXT, TEXTS, tiers
from tests.families.family import new
from tests.padding import expect_alone, padded
from tests.test_matrix import interrupt

METHODS: dict[str, Callable[[Any], Any]] = {
    "attention × gradient": cn.AttentionTimesGradient,
    "decompx": cn.DecompX,
    "decompx, propagated": lambda model: cn.DecompX(model, propagate=True),
    "decompx, shared biases": lambda model: cn.DecompX(model, "absdot"),
    "alti-logit": cn.ALTILogit,
    "cp-lrp": cn.CPLRP,
    "attnlrp": cn.AttnLRP,
    "gim": cn.GIM,
}
MAPS: dict[str, Callable[[Any], Any]] = {
    "alti": cn.ALTI,
    "rollout": cn.AttentionRollout,
    "value zeroing": cn.ValueZeroing,
}
IDS = families.inputs("bert", batch=2)

every_method = pytest.mark.parametrize("name", METHODS)


def built(name: str) -> Any:
    return classifier() if name == "bert" else families.build(name, dtype=torch.float64)


@pytest.mark.few
@every_method
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bloom"])
def test_padding_and_batching_change_nothing(name: str, family: str) -> None:
    ids, mask = sentences([9, 6, 7, 4])
    method, target = METHODS[name](built(family)), torch.tensor([0, 2, 1, 2])
    scores, delta = method.attribute(ids, target, mask), None
    if method.has_convergence_delta():
        scores, delta = method.attribute(ids, target, mask, return_convergence_delta=True)
        assert delta.max() < 1e-5
    # The last two take norms and softmax in single precision.
    tolerance = 1e-9 if family in ("bert", "gpt2") else 1e-5
    for row in range(len(ids)):
        expected = method.attribute(alone(ids, mask, row), int(target[row]))
        assert (alone(scores, mask, row) - expected).abs().max() < tolerance * expected.abs().max()
    assert not scores[mask == 0].any()


@pytest.mark.few
@every_method
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_modes_change_nothing_and_nothing_is_left(name: str, family: str) -> None:
    model = built(family).train()
    before, method = families.state_of(model), METHODS[name](model)
    expected = method.attribute(IDS, 1)
    assert not expected.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(method.attribute(IDS.clone(), 1), expected)
        torch.testing.assert_close(method.attribute(model.get_input_embeddings()(IDS), 1), expected)
    assert families.state_of(model) == before
    model.requires_grad_(requires_grad=False)
    torch.testing.assert_close(method.attribute(IDS, 1), expected)
    model.requires_grad_()
    places = {"bert": ("bert.encoder.layer.1.output", "classifier"), "gpt2": ("transformer.h.1.mlp", "lm_head")}
    for place in places[family]:
        handle = model.get_submodule(place).register_forward_pre_hook(interrupt)
        for enabled in (True, False):
            for explain in (method, METHODS[name](model)):
                with torch.set_grad_enabled(enabled):
                    with pytest.raises(KeyboardInterrupt):
                        explain.attribute(IDS, 1)
                    assert torch.is_grad_enabled() == enabled
        handle.remove()
    assert families.state_of(model) == before
    torch.testing.assert_close(method.attribute(IDS, 1), expected)


@pytest.mark.few
@pytest.mark.parametrize("name", METHODS | MAPS)
@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_either_sequence_changes_nothing(name: str, family: str, side: str) -> None:
    model = encoder_decoders.build(family, dtype=torch.float64)
    long, short = (encoder_decoders.inputs(family, seed, 1, 9 - 4 * seed, 6 - 2 * seed) for seed in (0, 1))
    batch = {}
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        batch[ids], batch[mask] = padded([long[ids], short[ids]], side, 1)
    source, target = (batch[mask][1].bool() for mask in ("attention_mask", "decoder_attention_mask"))
    method, options = (METHODS | MAPS)[name](model), {} if name in MAPS else {"target": 2}
    with torch.no_grad():
        output, before = model(**batch).logits, families.state_of(model)
    found, expected = method.attribute(batch, **options), method.attribute(short, **options)
    for scores, own, real in zip(found, expected, (source, target), strict=True):
        torch.testing.assert_close(scores[1, real], own[0], rtol=1e-5, atol=1e-6)
        assert not scores[1, ~real].any()
    if name in MAPS:
        pairs = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
        expect_alone(method.maps(batch), 1, method.maps(short), pairs, 1e-5, 1e-6)
    with torch.no_grad():
        # Before transformers 5.15, T5 made NaN of queries that see nothing.
        torch.testing.assert_close(model(**batch).logits, output, rtol=0, atol=0, equal_nan=True)
    assert families.state_of(model) == before


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (cn.NormAttribution, "NormAttribution(BertModel, scope='attn')"),
        (lambda model: cn.AttentionWeights(model, "attn_res"), "(BertModel, scope='attn_res', aggregation='mean')"),
        (
            lambda model: cn.ALTI(model, memory_budget=2**20),
            "ALTI(BertModel, memory_budget=1048576)",
        ),
        (lambda model: cn.DecompX(model, "absdot"), "DecompX(BertModel, bias='absdot')"),
        (lambda model: cn.NormMeter(model, baseline="bias"), "NormMeter(BertModel, baseline='bias')"),
        (
            lambda model: cn.TokenAttribution(model, Saliency),
            "TokenAttribution(BertModel, 'attribution:Saliency|reduction:l2')",
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_methods_show_model_scope_and_options(make: Callable[[Any], Any], expected: str) -> None:
    assert repr(make(families.build("bert"))).endswith(expected)


WAYS: dict[str, Callable[..., Any]] = {
    "decompx": cn.DecompX,
    "decompx, propagated": lambda model, **options: cn.DecompX(model, propagate=True, **options),
    "attnlrp": cn.AttnLRP,
    "alti-logit": cn.ALTILogit,
}
"""One method of each way of a forward pass."""
ALIKE: dict[str, Callable[..., Any]] = {"cp-lrp": cn.CPLRP, "gim": cn.GIM}
"""Those that run as DecompX and as AttnLRP."""
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
OWN: dict[str, Any] = {
    "attention_mask": MASK,
    "token_type_ids": torch.tensor([[0] * 3 + [1] * 4, [0] * 4 + [1] * 3]),
    "position_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 4, 5, 6, 7]]),
    "use_cache": True,
    "output_hidden_states": True,
}
"""Arguments of one's own, of which a model gets those that its forward function names."""


def expect_number(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    """Expect of every method the number of the plain call, which the readout or else ``options`` name."""
    readout, target = options.pop("readout", None), options["target"]
    with torch.no_grad():
        output = model(**inputs)
    if readout is not None:
        plain = readout(output, MASK.bool())[:, target]
    else:
        logits = output.logits
        plain = logits[:, target] if logits.dim() == 2 else logits[torch.arange(len(logits)), -1, target]
    for name, make in (WAYS | (ALIKE if readout is None else {})).items():
        made = make(model, readout=readout)
        found = made.decompose(inputs, **options)
        # With gradients torch does not fold some products, and propagation has larger batches.
        near = torch.allclose(found.number, plain, rtol=1e-5, atol=1e-6)
        assert near, (name, found.number, plain)


@pytest.mark.few(cases=8)
@pytest.mark.parametrize("name", tiers(name for name in FAMILIES if name not in {*REFUSED, "xmod"}))
def test_the_number_of_every_family_is_that_of_the_plain_call(name: str) -> None:
    model = families.build(name)
    known = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {next(iter(known)): families.inputs(name, 0, 2, 7)}
    given = OWN if name in TEXTS else {"output_hidden_states": True}
    inputs |= {key: value for key, value in given.items() if key in known}
    if getattr(model.config, "type_vocab_size", 1) < 2:
        inputs.pop("token_type_ids", None)
    expect_number(model, inputs, readout=head_of_means, target=1)


def test_logits_of_language_and_translation_models_are_those_of_the_plain_call() -> None:
    model, ids = new("LlamaForCausalLM", **TEXT)().eval(), families.inputs("llama", 0, 2, 7)
    places = OWN["position_ids"]
    for keep in (1, 0):
        options = {"use_cache": keep == 1, "output_hidden_states": True, "return_dict": True}
        inputs = {"input_ids": ids, "position_ids": places, "logits_to_keep": keep, **options}
        expect_number(model, inputs, target=11)
    model, inputs = encoder_decoders.build("bart"), encoder_decoders.inputs("bart", 0, 2, 5, 4)
    for cached in (False, True):
        expect_number(model, inputs | {"use_cache": cached, "output_hidden_states": True}, target=7)
