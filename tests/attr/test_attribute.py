"""Rows, positions and aggregation of ``attribute``, each against what it is defined to be."""

from typing import Any

import pytest
import torch
from torch import Tensor

import captum_norm as cn
from captum_norm.results.aggregation import AGGREGATIONS
from tests import families
from tests.families import SPECIAL, TEXT
from tests.families.decoders import GPT2
from tests.families.family import new


def rollout(stack: Tensor) -> Tensor:
    """(L, Q, K) -> (Q, K), written out."""
    total = torch.eye(stack.shape[-1], dtype=stack.dtype)
    for layer in stack:
        total = (layer / layer.sum(-1, keepdim=True)) @ total
    return total


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
def test_aggregations_are_what_they_say(name: str) -> None:
    model, ids = families.build(name, dtype=torch.float64), families.inputs(name)

    def stacks(method: Any) -> Tensor:
        stack: Tensor = method.maps(ids).self_attention
        return stack

    identity = torch.eye(ids.shape[1], dtype=torch.float64)
    norms, weights, block = (
        stacks(method(model)) for method in (cn.NormAttribution, cn.AttentionWeights, cn.AttentionBlockAttribution)
    )
    shares = norms / norms.sum(-1, keepdim=True)
    rolled = torch.stack([rollout((s + identity) / 2) for s in shares])
    expected = [
        (cn.NormAttribution(model, aggregation="rollout"), rolled),
        (cn.NormAttribution(model), rolled if name == "bert" else norms.mean(1)),  # the others are causal
        (cn.NormAttribution(model, aggregation="mean"), norms.mean(1)),
        (cn.AttentionBlockAttribution(model, aggregation="rollout"), torch.stack([rollout(s) for s in block])),
        (cn.AttentionWeights(model), weights.mean(1)),
        (cn.AttentionWeights(model, aggregation="rollout"), torch.stack([rollout(s) for s in weights])),
        (cn.AttentionWeights(model, aggregation="product"), torch.stack([rollout(s) for s in weights])),
        (cn.AttentionWeights(model, "attn_res", "mean"), (weights.mean(1) + identity) / 2),
        (cn.AttentionRollout(model), torch.stack([rollout((s + identity) / 2) for s in weights])),
    ]
    for method, whole in expected:
        for position in range(ids.shape[1]):
            torch.testing.assert_close(method.attribute(ids, position=position), whole[:, position])
        torch.testing.assert_close(method.attribute(ids, position="mean"), whole.mean(1))


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_product_of_many_layers_neither_overflows_nor_vanishes(scale: float) -> None:
    torch.manual_seed(0)
    maps, rows = torch.rand(2, 48, 5, 5) * torch.rand(2, 48, 5, 1), torch.rand(2, 1, 5)
    expected = rows.double()
    for layer in reversed(maps.double().unbind(1)):
        expected = expected @ layer
    found = AGGREGATIONS["product"](scale * maps, rows)
    torch.testing.assert_close(found, (expected / expected.sum(-1, keepdim=True)).float())


def test_maps_of_a_rollout_are_the_products_so_far() -> None:
    model, ids = families.build("bert", dtype=torch.float64), families.inputs("bert")
    residual = cn.AttentionWeights(model, "attn_res").maps(ids).self_attention
    maps = cn.AttentionRollout(model).maps(ids)
    torch.testing.assert_close(maps.self_attention[:, 0], residual[:, 0])
    torch.testing.assert_close(maps.self_attention[:, 1], torch.stack([rollout(s) for s in residual]))
    assert maps.mixing_ratio is None
    torch.testing.assert_close(cn.AttentionRollout(model).attribute(ids, position=4), maps.self_attention[:, -1, 4])


def test_positions_with_padding_on_both_sides() -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2")
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 7:] = 0, 0
    method = cn.NormAttribution(model, aggregation="mean")

    def at(position: Any) -> Tensor:
        return method.attribute(ids, additional_forward_args=mask, position=position)

    torch.testing.assert_close(at("first"), at([4, 0, 0]))
    torch.testing.assert_close(at("last"), at([10, 6, -1]))
    torch.testing.assert_close(at(None), at("last"))
    torch.testing.assert_close(at(torch.tensor([5, 5, 5])), at(5))
    mean = torch.stack([at([place, place % 7, place])[0] for place in range(4, 11)]).mean(0)
    torch.testing.assert_close(at("mean")[0], mean)


HEADS: dict[str, tuple[Any, Any]] = {
    "classifier": (new("BertForSequenceClassification", **TEXT), "first"),
    "masked words": (new("BertForMaskedLM", **TEXT), "mean"),
    "causal classifier": (new("GPT2ForSequenceClassification", **GPT2, pad_token_id=0), "last"),
    "classifier of the mean": (
        new("ModernBertForSequenceClassification", **TEXT, **SPECIAL, classifier_pooling="mean"),
        "mean",
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_position_that_the_head_reads_is_the_default(head: str) -> None:
    build, position = HEADS[head]
    method, ids = cn.AttentionWeights(build()), families.inputs("bert", batch=1)
    assert torch.equal(method.attribute(ids), method.attribute(ids, position=position))


def test_what_only_heads_of_images_read_is_no_position_to_ask_for() -> None:
    position: Any = "patches"
    with pytest.raises(cn.InvalidInputError, match='got the position "patches"; expected an index, "first", "last" or'):
        cn.AttentionWeights(families.build("bert")).attribute(families.inputs("bert"), position=position)


def test_one_token_is_explained_by_itself() -> None:
    for name in ("bert", "gpt2"):
        maps: Any = cn.NormAttribution(families.build(name)).maps(families.inputs(name, length=1))
        assert (maps.decoder is not None) == (name == "gpt2")
        assert maps.mixing_ratio.abs().max() < 1e-5


@pytest.mark.parametrize(
    "kind", [cn.NormAttribution, cn.AttentionBlockAttribution, cn.AttentionWeights, cn.AttentionRollout]
)
def test_scores_of_maps_are_what_attribute_returns(kind: Any) -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    method = kind(model)
    every, last = method.maps(ids), method.maps(ids, layers=[-1])
    for position in (None, 0, "last", [1, 2, 3]):
        assert torch.equal(method.scores(every, position), method.attribute(ids, position=position))
        scores = method.scores(last, position, aggregate=False)
        assert torch.equal(scores, method.attribute(ids, position=position, layer=-1))
    with pytest.raises(cn.InvalidInputError, match="got the maps of 2 layers and aggregate=False; expected one layer"):
        method.scores(every, 0, aggregate=False)
