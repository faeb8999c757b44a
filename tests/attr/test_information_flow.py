"""Information flow routes against parts formed and routes followed by hand, in float64."""

import json
from dataclasses import asdict
from typing import Any

import networkx  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from captum_norm import InformationFlow, InvalidInputError
from captum_norm.attr.flow_graph import FlowNode
from captum_norm.errors import IncompleteDecompositionError, UnsupportedScopeError
from captum_norm.functional import Carry
from captum_norm.functional.contributions import head_nearness
from tests import encoder_decoders, families, oracle
from tests.attr.test_alti import cross_shares
from tests.classifiers import classifier, sentences
from tests.families import FAMILIES, arrangement_of, tiers


def near(whole: Tensor, part: Tensor) -> Tensor:
    """max(0, ‖y‖₁ − ‖y − v‖₁)."""
    return (whole.abs().sum(-1) - (whole - part).abs().sum(-1)).clamp(min=0)


def ends_of(name: str, model: Any, ids: Tensor) -> list[Tensor]:
    """What each layer returns, (B, S, D)."""
    names = [FAMILIES[name].layer.format(index) for index in range(model.config.num_hidden_layers)]
    with torch.no_grad(), oracle.watched(model, {layer: (layer, "first") for layer in names}) as seen:
        model(ids)
    return [end.reshape(len(ids), -1, 32) for ends in seen.values() for end in ends]


