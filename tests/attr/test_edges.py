"""Edges of the residual stream against models run by hand, in which every input of a component is separate."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import CPLRP, GIM, ActivationPatching, ALTILogit, AttnLRP, ComponentAttribution, DecompX, RelP
from captum_norm.attr.frozen.edges import EdgeNetwork
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, UnsupportedModelError
from captum_norm.results.components import edge_ends
from tests import encoder_decoders, families
from tests.attr.edges_by_hand import FAMILIES, LENGTH, TARGET, ByHand, every_family, gradients, inputs
from tests.attr.frozen.relevance_rules import apply
from tests.attr.frozen.test_relevance import near
from tests.attr.test_components import Scaled
from tests.padding import padded

METHODS = (CPLRP, AttnLRP, RelP, GIM)


def edges(method: Any, *given: Any, **options: Any) -> Tensor:
    """Scores of the edges, (B, U, V)."""
    found: Tensor = ComponentAttribution(method).attribute(*given, components="edges", **options).scores
    return found


@every_family
def test_edges_equal_gradients_by_hand(name: str) -> None:
    model, ids, other = inputs(name)
    hand = ByHand(name, model)
    passed, sources, there_are = gradients(hand, hand.start(ids))
    _, others, _ = gradients(hand, hand.start(other))
    for counterfactual, moved in ((None, sources), (other, others - sources)):
        expected = torch.einsum("bsud,bsvd->buv", moved, passed).masked_fill(~there_are, 0)
        near(edges(model, ids, TARGET, counterfactual=counterfactual), expected, FAMILIES[name])


def test_steps_average_gradients_on_the_way() -> None:
    model, ids, other = inputs("gpt2")
    hand = ByHand("gpt2", model)
    start, end = hand.start(ids).detach(), hand.start(other).detach()
    (_, here, there_are), (_, there, _) = gradients(hand, start), gradients(hand, end)
    passed = [gradients(hand, start + at * (end - start))[0] for at in (1 / 6, 3 / 6, 5 / 6)]
    expected = torch.einsum("bsud,bsvd->buv", there - here, sum(passed) / 3).masked_fill(~there_are, 0)
    near(edges(model, ids, TARGET, counterfactual=other, steps=3), expected, 1e-10)


@every_family
def test_edges_out_of_a_component_add_up_to_its_score(name: str) -> None:
    model, ids, other = inputs(name)
    for method in (*(method(model) for method in METHODS), *([] if name == "gemma2" else [model])):
        # Through a norm on attention's output, a head's own change is not linear.
        for counterfactual in (None,) if name == "gemma2" else (None, other):
            kinds: Any = ["residual", "heads", "feed_forward", "edges"]
            attribution = ComponentAttribution(method)
            found = attribution.attribute(ids, TARGET, components=kinds, counterfactual=counterfactual)
            alone = attribution.attribute(ids, TARGET, components=kinds[:3], counterfactual=counterfactual)
            for kind in kinds[:3]:
                near(found.parts[kind]["decoder"], alone.parts[kind]["decoder"], FAMILIES[name])
            sums = found.totals("edges")["decoder"].sum(2)
            layers = sums[:, 1:].unflatten(1, (-1, 5))
            near(sums[:, 0], found.totals("residual")["decoder"][:, 0], FAMILIES[name])
            near(layers[..., :4], found.totals("heads")["decoder"], FAMILIES[name])
            if name != "gemma2":  # there, components are read before the norm, whose bias is none
                near(layers[..., 4], found.totals("feed_forward")["decoder"], FAMILIES[name])


@pytest.mark.parametrize("method", METHODS)
def test_edges_into_the_logits_and_biases_add_up_to_the_output(method: Any) -> None:
    model, ids, _ = inputs("gpt2")
    hand = ByHand("gpt2", model)
    ends: list[Tensor] = []

    def read(name: str, stream: Tensor, _: Any) -> Tensor:
        if name == "logits":
            ends.append(stream[:, -1])
        return stream

    number, _ = hand.run(hand.start(ids), read)
    norm = model.transformer.ln_f
    row = model.lm_head.weight[TARGET] * norm.weight
    scale = torch.rsqrt(ends[0].var(-1, unbiased=False, keepdim=True) + norm.eps)
    direction = (row - row.mean()) * scale
    biases = sum(layer.attn.c_proj.bias for layer in model.transformer.h)
    scores = edges(method(model), ids, TARGET)
    total = scores[:, :, -1].sum(1) + direction @ biases + model.lm_head.weight[TARGET] @ norm.bias
    near(total.detach(), number.detach(), 1e-10)
    if method is CPLRP:  # attention weights are constant
        _, targets = edge_ends(*scores.shape[1:])
        frozen = [v for v, target in enumerate(targets) if target.endswith(("<q>", "<k>"))]
        assert not scores[:, :, frozen].any()


def test_padding_alignment_and_several_values() -> None:
    model, ids, other = inputs("gpt2")
    batch, mask = padded([ids[:1], ids[1:, :4]], "left")
    changed, _ = padded([other[:1], other[1:, :4]], "left")
    found = edges(RelP(model), batch, TARGET, mask, counterfactual=changed)
    near(found[1:], edges(RelP(model), ids[1:, :4], TARGET, counterfactual=other[1:, :4]), 1e-10)
    same = edges(RelP(model), ids, TARGET, counterfactual=other)
    order = torch.arange(LENGTH).expand(2, -1)
    assert torch.equal(edges(RelP(model), ids, TARGET, counterfactual=other, alignment=order), same)
    where: Any = {"position": [[3, 5]] * 2, "components": "edges"}
    several = RelP(model).decompose(ids, TARGET, **where).components["edges"]["decoder"]
    for place, position in enumerate((3, 5)):
        near(several[:, place], edges(RelP(model), ids, TARGET, position=position), 1e-10)


@every_family
def test_edges_are_named_as_in_mib(name: str, tmp_path: Any) -> None:
    model, ids, _ = inputs(name)
    hand = ByHand(name, model)
    found = ComponentAttribution(model).attribute(ids, TARGET, components=["heads", "edges"])
    scores = found.parts["edges"]["decoder"]
    targets: dict[str, list[str]] = {}
    _, written = hand.run(hand.start(ids), lambda target, stream, now: (targets.update({target: [*now]}), stream)[1])
    assert edge_ends(*scores.shape[1:]) == (list(written), list(targets))
    every = [f"{source}->{target}" for source in written for target, before in targets.items() if source in before]
    for example in range(2):
        of_one = [row for row in found.records() if (row["example"], row["kind"]) == (example, "edges")]
        assert [row["name"] for row in of_one] == every
        assert sum(row["score"] for row in of_one) == pytest.approx(float(scores[example].sum()))
    best = found.top(3, "edges")
    assert abs(best[0].score) == scores.abs().max()
    assert best == [*best, *found.top(20, "edges")][:3]
    layers = {edge.name.partition("->")[2]: edge.layer for edge in found.top(1000, "edges")}
    assert {layers[target] for target in ("m0", "a0.h1<q>")} == {0}
    assert (layers["a1.h0<v>"], layers["m1"], layers["logits"]) == (1, 1, len(hand.layers))
    assert best[0][2:4] + best[0][5:8] == ("edges", "decoder", None, None, None)
    assert (
        found[1].top(2, "edges") == [edge._replace(example=0) for edge in found.top(1000, "edges") if edge.example][:2]
    )
    assert type(found).load(found.save(tmp_path / "found.safetensors")) == found
    assert f"edges {best[0].name} " in repr(found)


def test_edges_of_gpt2_are_as_many_as_in_mib() -> None:
    sources, targets = edge_ends(157, 445)
    assert (sources[-1], sources[13:15], targets[36:38]) == ("m11", ["m0", "a1.h0"], ["m0", "a1.h0<q>"])


# One residual stream, which dense networks and modules that call an attention function read through norms.
WITH_EDGES = """
aimv2-vision apertus arcee audio-spectrogram beit bigbird-pegasus biogpt chinese-clip-vision clip-text clip-vision
cohere cohere2 ctrl cwm deit dinov2 dinov2-with-registers dinov3-vit dpt emu3 ernie4-5 esmc eurobert gemma gemma2 gemma3
gemma4-unified glm glm4 gpt-bigcode gpt-neox gpt-neox-sequential gpt2 granite helium hunyuan-v1-dense hyperclovax ijepa
internvl-vision jais2 llama ministral ministral3 mistral mllama-text modernbert modernbert-decoder molmo2-text nanochat
nemotron olmo opt persimmon persimmon-fuyu phi phi3 pixio qianfan-ocr-vision qwen2 qwen3 qwen3-vl-text
roberta-prelayernorm sapiens2 seed-oss siglip-text siglip-vision smollm3 stablelm stablelm-parallel starcoder2
t5-encoder tipsv2-vision ultrabert vaultgemma vit vit-msn wav2vec2-large xlm-roberta-xl
"""


@pytest.mark.few
@pytest.mark.parametrize("name", WITH_EDGES.split())
def test_edges_add_up_in_every_family(name: str) -> None:
    """What components write and what edges of the input add up to is checked in the call, too."""
    model, given = families.build(name), families.inputs(name, 0, 2, 9)

    def readout(output: Any, _: Tensor) -> Tensor:
        last: Tensor = output[0].reshape(2, -1, output[0].shape[-1])[:, -1]
        return last @ torch.linspace(-1, 1, 3 * last.shape[-1]).reshape(-1, 3).to(last)

    for method in (CPLRP(model, readout=readout), RelP(model, readout=readout)):
        found = method.decompose(given, 1, components=["edges", "residual"])
        ((stack, scores),) = found.components["edges"].items()
        start = found.components["residual"][stack][:, 0].sum(1)
        torch.testing.assert_close(scores[:, 0].sum(1), start, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bert", "is post-norm"),
        ("mixtral", "is a mixture of experts"),
        ("t5", "has two sequences"),
        ("gptj", "computes attention by its own products"),
    ],
)
def test_models_of_another_structure_are_refused(name: str, why: str) -> None:
    model, ids = (
        (encoder_decoders if name == "t5" else families).build(name),
        families.inputs("gpt2", 0, 2, LENGTH) % 40,
    )
    given: Any = {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else ids
    for method in (model, RelP(model)):
        with pytest.raises(UnsupportedModelError, match=why):
            edges(method, given, 2)


@pytest.mark.parametrize("make", [lambda model: model, CPLRP])
def test_edges_that_do_not_add_up_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, _ = inputs("llama")
    method = make(model)
    with monkeypatch.context() as changed:
        heads = EdgeNetwork._by_head
        changed.setattr(EdgeNetwork, "_by_head", lambda self, output: 1.01 * heads(self, output))
        with pytest.raises(IncompleteDecompositionError, match="components of layer 0 write does not add up: relative"):
            edges(method, ids, TARGET)
    edges(method, ids, TARGET)
    model.model.layers[1].register_forward_hook(lambda *seen: apply(Scaled, seen[-1], 2.0))
    with pytest.raises(IncompleteDecompositionError, match="edges of the input contribute is not what the input does"):
        edges(method, ids, TARGET)


def test_requests_that_do_not_fit_are_refused() -> None:
    model, ids, other = inputs("gpt2")
    for method, options, named in (
        (ALTILogit(model), {}, '"edges"; updates are of'),
        (ALTILogit(model), {"counterfactual": other}, "no gradients of components"),
        (DecompX(model, "absdot"), {}, "propagates"),
        (model, {"steps": 3}, "pass counterfactual="),
        (model, {"counterfactual": ids[:, 1:]}, "as many positions"),
    ):
        with pytest.raises(InvalidInputError, match=named):
            edges(method, ids, TARGET, **options)
    with pytest.raises(InvalidInputError, match="'edges'; expected residual, heads"):
        ActivationPatching(model).attribute(ids, TARGET, components="edges", counterfactual=other)
