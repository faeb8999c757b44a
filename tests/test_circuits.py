"""Edges of the residual stream against models run by hand, in which every input of a component is separate."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_neox import modeling_gpt_neox

from benchmarks.circuits import StreamGraph, circuits, edges
from captum_norm import CPLRP, GIM, ALTILogit, AttnLRP, ComponentAttribution, RelP
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from tests import encoder_decoders, families
from tests.attr.frozen.test_relevance import near
from tests.padding import padded

LENGTH, TARGET = 6, 5
FAMILIES = {"gpt2": 1e-10, "gpt-neox": 1e-10, "llama": 1e-5, "qwen3": 1e-5, "gemma2": 1e-5}
"""The tolerance: norms of the last three compute in float32."""
every_family = pytest.mark.parametrize("name", FAMILIES)
rotate: Any = modeling_gemma2.apply_rotary_pos_emb
rotate_part: Any = modeling_gpt_neox.apply_rotary_pos_emb
METHODS = (CPLRP, AttnLRP, RelP, GIM)


def inputs(name: str) -> tuple[Any, Tensor, Tensor]:
    ids, other = (families.inputs(name, seed, 2, LENGTH) for seed in range(2))
    return families.build(name, 0, torch.float64), ids, other


class ByHand:
    """A model whose components read inputs that ``read`` makes of the stream and what was written to it."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.config = name, model.config
        body: Any = model.transformer if name == "gpt2" else model.gpt_neox if name == "gpt-neox" else model.model
        self.model, self.body = model, body
        self.layers = body.h if name == "gpt2" else body.layers
        self.heads = self.config.num_attention_heads

    def start(self, ids: Tensor) -> Any:
        if self.name == "gpt2":
            return self.body.wte(ids) + self.body.wpe(torch.arange(ids.shape[1]))
        return (self.body.embed_in if self.name == "gpt-neox" else self.body.embed_tokens)(ids)

    def heads_of(self, layer: Any, letter: str, x: Tensor) -> Any:
        """Queries, keys or values of all heads, (B, H, S, d), keys repeated."""
        if self.name == "gpt2":
            part = layer.attn.c_attn(layer.ln_1(x)).chunk(3, -1)["qkv".index(letter)]
            return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        normed, places = layer.input_layernorm(x), torch.arange(x.shape[1])[None]
        if self.name == "gpt-neox":
            fused = layer.attention.query_key_value(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            part = fused.chunk(3, -1)["qkv".index(letter)]
            cos, sin = self.body.rotary_emb(x, places)
            return part if letter == "v" else rotate_part(part, part, cos, sin)[0]
        attention = layer.self_attn
        part = getattr(attention, f"{letter}_proj")(normed).unflatten(-1, (-1, attention.head_dim))
        if self.name == "qwen3" and letter != "v":
            part = getattr(attention, f"{letter}_norm")(part)
        part = part.transpose(1, 2)
        if letter != "v":
            part = rotate(part, part, *self.body.rotary_emb(x, places))[0]
        return part.repeat_interleave(self.heads // part.shape[1], 1)

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
        scale, cap = query.shape[-1] ** -0.5, getattr(self.config, "attn_logit_softcapping", None)
        if self.name == "gemma2":
            scale = self.config.query_pre_attn_scalar**-0.5
        scores = query @ key.mT * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        seen = apart >= 0
        window = getattr(getattr(layer, "self_attn", None), "sliding_window", None)
        seen = seen if window is None else seen & (apart < window)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value

    def run(self, stream: Tensor, read: Callable[[str, Tensor, dict[str, Tensor]], Any]) -> tuple[Tensor, Any]:
        """The number explained, (B,), and what each component wrote, (B, S, D)."""
        written, config = {"input": stream}, self.config
        for i, layer in enumerate(self.layers):
            parts = {}
            for letter in "qkv":
                each = [
                    self.heads_of(layer, letter, read(f"a{i}.h{h}<{letter}>", stream, written))[:, h]
                    for h in range(self.heads)
                ]
                parts[letter] = torch.stack(each, 1)
            network: Any = None
            if self.name == "gpt-neox":
                network = layer.mlp(layer.post_attention_layernorm(read(f"m{i}", stream, written)))
            mixed = self.attend(layer, parts["q"], parts["k"], parts["v"])
            names = {"gpt2": "attn.c_proj", "gpt-neox": "attention.dense"}
            out = layer.get_submodule(names.get(self.name, "self_attn.o_proj"))
            matrix = out.weight if self.name == "gpt2" else out.weight.T
            matrix = matrix.unflatten(0, (self.heads, -1))
            added = [mixed[:, h] @ matrix[h] for h in range(self.heads)]
            whole = sum(added) if out.bias is None else sum(added) + out.bias
            if self.name == "gemma2":
                norm = layer.post_attention_layernorm
                scale = torch.rsqrt(whole.square().mean(-1, keepdim=True) + norm.eps)
                added, whole = [part * scale * (1 + norm.weight) for part in added], norm(whole)
            written |= {f"a{i}.h{h}": part for h, part in enumerate(added)}
            stream = stream + whole
            if self.name == "gpt2":
                network = layer.mlp(layer.ln_2(read(f"m{i}", stream, written)))
            elif self.name == "gemma2":
                network = layer.mlp(layer.pre_feedforward_layernorm(read(f"m{i}", stream, written)))
                network = layer.post_feedforward_layernorm(network)
            elif network is None:
                network = layer.mlp(layer.post_attention_layernorm(read(f"m{i}", stream, written)))
            written[f"m{i}"], stream = network, stream + network
        end = read("logits", stream, written)
        norm = {"gpt2": "ln_f", "gpt-neox": "final_layer_norm"}.get(self.name, "norm")
        logits = self.model.lm_head(self.body.get_submodule(norm)(end))
        cap = getattr(config, "final_logit_softcapping", None)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits[:, -1, TARGET], written


def gradients(hand: ByHand, start: Tensor, graph: StreamGraph) -> tuple[Tensor, Tensor]:
    """∂m/∂(v's input), (B, S, V, D), and the sources, (B, S, U, D)."""
    offsets = torch.zeros(len(graph.targets), *start.shape, dtype=start.dtype, requires_grad=True)
    of = dict(zip(graph.targets, offsets, strict=True))
    number, written = hand.run(start, lambda name, stream, _: stream + of[name])
    (found,) = torch.autograd.grad(number.sum(), offsets)
    return found.permute(1, 2, 0, 3), torch.stack([written[name].detach() for name in graph.sources], 2)


def graph_of(name: str, model: Any) -> StreamGraph:
    return StreamGraph(len(ByHand(name, model).layers), 4, name == "gpt-neox", model.config.hidden_size)


@every_family
def test_edges_equal_gradients_by_hand(name: str) -> None:
    model, ids, other = inputs(name)
    hand, graph = ByHand(name, model), graph_of(name, model)
    passed, sources = gradients(hand, hand.start(ids), graph)
    _, others = gradients(hand, hand.start(other), graph)
    for counterfactual, moved in ((None, sources), (other, others - sources)):
        expected = torch.einsum("bsud,bsvd->buv", moved, passed).masked_fill(~graph.edges, 0)
        found = edges(ComponentAttribution(model), ids, TARGET, counterfactual=counterfactual)
        assert found.graph == graph
        near(found.scores, expected, FAMILIES[name])
    assert found.outputs[0].value == pytest.approx(model(ids).logits[0, -1, TARGET].item())


def test_steps_average_gradients_on_the_way() -> None:
    model, ids, other = inputs("gpt2")
    hand, graph = ByHand("gpt2", model), graph_of("gpt2", model)
    start, end = hand.start(ids).detach(), hand.start(other).detach()
    (_, here), (_, there) = gradients(hand, start, graph), gradients(hand, end, graph)
    passed = [gradients(hand, start + at * (end - start), graph)[0] for at in (1 / 6, 3 / 6, 5 / 6)]
    expected = torch.einsum("bsud,bsvd->buv", there - here, sum(passed) / 3).masked_fill(~graph.edges, 0)
    near(edges(ComponentAttribution(model), ids, TARGET, counterfactual=other, steps=3).scores, expected, 1e-10)


@every_family
def test_edges_out_of_a_component_add_up_to_its_score(name: str) -> None:
    model, ids, other = inputs(name)
    for method in (*(method(model) for method in METHODS), *([] if name == "gemma2" else [model])):
        # Through a norm on attention's output, a head's own change is not linear.
        for counterfactual in (None,) if name == "gemma2" else (None, other):
            attribution = ComponentAttribution(method)
            sums = edges(attribution, ids, TARGET, counterfactual=counterfactual).scores.sum(2)
            kinds = ["residual", "heads", "feed_forward"]
            nodes = attribution.attribute(ids, TARGET, components=kinds, counterfactual=counterfactual)
            layers = sums[:, 1:].unflatten(1, (-1, 5))
            near(sums[:, 0], nodes.totals("residual")["decoder"][:, 0], FAMILIES[name])
            near(layers[..., :4], nodes.totals("heads")["decoder"], FAMILIES[name])
            if name != "gemma2":  # there, components are read before the norm, whose bias is none
                near(layers[..., 4], nodes.totals("feed_forward")["decoder"], FAMILIES[name])


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
    scores = edges(ComponentAttribution(method(model)), ids, TARGET).scores
    total = scores[:, :, -1].sum(1) + direction @ biases + model.lm_head.weight[TARGET] @ norm.bias
    near(total.detach(), number.detach(), 1e-10)
    if method is CPLRP:  # attention weights are constant
        graph = graph_of("gpt2", model)
        frozen = [v for v, target in enumerate(graph.targets) if target.endswith(("<q>", "<k>"))]
        assert not scores[:, :, frozen].any()


@every_family
def test_circuits_equal_runs_by_hand(name: str) -> None:
    model, ids, other = inputs(name)
    hand, graph = ByHand(name, model), graph_of(name, model)
    number, _ = hand.run(hand.start(ids), lambda _, stream, __: stream)
    empty, others = hand.run(hand.start(other), lambda _, stream, __: stream)
    method = ComponentAttribution(RelP(model))
    scores = edges(method, ids, TARGET, counterfactual=other)
    found = circuits(method, scores, ids, TARGET, counterfactual=other, shares=(0, 0.1, 0.3, 0.7, 1))
    tolerance = FAMILIES[name]
    near(found.whole, number.detach(), tolerance)
    near(found.empty, empty.detach(), tolerance)
    near(found.numbers[0], empty.detach(), tolerance)
    near(found.numbers[-1], number.detach(), tolerance)
    faithful = (found.numbers.mean(1) - empty.mean()) / (number.mean() - empty.mean())
    near(found.faithfulness, faithful.detach(), tolerance)
    for place in (1, 2, 3):
        kept = scores.circuit(found.counts[place])
        assert kept.sum() == found.counts[place] == int((0, 0.1, 0.3, 0.7, 1)[place] * graph.edges.sum())

        def read(target: str, stream: Tensor, written: dict[str, Tensor], kept: Tensor = kept) -> Any:
            v = graph.targets.index(target)
            left_out = [u for u, source in enumerate(graph.sources) if source in written and not kept[u, v]]
            left_out = [u for u in left_out if graph.edges[u, v]]
            return stream + sum(others[graph.sources[u]] - written[graph.sources[u]] for u in left_out)

        by_hand, _ = hand.run(hand.start(ids), read)
        near(found.numbers[place], by_hand.detach(), tolerance)
    with torch.no_grad():
        near(found.whole, model(ids).logits[:, -1, TARGET], tolerance)


def test_areas_are_those_of_mib() -> None:
    model, ids, other = inputs("gpt2")
    method = ComponentAttribution(model)
    scores = edges(method, ids, counterfactual=other)
    found = circuits(method, scores, ids, counterfactual=other, absolute=False)
    f, shares = found.faithfulness.tolist(), found.shares
    assert scores.scores.shape == (2, 11, 27)
    assert found.counts == (0, 0, 0, 1, 2, 5, 11, 22, 55, 110)
    assert f[-1] == pytest.approx(1)

    def area(values: list[float]) -> Any:
        pairs = zip(pairwise(shares), pairwise(values), strict=True)
        return pytest.approx(sum((end - start) * (left + right) / 2 for (start, end), (left, right) in pairs))

    assert found.cpr == area(f)
    assert found.cmd == area([abs(1 - value) for value in f])
    # The target is what the model predicts for the inputs, also in the circuits and the counterfactual.
    predicted = model(ids).logits[:, -1].argmax(-1)
    near(found.empty, model(other).logits[:, -1].gather(1, predicted[:, None])[:, 0].detach(), 1e-10)


def test_padding_and_alignment() -> None:
    model, ids, other = inputs("gpt2")
    method = ComponentAttribution(RelP(model))
    batch, mask = padded([ids[:1], ids[1:, :4]], "left")
    changed, _ = padded([other[:1], other[1:, :4]], "left")
    found = edges(method, batch, TARGET, mask, counterfactual=changed)
    alone = edges(method, ids[1:, :4], TARGET, counterfactual=other[1:, :4])
    near(found.scores[1:], alone.scores, 1e-10)
    same = edges(method, ids, TARGET, counterfactual=other)
    order = torch.arange(LENGTH).expand(2, -1)
    assert torch.equal(edges(method, ids, TARGET, counterfactual=other, alignment=order).scores, same.scores)


def test_mib_json() -> None:
    assert len(StreamGraph(12, 12, False, 768).sources) + 1 == 158  # those of its example for GPT-2
    assert StreamGraph(12, 12, False, 768).edges.sum() == 32491
    model, ids, other = inputs("gpt2")
    scores = edges(ComponentAttribution(model), ids, TARGET, counterfactual=other)
    made = scores.to_mib(20)
    assert made["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 32}
    assert list(made["nodes"]) == [*scores.graph.sources, "logits"]
    assert {"input->a0.h3<k>", "a0.h3->m0", "m0->a1.h0<v>", "a1.h0->m1", "input->logits"} <= made["edges"].keys()
    assert "a0.h0->a0.h1<q>" not in made["edges"]
    assert sum(edge["in_graph"] for edge in made["edges"].values()) == 20
    kept = [name for name, edge in made["edges"].items() if edge["in_graph"]]
    best = sorted(made["edges"], key=lambda name: -abs(made["edges"][name]["score"]))[:20]
    assert sorted(kept) == sorted(best)
    for name, node in made["nodes"].items():
        writes = name == "logits" or any(edge.startswith(f"{name}->") for edge in kept)
        reads = name in ("input", "logits") or any(edge.split("->")[1].split("<")[0] == name for edge in kept)
        assert node["in_graph"] == (writes and reads)
    assert all(edge["in_graph"] for edge in scores.to_mib()["edges"].values())
    assert [row["edge"] for row in scores.top(3)] == best[:3]
    # MIB scores edges by what patching adds to a loss, so those that support the output come first.
    assert {row["edge"]: -row["score"] for row in scores.records()} == {
        name: edge["score"] for name, edge in made["edges"].items()
    }
    lowest = sorted(made["edges"], key=lambda name: -made["edges"][name]["score"])[:20]
    signed = scores.to_mib(20, absolute=False)["edges"]
    assert sorted(lowest) == sorted(name for name, edge in signed.items() if edge["in_graph"])
    parts = edges(ComponentAttribution(model), ids, TARGET)
    assert torch.equal(parts.support, parts.scores.mean(0))
    parallel = StreamGraph(1, 2, True, 8)
    assert parallel.targets == ["a0.h0<q>", "a0.h1<q>", "a0.h0<k>", "a0.h1<k>", "a0.h0<v>", "a0.h1<v>", "m0", "logits"]
    assert parallel.edges.sum(0).tolist() == [1, 1, 1, 1, 1, 1, 1, 4]
    assert "gradient, GPT2LMHeadModel" in repr(scores)


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
    with pytest.raises(UnsupportedModelError, match=why):
        edges(ComponentAttribution(model), given, 2)


def test_requests_that_do_not_fit_are_refused() -> None:
    model, ids, _ = inputs("gpt2")
    with pytest.raises(InvalidInputError, match="no gradients of components"):
        edges(ComponentAttribution(ALTILogit(model)), ids, TARGET)
    with pytest.raises(InvalidInputError, match="pass counterfactual="):
        edges(ComponentAttribution(model), ids, TARGET, steps=3)
    with pytest.raises(InvalidInputError, match="as many positions"):
        edges(ComponentAttribution(model), ids, TARGET, counterfactual=ids[:, 1:])
    scores = edges(ComponentAttribution(model), ids, TARGET)
    with pytest.raises(InvalidInputError, match="the number of edges"):
        scores.circuit(1000)
    other, tokens, _ = inputs("gpt-neox")
    with pytest.raises(InvalidInputError, match="pass scores of its own edges"):
        circuits(ComponentAttribution(other), scores, tokens, TARGET, counterfactual=tokens)
