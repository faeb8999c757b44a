"""Circuits of a residual stream against models run by hand, in which every input of a component is separate."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.circuits import StreamGraph, best_edges, circuits, graph_of, support, to_mib
from captum_norm import ComponentAttribution, RelP
from captum_norm.errors import InvalidInputError
from captum_norm.results.components import ComponentScores, edge_ends
from tests.attr.edges_by_hand import FAMILIES, TARGET, ByHand, every_family, inputs
from tests.attr.frozen.test_relevance import near


def edges(method: ComponentAttribution, *given: Any, **options: Any) -> ComponentScores:
    found: ComponentScores = method.attribute(*given, components="edges", **options)
    return found


@every_family
def test_circuits_equal_runs_by_hand(name: str) -> None:
    model, ids, other = inputs(name)
    hand = ByHand(name, model)
    number, _ = hand.run(hand.start(ids), lambda _, stream, __: stream)
    empty, others = hand.run(hand.start(other), lambda _, stream, __: stream)
    method = ComponentAttribution(RelP(model))
    scores, graph = edges(method, ids, TARGET, counterfactual=other), graph_of(method, ids)
    assert graph == StreamGraph(len(hand.layers), 4, name == "gpt-neox", model.config.hidden_size)
    sources, targets = edge_ends(*graph.edges.shape)
    found = circuits(method, scores, ids, TARGET, counterfactual=other, shares=(0, 0.1, 0.3, 0.7, 1))
    tolerance = FAMILIES[name]
    near(found.whole, number.detach(), tolerance)
    near(found.empty, empty.detach(), tolerance)
    near(found.numbers[0], empty.detach(), tolerance)
    near(found.numbers[-1], number.detach(), tolerance)
    faithful = (found.numbers.mean(1) - empty.mean()) / (number.mean() - empty.mean())
    near(found.faithfulness, faithful.detach(), tolerance)
    for place in (1, 2, 3):
        kept = best_edges(scores, graph, found.counts[place])
        assert kept.sum() == found.counts[place] == int((0, 0.1, 0.3, 0.7, 1)[place] * graph.edges.sum())

        def read(target: str, stream: Tensor, written: dict[str, Tensor], kept: Tensor = kept) -> Any:
            v = targets.index(target)
            left_out = [u for u, source in enumerate(sources) if source in written and not kept[u, v]]
            left_out = [u for u in left_out if graph.edges[u, v]]
            return stream + sum(others[sources[u]] - written[sources[u]] for u in left_out)

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


def test_mib_json() -> None:
    gpt2 = StreamGraph(12, 12, False, 768).edges
    assert (len(gpt2) + 1, int(gpt2.sum())) == (158, 32491)  # those of its example for GPT-2
    model, ids, other = inputs("gpt2")
    method = ComponentAttribution(model)
    scores, graph = edges(method, ids, TARGET, counterfactual=other), graph_of(method, ids)
    made = to_mib(scores, graph, 20)
    assert made["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 32}
    assert list(made["nodes"]) == [*edge_ends(*graph.edges.shape)[0], "logits"]
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
    assert all(edge["in_graph"] for edge in to_mib(scores, graph)["edges"].values())
    # MIB scores edges by what patching adds to a loss, so those that support the output come first.
    sums = dict.fromkeys(made["edges"], 0.0)
    for row in scores.records():
        sums[row["name"]] -= row["score"] / 2
    assert sums == pytest.approx({name: edge["score"] for name, edge in made["edges"].items()})
    lowest = sorted(made["edges"], key=lambda name: -made["edges"][name]["score"])[:20]
    signed = to_mib(scores, graph, 20, absolute=False)["edges"]
    assert sorted(lowest) == sorted(name for name, edge in signed.items() if edge["in_graph"])
    parts = edges(ComponentAttribution(model), ids, TARGET)
    assert torch.equal(support(parts), parts.scores.mean(0))
    assert StreamGraph(1, 2, True, 8).edges.sum(0).tolist() == [1, 1, 1, 1, 1, 1, 1, 4]


def test_requests_that_do_not_fit_are_refused() -> None:
    model, ids, _ = inputs("gpt2")
    method = ComponentAttribution(model)
    scores = edges(method, ids, TARGET)
    with pytest.raises(InvalidInputError, match="the number of edges"):
        best_edges(scores, graph_of(method, ids), 1000)
    other, tokens, _ = inputs("gpt-neox")
    with pytest.raises(InvalidInputError, match="pass scores of its own edges"):
        circuits(ComponentAttribution(other), scores, tokens, TARGET, counterfactual=tokens)
