"""What flows: a page's graph is the method's, and a rollout of a page's maps gives the method's scores."""

from typing import Any

import pytest
import torch
from torch import nn

from captum_norm import explain
from captum_norm.attr import InformationFlow
from captum_norm.loading import load
from captum_norm.methods import METHODS
from captum_norm.results.aggregation import add_half_identity, rollout
from captum_norm.show.pages import explanation_page, flow_graph

MAPPED = [name for name, method in METHODS.items() if method.maps]


@pytest.fixture(scope="module")
def model() -> tuple[nn.Module, Any]:
    return load()


@pytest.mark.parametrize("method", MAPPED)
def test_the_rollout_that_a_page_draws_is_that_of_the_scores(method: str, model: tuple[nn.Module, Any]) -> None:
    explanation = explain("So it goes.", *model, method=method, position=2)
    (example,) = explanation_page(explanation).examples
    drawn = [maps for maps in example.maps if maps.residual is not None]
    if not drawn:
        assert explanation.aggregation != "rollout" or method in ("attention-gradient", "rollout")
        return
    # The weights' own score is their mean.
    expected = explain("So it goes.", *model, method="rollout", position=2) if method == "weights" else explanation
    stack = torch.from_numpy(drawn[0].values).double()[None]
    if not drawn[0].residual:
        stack = add_half_identity(stack / stack.sum(-1, keepdim=True))
    torch.testing.assert_close(rollout(stack)[0, -1, 2], expected.scores[0].double(), rtol=1e-4, atol=1e-6)


def test_edges_and_nodes_are_those_of_the_graph(model: tuple[nn.Module, Any]) -> None:
    (graph,) = InformationFlow(model[0]).graphs(
        model[1]("So it goes.", return_tensors="pt"), position=1, threshold=0.05
    )
    shown = flow_graph(graph)
    assert [tuple(node) for node in graph.nodes] == list(shown.nodes)
    assert [(row, graph.nodes[index]) for row, index in shown.outputs] == [(1, graph.output)]
    assert len(graph.edges) == len(shown.edges) > 10
    for edge, (source, target, part, head, importance) in zip(graph.edges, shown.edges, strict=True):
        assert (graph.nodes[source], graph.nodes[target], part, head) == (
            edge.source,
            edge.target,
            edge.part,
            edge.head,
        )
        assert importance == pytest.approx(edge.importance, rel=1e-5)
