"""Rows, positions and aggregation of ``attribute``, each by its definition; rollouts through encoder and decoder."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import captum_norm as cn
from captum_norm.results.aggregation import AGGREGATIONS
from tests import encoder_decoders, families, oracle
from tests.attr.test_alti import chain
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

    def at(position: Any) -> Any:
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


def residual(weights: tuple[Tensor, ...]) -> Tensor:
    """(A + I)/2 of each layer, A the mean of the heads: (L, B, Q, K)."""
    mean = torch.stack(weights).mean(2)
    return (mean + torch.eye(mean.shape[-1]).double()) / 2


def expected_maps(model: Any, inputs: Any) -> dict[str, Tensor]:
    """(B, L, Q, K) of each stack, from the weights that the model returns."""
    with oracle.eager(model):
        output = model(**inputs, output_attentions=True)
    encoder, decoder = residual(output.encoder_attentions), residual(output.decoder_attentions)
    cross = torch.stack(output.cross_attentions).mean(2) / 2
    rolled: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
    for example in range(encoder.shape[1]):
        products = [encoder[0, example]]
        for layer in encoder[1:, example]:
            products.append(layer @ products[-1])
        rolled["encoder"].append(torch.stack(products))
        pairs = [
            chain(list(encoder[:, example]), list(decoder[:last, example]), list(cross[:last, example]))
            for last in range(1, len(decoder) + 1)
        ]
        rolled["cross"].append(torch.stack([source for source, _ in pairs]))
        rolled["decoder"].append(torch.stack([prefix for _, prefix in pairs]))
    return {stack: torch.stack(maps) for stack, maps in rolled.items()}


def bart(seed: int) -> Any:
    """With more layers in the encoder than in the decoder."""
    torch.manual_seed(seed)
    model = hf.BartModel(hf.BartConfig(**encoder_decoders.BART | {"encoder_layers": 3})).double().train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_shares_of_both_sequences_in_every_layer(seed: int, name: str) -> None:
    model = bart(seed) if name == "bart" else encoder_decoders.build(name, seed, torch.float64)
    inputs = encoder_decoders.inputs(name, seed)
    expected = expected_maps(model, inputs)
    for differentiable in (False, True):
        maps: Any = cn.AttentionRollout(model, differentiable=differentiable).maps(inputs)
        for stack, of_stack in expected.items():
            torch.testing.assert_close(getattr(maps, stack).detach(), of_stack, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(maps.cross.sum(-1) + maps.decoder.sum(-1), torch.ones(2, 2, 6).double())
    method = cn.AttentionRollout(model)
    for found, stack in zip(method.attribute(inputs), ("cross", "decoder"), strict=True):
        torch.testing.assert_close(found, expected[stack][:, -1, -1], rtol=1e-6, atol=1e-9)
    for found, stack in zip(method.attribute(inputs, position=[1, 3], layer=0), ("cross", "decoder"), strict=True):
        torch.testing.assert_close(found, expected[stack][[0, 1], 0, [1, 3]], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stacks", [["encoder"], ["decoder"], ["cross"], ["encoder", "cross"], ["decoder", "cross"]])
@pytest.mark.parametrize("layers", [None, [1], [-1, 0]])
def test_chosen_stacks_and_layers_are_those_of_all(stacks: Any, layers: Any) -> None:
    model, inputs = bart(0), encoder_decoders.inputs("bart")
    method = cn.AttentionRollout(model)
    every, chosen = method.maps(inputs), method.maps(inputs, layers=layers, stacks=stacks)
    plain = cn.AttentionWeights(model).maps(inputs, layers=layers, stacks=stacks)
    for stack in ("encoder", "decoder", "cross"):
        found, whole = getattr(chosen, stack), getattr(every, stack)
        if stack not in stacks:
            assert found is None
            continue
        assert torch.equal(found, whole if layers is None else whole[:, layers])
    assert torch.equal(chosen.real, plain.real)


def test_unknown_stacks_and_layers_are_refused() -> None:
    method, inputs = cn.AttentionRollout(bart(0)), encoder_decoders.inputs("bart")
    with pytest.raises(cn.InvalidInputError, match="got layer 2; the model has 2"):
        method.maps(inputs, layers=[2])
    assert method.maps(inputs, layers=[2], stacks=["encoder"]).self_attention.shape[1] == 1
    with pytest.raises(cn.InvalidInputError, match="got stacks 'cross'; expected a sequence of names"):
        method.maps(inputs, stacks="cross")
