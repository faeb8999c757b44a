"""Components inside models: their relevance against rules by hand, their gradients against the model's own autograd."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import captum_norm as cn
from captum_norm import ALTI, CPLRP, GIM, ALTILogit, AttnLRP, ComponentAttribution, DecompX, Difference, RelP
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, UnsupportedModelError
from captum_norm.results.components import Component
from tests import encoder_decoders, families
from tests.attr.frozen import relevance_by_hand as by_hand
from tests.attr.frozen.relevance_rules import Rules, apply
from tests.attr.frozen.test_relevance import near
from tests.classifiers import classifier, randomized
from tests.families import EVERY, tiers
from tests.padding import padded

METHODS: dict[str, Any] = {method.name: method for method in (CPLRP, AttnLRP, RelP, GIM)}
every_method = pytest.mark.parametrize("name", METHODS)


def expect_read(found: Any, rules: Rules, stack: str = "decoder", tolerance: float = 1e-9) -> None:
    """Relevance by hand of residual streams, heads, neurons, and of experts (B, L, E, S, D)."""
    parts = {kind: stacks[stack] for kind, stacks in found.components.items()}
    near(parts["residual"], rules.read("residual").sum(-1), tolerance)
    near(parts["heads"], rules.read("heads").sum(-1), tolerance)
    near(parts["feed_forward"], rules.read("feed_forward").sum(-1), tolerance)
    if "neurons" in parts:
        neurons = rules.read("neurons").transpose(-1, -2)
        near(parts["neurons"], neurons if parts["neurons"].dim() == 4 else neurons.sum(-1), tolerance)
    if "experts" in parts:
        experts = torch.stack([layer.sum(-1).transpose(0, 1) for layer in rules.noted["experts"].values()], 1)
        near(parts["experts"], experts, tolerance)


@every_method
@pytest.mark.parametrize("seed", range(2))
def test_relevance_in_gpt2_and_bert_equals_rules_by_hand(name: str, seed: int) -> None:
    kinds: Any = ("residual", "heads", "feed_forward", "neurons")
    model, ids, rules = randomized(families.build("gpt2", seed), seed), families.inputs("gpt2", seed, 2, 7), Rules(name)
    by_hand.gpt2(model, rules, ids, 5)
    expect_read(METHODS[name](model).decompose(ids, 5, components=kinds, per_position=bool(seed)), rules)

    model, rules, mask = classifier(seed), Rules(name), torch.ones_like(ids)
    mask[1, 5:] = 0
    by_hand.bert(model, rules, ids, 2, mask.bool())
    found = METHODS[name](model).decompose(ids, 2, mask, components=kinds, per_position=not seed)
    expect_read(found, rules, "encoder")
    assert not found.components["heads"]["encoder"][1, ..., 5:].any()


@every_method
def test_relevance_with_grouped_queries_gates_and_experts_equals_rules_by_hand(name: str) -> None:
    model, ids, rules = randomized(by_hand.Llama(), 0), torch.randint(0, 40, (2, 6)), Rules(name)
    by_hand.llama(model, rules, ids, 5)
    found = METHODS[name](model).decompose(ids, 5, components=("residual", "heads", "feed_forward", "neurons"))
    expect_read(found, rules)

    model, ids, rules = randomized(families.build("mixtral", 1), 1), families.inputs("mixtral", 1, 2, 7), Rules(name)
    by_hand.mixtral(model, rules, ids, 5)
    found = METHODS[name](model).decompose(ids, 5, components=("residual", "heads", "feed_forward", "experts"))
    expect_read(found, rules, tolerance=1e-6)  # its file computes softmax and norms in float32


def test_several_values_have_components_each() -> None:
    model, ids = randomized(families.build("gpt2"), 0), families.inputs("gpt2", 0, 2, 7)
    method, where, answer = RelP(model), [[3, 4, 5]] * 2, ids[:, 4:]
    found = method.decompose(ids, answer, position=where, components=["heads", "residual"])
    together = method.decompose(ids, answer, position=where, components="heads", together=True)
    for kind in ("heads", "residual"):
        every = found.components[kind]["decoder"]
        for place in range(3):
            alone = method.decompose(ids, answer[:, place], position=3 + place, components=kind)
            near(every[:, place], alone.components[kind]["decoder"], 1e-12)
    near(together.components["heads"]["decoder"], found.components["heads"]["decoder"].sum(1), 1e-12)


def activations(model: Any, places: dict[str, tuple[str, str]], run: Any) -> tuple[Any, dict[str, Tensor]]:
    """What modules receive or return, by name, in one run of a model, and what ``run`` returns."""
    seen: dict[str, Tensor] = {}

    def hook(name: str, end: str) -> Any:
        def keep(_: nn.Module, args: Any, output: Any) -> None:
            tensor = args[0] if end == "input" else output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.retain_grad()
            seen[name] = tensor

        return keep

    handles = [
        model.get_submodule(module).register_forward_hook(hook(name, end)) for name, (module, end) in places.items()
    ]
    result = run()
    for handle in handles:
        handle.remove()
    return result, seen


GPT2 = {
    **{f"residual {layer + 1}": (f"transformer.h.{layer}", "output") for layer in range(2)},
    **{f"heads {layer}": (f"transformer.h.{layer}.attn.c_proj", "input") for layer in range(2)},
    **{f"neurons {layer}": (f"transformer.h.{layer}.mlp.c_proj", "input") for layer in range(2)},
    **{f"feed_forward {layer}": (f"transformer.h.{layer}.mlp", "output") for layer in range(2)},
}


def products(moves: dict[str, Tensor], gradients: dict[str, Tensor], name: str) -> Tensor:
    part = moves[name] * gradients[name]
    return part.unflatten(-1, (4, -1)).sum(-1).transpose(1, 2) if name.startswith("heads") else part.sum(-1)


@pytest.mark.parametrize("steps", [None, 3])
def test_attribution_patching_is_the_gradient_times_what_a_counterfactual_changes(steps: int | None) -> None:
    model = randomized(families.build("gpt2"), 0)
    ids, other = (families.inputs("gpt2", seed, 2, 7) for seed in range(2))
    _, here = activations(model, GPT2, lambda: model(ids))
    _, there = activations(model, GPT2, lambda: model(other))
    moves = {name: (there[name] - here[name]).detach() for name in GPT2}
    start, end = (model.transformer.wte(tokens).detach() for tokens in (ids, other))
    expected = {name: torch.zeros(()) for name in GPT2}
    for step in range(steps or 1):
        share = 0.0 if steps is None else (step + 0.5) / steps
        stream = (start + share * (end - start)).requires_grad_()
        logits, seen = activations(model, GPT2, lambda stream=stream: model(inputs_embeds=stream).logits)
        (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
        gradients: Any = {name: tensor.grad for name, tensor in seen.items()}
        expected = {name: expected[name] + products(moves, gradients, name) / (steps or 1) for name in GPT2}

    found = ComponentAttribution(model).attribute(
        ids,
        Difference(5, 9),
        components=["residual", "heads", "neurons", "feed_forward"],
        per_position=True,
        counterfactual=other,
        steps=steps,
    )
    for layer in range(2):
        near(found.parts["residual"]["decoder"][:, layer + 1], expected[f"residual {layer + 1}"], 1e-10)
        near(found.parts["heads"]["decoder"][:, layer], expected[f"heads {layer}"], 1e-10)
        near(found.parts["neurons"]["decoder"][:, layer].sum(1), expected[f"neurons {layer}"], 1e-10)
        near(found.parts["feed_forward"]["decoder"][:, layer], expected[f"feed_forward {layer}"], 1e-10)
    assert found.unit == "estimated change of the output"
    assert found.convergence_delta is None
    plain = torch.stack([model(ids).logits[:, -1, 5] - model(ids).logits[:, -1, 9]])
    assert [output.value for output in found.outputs] == pytest.approx(plain[0].tolist())


def test_a_counterfactual_of_another_length_is_aligned() -> None:
    model = randomized(families.build("gpt2"), 0)
    ids, other = families.inputs("gpt2", 0, 2, 7), families.inputs("gpt2", 1, 2, 9)
    places = torch.tensor([[0, 1, 2, 3, 6, 7, 8], [0, 1, 4, 5, 6, 7, 8]])
    logits, here = activations(model, GPT2, lambda: model(ids).logits)
    _, there = activations(model, GPT2, lambda: model(other))
    logits[:, -1, 5].sum().backward()
    found = ComponentAttribution(model).attribute(ids, 5, components="heads", counterfactual=other, alignment=places)
    for layer in range(2):
        name = f"heads {layer}"
        move = torch.stack([row[places[example]] for example, row in enumerate(there[name])]) - here[name]
        expected = products({name: move.detach()}, {name: here[name].grad}, name)  # type: ignore[dict-item]
        near(found.scores[:, layer], expected, 1e-10)
    with pytest.raises(InvalidInputError, match=r"\(2, 9, .*for \(2, 7, .*alignment="):
        ComponentAttribution(model).attribute(ids, 5, counterfactual=other)
    with pytest.raises(InvalidInputError, match="outside of the counterfactual's 9"):
        ComponentAttribution(model).attribute(ids, 5, counterfactual=other, alignment=places + 1)


def test_gradients_inside_an_encoder_decoder_are_the_models_own() -> None:
    model, inputs = encoder_decoders.build("bart", 0, torch.float64), encoder_decoders.inputs("bart", 0, 2, 5, 4)
    stacks = {
        "encoder": ("encoder", "self_attn"),
        "decoder": ("decoder", "self_attn"),
        "cross": ("decoder", "encoder_attn"),
    }
    heads = {
        f"{stack} {layer}": (f"model.{half}.layers.{layer}.{attention}.out_proj", "input")
        for stack, (half, attention) in stacks.items()
        for layer in range(2)
    }
    logits, seen = activations(model, heads, lambda: model(**inputs).logits)
    logits[:, -1, 7].sum().backward()
    found = ComponentAttribution(model).attribute(inputs, 7, components="heads")
    assert list(found.parts["heads"]) == list(stacks)
    for stack, part in found.parts["heads"].items():
        for layer in range(2):
            tensor = seen[f"{stack} {layer}"]
            expected = (tensor * tensor.grad).detach().unflatten(-1, (4, -1)).sum(-1).transpose(1, 2)  # type: ignore[operator]
            near(part[:, layer], expected, 1e-9)


def test_updates_of_heads_and_networks_are_components_of_alti_logit() -> None:
    model, ids = randomized(families.build("llama"), 0), families.inputs("llama", 0, 2, 7)
    updates = ALTILogit(model).logit_updates(ids, 5, position=[2, 4])
    found = ComponentAttribution(ALTILogit(model)).attribute(
        ids, 5, position=[2, 4], components=("heads", "feed_forward")
    )
    for row, place in enumerate((2, 4)):
        near(found.parts["heads"]["decoder"][row, :, :, place], updates.heads[row], 1e-12)
        near(found.parts["feed_forward"]["decoder"][row, :, place], updates.feed_forward[row], 1e-12)
    assert torch.equal(found.totals()["decoder"], found.parts["heads"]["decoder"].sum(-1))
    assert found.parts["heads"]["decoder"].count_nonzero() == updates.heads.numel()
    with pytest.raises(InvalidInputError, match="RelP"):
        ComponentAttribution(ALTILogit(model)).attribute(ids, 5, components="neurons")
    with pytest.raises(InvalidInputError, match="no gradients of components"):
        ComponentAttribution(ALTILogit(model)).attribute(ids, 5, counterfactual=ids)


# What DecompX refuses: sums that others' attention or experts break, gates on attention's output, packed pictures.
REFUSED = {"esm", "deberta", "qwen3-next", "qwen3-5", "afmoe", "laguna", "bitnet", "minimax-m3-text", "pixtral-vision"}


@pytest.mark.parametrize("name", tiers(name for name in EVERY if name not in REFUSED))
def test_streams_add_up_in_every_layer(name: str) -> None:
    """In every family that DecompX explains; each layer's sum is checked in the call."""
    model, inputs = families.build(name), families.inputs(name, 0, 2, 9)

    def readout(output: Any, _: Tensor) -> Tensor:
        last: Tensor = output[0].reshape(2, -1, output[0].shape[-1])[:, -1]
        return last @ torch.linspace(-1, 1, 3 * last.shape[-1]).reshape(-1, 3).to(last)

    for method in (DecompX(model, readout=readout), CPLRP(model, readout=readout)):
        found = method.decompose(inputs, 1, components=["residual", "heads"])
        ((stack, streams),) = found.components["residual"].items()
        assert streams.shape[1] == found.components["heads"][stack].shape[1] + 1
        torch.testing.assert_close(streams[:, 0], found.scores, rtol=1e-4, atol=1e-5)