def importances(layer: oracle.Layer, end: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of every head's vector, (B, H, Q, K), of the residual stream, and of a parallel network's output, (B, Q).

    ``end`` is what a parallel layer returns.
    """
    vectors = oracle.vectors_per_head(layer.weights, layer.values, layer.projection)
    constant = layer.bias.expand_as(layer.residual)
    if layer.branch is not None:
        _, sigma = layer.branch.statistics(vectors.sum((1, 3)) + constant)
        vectors = layer.branch.part(vectors, sigma[:, None, :, None].expand(vectors.shape[:-1]))
        constant = layer.branch.part(constant, sigma) + layer.branch.bias
    vectors, constant, stream = vectors * layer.factor, constant * layer.factor, layer.residual
    whole = vectors.sum((1, 3)) + constant + stream
    network = torch.zeros_like(whole)
    if layer.final is not None:
        _, sigma = layer.final.statistics(whole)
        vectors = layer.final.part(vectors, sigma[:, None, :, None].expand(vectors.shape[:-1]))
        stream, whole = layer.final.part(stream, sigma), layer.final.whole(whole)
    if end is not None:
        network, whole = end - whole, end
    heads = near(whole[:, None, :, None], vectors)
    residual, written = near(whole, stream), near(whole, network)
    total = heads.sum((1, 3)) + residual + written
    return (
        (heads / total[:, None, :, None]).nan_to_num(0),
        (residual / total).nan_to_num(0),
        (written / total).nan_to_num(0),
    )


@pytest.mark.few
@pytest.mark.parametrize("name", tiers(kind=arrangement_of))
def test_maps_equal_the_parts_by_hand(name: str) -> None:
    tolerance = 1e-6 if FAMILIES[name].single else 1e-11
    model, inputs = families.build(name, 1, torch.float64), families.inputs(name, 1, dtype=torch.float64)
    layers, parallel = oracle.layers(FAMILIES[name], model, inputs), FAMILIES[name].style == "parallel"
    ends = ends_of(name, model, inputs) if parallel else [None] * len(layers)
    expected = []
    for layer, end in zip(layers, ends, strict=True):
        heads, residual, written = importances(layer, end)
        expected.append(heads.sum(1) + torch.diag_embed(residual + written))
    for memory_budget in (None, 5600):
        maps: Any = InformationFlow(model, memory_budget=memory_budget).maps(inputs)
        assert (maps.self_attention - torch.stack(expected, 1)).abs().max() < tolerance
        assert maps.convergence_delta.max() < tolerance


Parts = list[tuple[FlowNode, FlowNode, str, int | None, float]]


def all_parts(name: str, model: Any, ids: Tensor, example: int) -> Parts:
    """Every part of every stream of one example: source, target, kind, head and importance."""
    stack = "decoder" if FAMILIES[name].causal else "encoder"
    parts: Parts = []
    before = [FlowNode(stack, -1, "input", place) for place in range(ids.shape[1])]
    layers = zip(oracle.layers(FAMILIES[name], model, ids), ends_of(name, model, ids), strict=True)
    for index, (layer, end) in enumerate(layers):
        parallel = FAMILIES[name].style == "parallel"
        heads, residual, written = importances(layer, end if parallel else None)
        block = "layer" if parallel else "attention"
        here = [FlowNode(stack, index, block, place) for place in range(ids.shape[1])]
        for query, target in enumerate(here):
            parts.append((before[query], target, "residual", None, float(residual[example, query])))
            if parallel:
                parts.append((before[query], target, "feed-forward", None, float(written[example, query])))
            for head, row in enumerate(heads[example, :, query]):
                parts += [(before[key], target, "attention", head, float(c)) for key, c in enumerate(row)]
        before = here
        if parallel:
            continue
        stream = layer.vectors("atb")[0].sum(2) + layer.vectors("atb")[1]
        network = end - stream
        if name == "bert":
            module = model.get_submodule(FAMILIES[name].layer.format(index))
            network, norm = module.output.dense(module.intermediate(stream)).detach(), module.output.LayerNorm
            sigma = (((stream + network).var(-1, unbiased=False) + norm.eps) ** 0.5)[..., None]
            stream, network = (norm.weight.detach() * (p - p.mean(-1, keepdim=True)) / sigma for p in (stream, network))
        kept, added = near(end, stream)[example], near(end, network)[example]
        behind = [FlowNode(stack, index, "feed-forward", place) for place in range(ids.shape[1])]
        for place, target in enumerate(behind):
            total = float(kept[place] + added[place])
            parts.append((before[place], target, "residual", None, float(kept[place]) / total))
            parts.append((before[place], target, "feed-forward", None, float(added[place]) / total))
        before = behind
    return parts


def followed(parts: Parts, output: FlowNode, threshold: float) -> Parts:
    """The parts above a threshold on routes to a node."""
    reached, found = {output}, []
    for part in reversed(parts):  # every target comes after its parts' sources
        if part[1] in reached and part[4] > threshold:
            found.append(part)
            reached.add(part[0])
    return found


@pytest.mark.few
@pytest.mark.parametrize(("seed", "name"), [(0, "gpt2"), (1, "llama"), (2, "gptj"), (3, "bert"), (4, "gpt2")])
def test_graphs_equal_the_routes_by_hand(seed: int, name: str) -> None:
    model, ids = families.build(name, seed, torch.float64), families.inputs(name, seed)
    method, places = InformationFlow(model), [4, 2, 5]
    last = "layer" if FAMILIES[name].style == "parallel" else "feed-forward"
    for threshold in (0.0, 0.02, 0.1):
        graphs = method.graphs(ids, position=places, threshold=threshold)
        summed = method.graphs(ids, position=places, threshold=threshold, per_head=False)
        for example, (graph, by_key) in enumerate(zip(graphs, summed, strict=True)):
            parts = all_parts(name, model, ids, example)
            output = FlowNode("decoder" if FAMILIES[name].causal else "encoder", 1, last, places[example])
            assert graph.outputs[0] == output
            expected = followed(parts, output, threshold)
            found: dict[Any, float] = {(e.source, e.target, e.part, e.head): e.importance for e in graph.edges}
            assert found.keys() == {part[:4] for part in expected}
            for *part, importance in expected:
                assert found[tuple(part)] == pytest.approx(importance, abs=1e-6 if FAMILIES[name].single else 1e-11)
            assert set(graph.nodes) == {output, *(part[0] for part in expected)}
            together: dict[Any, float] = {}
            for source, target, kind, _, importance in parts:
                key = (source, target, kind)
                together[key] = together.get(key, 0.0) + importance
            joined = followed([(*key, None, value) for key, value in together.items()], output, threshold)
            assert {(e.source, e.target, e.part) for e in by_key.edges} == {part[:3] for part in joined}
            assert all(edge.head is None for edge in by_key.edges)
    scores = method.attribute(ids, position=places)
    for example, graph in enumerate(method.graphs(ids, position=places, threshold=0)):
        inputs = graph.inputs()
        assert sum(inputs.values()) == pytest.approx(1)
        for node, share in inputs.items():
            assert share == pytest.approx(float(scores[example, node.position]))


def test_an_encoder_decoders_routes_go_on_in_the_encoder() -> None:
    model, inputs = encoder_decoders.build("mbart", dtype=torch.float64), encoder_decoders.inputs("mbart")
    method = InformationFlow(model)
    layers = encoder_decoders.oracle("mbart", model, inputs)
    maps: Any = method.maps(inputs)
    for place, layer in enumerate(layers["cross"]):
        heads, _, _ = importances(layer, None)
        assert (maps.cross[:, place] - heads.sum(1)).abs().max() < 1e-11
    assert (cross_shares(layers["cross"][0]) - maps.cross[:, 0]).abs().max() > 1e-3  # ALTI's are of heads together
    scores = method.attribute(inputs, position=[3, 5])
    for example, graph in enumerate(method.graphs(inputs, position=[3, 5], threshold=0)):
        assert graph.outputs[0] == FlowNode("decoder", 1, "feed-forward", [3, 5][example])
        shares = graph.inputs()
        assert {node.stack for node in shares} == {"encoder", "decoder"}
        assert sum(shares.values()) == pytest.approx(1)
        for node, share in shares.items():
            one = scores.source if node.stack == "encoder" else scores.prefix
            assert share == pytest.approx(float(one[example, node.position]))
    (pruned, _) = method.graphs(inputs, threshold=0.1)
    crossing = [edge for edge in pruned.edges if edge.source.stack != edge.target.stack]
    assert all(edge.source == FlowNode("encoder", 1, "feed-forward", edge.source.position) for edge in crossing)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_graphs_of_padded_examples_are_those_of_each_alone(name: str) -> None:
    ids, mask = sentences([9, 6, 7])
    model = classifier() if name == "bert" else families.build(name, dtype=torch.float64)
    method = InformationFlow(model)
    together = method.graphs({"input_ids": ids, "attention_mask": mask}, threshold=0.03)
    for row, graph in enumerate(together):
        places = mask[row].nonzero().flatten().tolist()
        (alone,) = method.graphs(ids[row : row + 1, mask[row].bool()], threshold=0.03)
        assert graph.outputs[0].position == places[alone.outputs[0].position]
        moved = [
            (e.source._replace(position=places[e.source.position]), e.part, e.head, places[e.target.position])
            for e in alone.edges
        ]
        assert [(edge.source, edge.part, edge.head, edge.target.position) for edge in graph.edges] == moved
        for edge, other in zip(graph.edges, alone.edges, strict=True):
            assert (edge.part, edge.head) == (other.part, other.head)
            assert edge.importance == pytest.approx(other.importance)


@pytest.mark.few
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_graph_to_all_positions_has_those_to_each(name: str, side: str) -> None:
    ids, mask = sentences([9, 6, 7])
    if side == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    model = classifier() if name == "bert" else families.build(name, dtype=torch.float64)
    method = InformationFlow(model)
    whole = method.graphs(inputs, position="all", threshold=0.03)
    for row, graph in enumerate(whole):
        places = mask[row].nonzero().flatten().tolist()
        assert [node.position for node in graph.outputs] == places
        singles = []
        for place in places:
            count = [int(own.nonzero()[-1 if place == places[-1] else 0]) for own in mask]
            count[row] = place
            single, found = method.graphs(inputs, position=count, threshold=0.03)[row], graph.to(place)
            assert (found.outputs, found.threshold) == (single.outputs, single.threshold)
            assert set(found.nodes) == set(single.nodes)
            assert set(found.edges) == set(single.edges)
            assert len(found.edges) == len(single.edges)
            singles.append(found.inputs())
        for node, share in graph.inputs().items():
            assert share == pytest.approx(sum(single.get(node, 0) for single in singles) / len(places))
        both = graph.to(places[0], places[-1])
        assert [node.position for node in both.outputs] == [places[0], places[-1]]
        assert set(both.edges) == set(graph.to(places[0]).edges) | set(graph.to(places[-1]).edges)
        with pytest.raises(InvalidInputError, match="got position 99; the graph leads to the positions "):
            graph.to(99)


def test_a_graph_is_data() -> None:
    model = families.build("gpt2", dtype=torch.float64)
    (graph,) = InformationFlow(model).graphs(families.inputs("gpt2", batch=1), threshold=0.05)
    content = json.loads(json.dumps(asdict(graph)))
    assert content["nodes"] == [list(node) for node in graph.nodes]
    assert [edge[4] for edge in content["edges"]] == [edge.importance for edge in graph.edges]
    network = networkx.MultiDiGraph((edge.source, edge.target, edge._asdict()) for edge in graph.edges)
    assert set(network.nodes) == set(graph.nodes)
    assert network.number_of_edges() == len(graph.edges)


@pytest.mark.parametrize("most", [1, 40, 100, 10**6])
def test_nearness_by_head_is_the_same_in_chunks(most: int) -> None:
    torch.manual_seed(most)
    whole, values, projection = torch.randn(6, 8), torch.randn(3, 6, 2), torch.randn(3, 2, 8)
    weights = torch.rand(3, 6, 6).tril()
    parts = torch.einsum("hqk,hkd,hde->hqke", weights, values, projection)
    expected = near(whole[None, :, None].expand_as(parts), parts)
    torch.testing.assert_close(head_nearness(whole, weights, values, projection, most), expected, rtol=1e-5, atol=1e-5)
    assert not head_nearness(whole, weights, values, projection, most).triu(1).any()


def test_what_has_no_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2, ids = InformationFlow(families.build("gpt2")), families.inputs("gpt2")
    for threshold in (-0.1, 1, 4):
        with pytest.raises(InvalidInputError, match=f"got threshold={threshold}; expected a number from 0 to 1"):
            gpt2.graphs(ids, threshold=threshold)
    with pytest.raises(InvalidInputError, match="got position 40; the sequence has"):
        gpt2.graphs(ids, position=40)
    for position in (None, "mean"):
        with pytest.raises(InvalidInputError, match=f"got position={position!r}; a graph leads to one position"):
            InformationFlow(families.build("bert")).graphs(ids, position=position)
    with pytest.raises(UnsupportedScopeError, match="no feed-forward network was understood"):
        InformationFlow(families.build("xmod")).graphs(families.inputs("xmod"), position=1)
    own = Carry.constant
    monkeypatch.setattr(Carry, "constant", lambda *given: 1.001 * own(*given))
    with pytest.raises(IncompleteDecompositionError, match="do not add up"):
        gpt2.graphs(ids)
