"""Tokens that components promote: logits by hand of what heads, networks and neurons write; ALTI-Logit's updates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import ALTILogit, AttnLRP, ComponentAttribution, Difference, RelP
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from tests import encoder_decoders, families
from tests.attr.frozen.test_relevance import near
from tests.classifiers import classifier, randomized
from tests.padding import padded

KINDS: Any = ["heads", "feed_forward", "neurons"]
HEADS = 4
# Their files compute norms in float32.
CLOSE = {"gpt2": 1e-11, "llama": 1e-5, "qwen3": 1e-5, "gemma2": 1e-5}


def watched(model: nn.Module, ids: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """What every module received first and returned at the last position, and the logits there."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.dim() == 3:
                seen[name] = args[0][:, -1], output[:, -1]

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    for handle in handles:
        handle.remove()
    return seen, logits


def by_hand(name: str, model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The logits, (B, V), that each component writes directly, by kind and name."""
    seen, logits = watched(model, ids)
    gpt2 = name == "gpt2"
    layer_name, final = ("transformer.h.{}.", "transformer.ln_f") if gpt2 else ("model.layers.{}.", "model.norm")
    outer, written = ("attn.c_proj", "mlp.c_proj") if gpt2 else ("self_attn.o_proj", "mlp.down_proj")

    def normed(norm: str, part: Tensor) -> Tensor:
        """Carry (n, B, D) through a norm, with the statistics of what it received."""
        if norm not in seen:
            return part
        module: Any = model.get_submodule(norm)
        whole = seen[norm][0]
        if gpt2:
            part, whole = part - part.mean(-1, keepdim=True), whole - whole.mean(-1, keepdim=True)
        gain = module.weight + 1 if name == "gemma2" else module.weight
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        carried: Tensor = part * gain / (whole.square().mean(-1, keepdim=True) + eps).sqrt()
        return carried

    raw, slope = seen["lm_head"][1], torch.ones_like(logits)
    if name == "gemma2":
        cap = model.config.final_logit_softcapping
        slope = cap * (raw / cap).tanh() / raw
    found: dict[str, Tensor] = {}
    for layer in range(len(model.get_submodule(layer_name.format(0)[:-3]))):
        place = layer_name.format(layer)
        weights = [model.get_submodule(place + module).weight for module in (outer, written)]
        project, down = weights if gpt2 else [weight.T for weight in weights]
        received = seen[place + outer][0].unflatten(-1, (HEADS, -1))
        heads = torch.einsum("bhd,hdm->hbm", received, project.unflatten(0, (HEADS, -1)))
        neurons = seen[place + written][0].T[..., None] * down[:, None]
        sandwich = name == "gemma2"
        behind = (place + "post_attention_layernorm", place + "post_feedforward_layernorm") if sandwich else ("", "")
        parts = {
            "heads": normed(behind[0], heads),
            "feed_forward": normed(behind[1], seen[place + "mlp"][1][None]),
            "neurons": normed(behind[1], neurons),
        }
        for kind, part in parts.items():
            promoted = normed(final, part) @ model.lm_head.weight.T * slope
            for number, row in enumerate(promoted):
                found[f"{kind} {layer}" + f".{number}" * (kind != "feed_forward")] = row.detach()
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CLOSE)
def test_promoted_logits_are_what_components_write_through_the_frozen_norm(name: str, seed: int) -> None:
    model, ids = randomized(families.build(name, seed), seed), families.inputs(name, seed, 2, 7)
    expected = by_hand(name, model, ids)
    found = ComponentAttribution(RelP(model)).attribute(ids, Difference(5, 9), components=KINDS, promoted=4)
    for kind in KINDS:
        for example, promoted in enumerate(found.promoted):
            for row in found[example].top(100, kind):
                tokens = promoted[f"decoder {kind} {row.name}"]
                logits = expected[f"{kind} {row.name}"][example]
                best = logits.topk(4).indices.tolist()
                indices = [*best, *(index for index in (5, 9) if index not in best)]  # those explained follow
                assert [token for token, _ in tokens] == [str(index) for index in indices]
                near(torch.tensor([logit for _, logit in tokens], dtype=logits.dtype), logits[indices], CLOSE[name])


def expect_updates(model: Any, inputs: Any, found: Any, target: int, tolerance: float, **where: Any) -> None:
    """The promoted logit of one token is ALTI-Logit's update."""
    updates = ALTILogit(model).logit_updates(inputs, target, **where)
    parts: dict[str, Any] = {"heads": updates.heads, "feed_forward": updates.feed_forward, "cross": updates.cross_heads}
    count = 0
    for example, promoted in enumerate(found.promoted):
        for component, tokens in promoted.items():
            stack, kind, name = component.split()
            if kind != "neurons":
                part = parts["cross" if stack == "cross" else kind]
                expected = float(part[(example, *map(int, name.split(".")))])
                assert dict(tokens)[str(target)] == pytest.approx(expected, rel=tolerance, abs=tolerance)
                count += 1
    assert count == sum(part.numel() for part in parts.values() if part is not None)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2", "opt-350m", "cohere", "mixtral"])
def test_the_promoted_logit_of_the_target_is_alti_logits_update(name: str) -> None:
    model, ids = randomized(families.build(name), 0), families.inputs(name, 0, 2, 7)
    method = ComponentAttribution(ALTILogit(model))
    found = method.attribute(ids, 5, components=KINDS[:2], position=[3, 5], promoted=families.VOCABULARY)
    expect_updates(model, ids, found, 5, 1e-6, position=[3, 5])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_components_of_a_decoder_and_its_cross_attention_promote_tokens(name: str) -> None:
    model, inputs = encoder_decoders.build(name, 0, torch.float64), encoder_decoders.inputs(name, 0, 2, 5, 4)
    found = ComponentAttribution(AttnLRP(model)).attribute(inputs, 7, components=KINDS, promoted=40)
    places = {component.rpartition(" ")[0] for component in found.promoted[0]}
    assert places == {"decoder heads", "cross heads", "decoder feed_forward", "decoder neurons"}
    expect_updates(model, inputs, found, 7, 1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_promoted_token(side: str) -> None:
    model = randomized(families.build("gpt2"), 0)
    examples = [families.inputs("gpt2", seed, batch=1, length=length) for seed, length in enumerate((8, 5))]
    method, (batch, mask) = ComponentAttribution(RelP(model)), padded(examples, side)
    found = method.attribute(batch, 2, mask, components=KINDS, promoted=3)
    for row, example in enumerate(examples):
        alone = method.attribute(example, 2, components=KINDS, promoted=3)
        (tokens,), (expected,) = found[row].promoted, alone.promoted
        assert {name: dict(some).keys() for name, some in tokens.items()} == {
            name: dict(some).keys() for name, some in expected.items()
        }
        for name, some in tokens.items():
            assert dict(some) == pytest.approx(dict(expected[name]), rel=1e-9)


def test_results_keep_the_tokens_that_components_promote(tmp_path: Path) -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2", 0, 2, 7)
    names = SimpleNamespace(decode=lambda ids: f" token{ids[0]}")
    method = ComponentAttribution(RelP(model, tokenizer=names))
    found, plain = (method.attribute(ids, 5, components=["heads", "residual"], promoted=count) for count in (2, 0))
    assert found.load(found.save(tmp_path / "found.safetensors")) == found
    assert replace(found, promoted=()) == plain
    assert found[1].promoted == found.promoted[1:]
    assert list(found.promoted[0]) == [f"decoder heads {row.name}" for row in found[0].top(8)]
    for tokens in found.promoted[0].values():
        assert all(token.startswith(" token") for token, _ in tokens)
        assert 2 <= len(tokens) <= 3


def test_what_promotes_no_tokens_is_refused() -> None:
    gpt2, ids = families.build("gpt2"), families.inputs("gpt2", 0, 2, 7)
    for model, options, error, named in (
        (
            RelP(gpt2),
            {"components": "residual"},
            UnsupportedModelError,
            "for GPT2LMHeadModel and residual; expected heads",
        ),
        (RelP(classifier()), {"target": 1}, UnsupportedModelError, "BertForSequence.* and heads; .*output embedding"),
        (RelP(gpt2, readout=lambda output, _: output.logits[:, -1]), {}, UnsupportedModelError, "leave it out"),
        (families.build("bitnet"), {}, UnsupportedModelError, "promoted=3 for BitNetForCausalLM, whose logits are not"),
        (gpt2, {"promoted": -1}, InvalidInputError, "promoted=-1"),
    ):
        with pytest.raises(error, match=named):
            ComponentAttribution(model).attribute(ids, **{"target": 5, "promoted": 3} | options)