@pytest.mark.few
@pytest.mark.parametrize("name", sorted(set(encoder_decoders.ENCODER_DECODERS) - {"nllb-moe", "switch-transformers"}))
def test_streams_of_encoder_and_decoder_add_up_in_every_layer(name: str) -> None:
    model, inputs = encoder_decoders.build(name), encoder_decoders.inputs(name, 0, 2, 5, 4)
    for method in (DecompX(model), AttnLRP(model)):
        found = method.decompose(inputs, 7, components=["residual", "heads"])
        streams, heads = found.components["residual"], found.components["heads"]
        assert list(streams) == ["encoder", "decoder"]
        assert list(heads) == ["encoder", "decoder", "cross"]
        torch.testing.assert_close(streams["encoder"][:, 0], found.scores.source, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(streams["decoder"][:, 0], found.scores.prefix, rtol=1e-4, atol=1e-5)


class Scaled(torch.autograd.Function):
    """The identity, with a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.factor * gradients[0], None


def test_a_stream_that_does_not_add_up_is_named() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", 0, 2, 7)
    found = CPLRP(model).decompose(ids, 5, components="residual")
    for stream in found.components["residual"]["decoder"].unbind(1):
        near(stream.sum(1), found.number, 1e-6)  # without biases; norms are computed in float32
    # Two errors that cancel in the tokens' sum.
    for layer, factor in enumerate((2.0, 0.5)):
        model.model.layers[layer].register_forward_hook(lambda *seen, factor=factor: apply(Scaled, seen[-1], factor))
    assert torch.equal(CPLRP(model).decompose(ids, 5).number, found.number)
    with pytest.raises(IncompleteDecompositionError, match=r"stream that enters layer 1 of Llama.*error 5\.0e-01"):
        CPLRP(model).decompose(ids, 5, components="residual")


@pytest.mark.parametrize("name", ["gpt2", "bert", "mixtral"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batching_change_no_component(name: str, side: str) -> None:
    model = classifier() if name == "bert" else families.build(name, dtype=torch.float64)
    kinds: Any = ["residual", "heads", "feed_forward", "experts" if name == "mixtral" else "neurons"]
    examples = [families.inputs(name, seed, batch=1, length=length) for seed, length in enumerate((8, 5))]
    method = ComponentAttribution(RelP(model))
    batch, mask = padded(examples, side)
    found = method.attribute(batch, 2, mask, components=kinds)
    for row, example in enumerate(examples):
        alone = method.attribute(example, 2, components=kinds)
        for kind in kinds:
            for stack, part in found[row].parts[kind].items():
                near(part, alone.parts[kind][stack], 1e-5 if name == "mixtral" else 1e-9)
    rows = found.parts["heads"]["encoder" if name == "bert" else "decoder"].movedim(-1, 1)
    assert not rows[~mask.bool()].any()


def test_where_examples_and_positions_cannot_be_told_apart_components_are_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).double().eval()
    inputs = torch.randn(4, 4, 16, dtype=torch.float64)  # positions first

    def readout(output: Tensor, _: Tensor) -> Tensor:
        return output[-1, :, :3]

    kinds: tuple[Component, ...] = ("residual", "heads", "feed_forward", "neurons")
    found = AttnLRP(model, readout=readout).decompose(inputs, 1, components=kinds)
    one = AttnLRP(model, readout=readout)
    for example in range(4):
        alone = one.decompose(inputs[:, example : example + 1], 1, components=kinds)
        for kind in kinds:
            near(found.components[kind]["encoder"][example], alone.components[kind]["encoder"][0], 1e-9)


def test_results_name_their_components(tmp_path: Any) -> None:
    model, ids = randomized(families.build("gpt2"), 0), families.inputs("gpt2", 0, 2, 7)
    found = ComponentAttribution(RelP(model)).attribute(
        ids, Difference(5, 9), components=["heads", "residual", "neurons"]
    )
    heads = found.parts["heads"]["decoder"]
    best = found.top(2)
    totals = heads.sum(-1).flatten(1)
    example, place = divmod(int(totals.abs().argmax()), totals.shape[1])
    assert best[0][:2] == (f"{place // 4}.{place % 4}", pytest.approx(float(totals[example, place])))
    assert best[0][2:] == ("heads", "decoder", place // 4, place % 4, None, None, example)
    (stream,) = found.top(1, "residual")
    residual = found.parts["residual"]["decoder"]
    assert abs(stream.score) == residual.abs().max()
    assert residual[stream.example, stream.layer, stream.position or 0] == stream.score
    (single,) = found.top(1, per_position=True)
    assert abs(single.score) == heads.abs().max()
    records = found.records()
    assert len(records) == heads.numel() + residual.numel() + found.parts["neurons"]["decoder"].numel()
    assert sum(row["score"] for row in records if row["kind"] == "heads") == pytest.approx(float(heads.sum()))
    assert records[0]["output"] == "5 − 9"
    assert type(found).load(found.save(tmp_path / "found.safetensors")) == found
    assert found[1] == next(iter(list(found)[1:]))
    assert found[-1].outputs == found.outputs[1:]
    assert repr(found[0]).startswith("ComponentScores(explained 5 − 9 = ")
    with pytest.raises(InvalidInputError, match=r'read parts\["heads"\]'):
        _ = found.scores
    with pytest.raises(InvalidInputError, match="kind"):
        found.top(1, "experts")


def test_the_models_own_gradients_pass_gates_on_attention() -> None:
    model, ids = families.build("qwen3-next", dtype=torch.float64), families.inputs("qwen3-next", 0, 2, 7)
    heads = {str(layer): (f"model.layers.{layer}.self_attn.o_proj", "input") for layer in range(2)}
    logits, seen = activations(model, heads, lambda: model(ids).logits)
    logits[:, -1, 5].sum().backward()
    found = ComponentAttribution(model).attribute(ids, 5)
    for layer in range(2):
        part: Any = seen[str(layer)]  # times the gate, whose gradient is as much smaller
        near(found.scores[:, layer], products({"heads": part.detach()}, {"heads": part.grad}, "heads"), 1e-6)
    with pytest.raises(UnsupportedModelError, match="multiplied before the output projection"):
        ComponentAttribution(RelP(model)).attribute(ids, 5)


def test_messages_name_the_model_where_no_method_was_passed() -> None:
    gpt2, ids = families.build("gpt2"), families.inputs("gpt2", 0, 2, 7)
    cached = {"input_ids": ids[:, 3:], "past_key_values": gpt2(ids[:, :3], use_cache=True).past_key_values}
    prefix = peft.get_peft_model(gpt2, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    whole = "the gradient of .*LMHeadModel .*; pass the whole sequence without a cache$"
    for method, inputs, said in (
        (ComponentAttribution(gpt2), cached, whole),
        (cn.ActivationPatching(gpt2), cached, whole),
        (ComponentAttribution(prefix), ids, "the gradient of .*LMHeadModel .*; explain the model without them$"),
        (ComponentAttribution(RelP(gpt2)), cached, "RelP .*without a cache, or take another method"),
    ):
        options: Any = {"ablation": "zero"} if isinstance(method, cn.ActivationPatching) else {}
        with pytest.raises(InvalidInputError, match=said):
            method.attribute(inputs, 5, **options)


def test_what_has_no_components_is_refused() -> None:
    gpt2, ids = families.build("gpt2"), families.inputs("gpt2", 0, 2, 7)
    mixtral = families.build("mixtral")
    for method, named in ((ALTI(gpt2), "ALTI, which is not linear"), (cn.NormAttribution(gpt2), "NormAttribution")):
        with pytest.raises(InvalidInputError, match=named):
            ComponentAttribution(method)
    for model, options, error, named in (
        (gpt2, {"components": "head"}, InvalidInputError, "heads"),
        (gpt2, {"components": ()}, InvalidInputError, "no components"),
        (RelP(gpt2), {"components": "experts"}, InvalidInputError, "have none"),
        (RelP(mixtral), {"components": "neurons"}, UnsupportedModelError, "experts that share a module"),
        (mixtral, {"components": "experts"}, UnsupportedModelError, "own gradients"),
        (RelP(mixtral), {"components": "experts", "counterfactual": ids}, UnsupportedModelError, "counterfactual"),
        (gpt2, {"steps": 3}, InvalidInputError, "without a counterfactual"),
        (gpt2, {"steps": 0, "counterfactual": ids}, InvalidInputError, "steps"),
        (DecompX(gpt2, "absdot"), {}, InvalidInputError, "propagates"),
        (RelP(families.build("xmod")), {"components": "neurons"}, UnsupportedModelError, "language adapter"),
    ):
        with pytest.raises(error, match=named):
            ComponentAttribution(model).attribute(ids, 5, **options)
