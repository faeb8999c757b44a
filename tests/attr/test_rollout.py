"""Attention rollout of encoder–decoder models against the paths through their attention, written out."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from captum_norm import AttentionRollout, AttentionWeights, InvalidInputError
from tests import encoder_decoders, oracle
from tests.attr.test_alti import chain


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
        maps: Any = AttentionRollout(model, differentiable=differentiable).maps(inputs)
        for stack, of_stack in expected.items():
            torch.testing.assert_close(getattr(maps, stack).detach(), of_stack, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(maps.cross.sum(-1) + maps.decoder.sum(-1), torch.ones(2, 2, 6).double())
    method = AttentionRollout(model)
    for found, stack in zip(method.attribute(inputs), ("cross", "decoder"), strict=True):
        torch.testing.assert_close(found, expected[stack][:, -1, -1], rtol=1e-6, atol=1e-9)
    for found, stack in zip(method.attribute(inputs, position=[1, 3], layer=0), ("cross", "decoder"), strict=True):
        torch.testing.assert_close(found, expected[stack][[0, 1], 0, [1, 3]], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stacks", [["encoder"], ["decoder"], ["cross"], ["encoder", "cross"], ["decoder", "cross"]])
@pytest.mark.parametrize("layers", [None, [1], [-1, 0]])
def test_chosen_stacks_and_layers_are_those_of_all(stacks: Any, layers: Any) -> None:
    model, inputs = bart(0), encoder_decoders.inputs("bart")
    method = AttentionRollout(model)
    every, chosen = method.maps(inputs), method.maps(inputs, layers=layers, stacks=stacks)
    plain = AttentionWeights(model).maps(inputs, layers=layers, stacks=stacks)
    for stack in ("encoder", "decoder", "cross"):
        found, whole = getattr(chosen, stack), getattr(every, stack)
        if stack not in stacks:
            assert found is None
            continue
        assert torch.equal(found, whole if layers is None else whole[:, layers])
    assert torch.equal(chosen.real, plain.real)


def test_unknown_stacks_and_layers_are_refused() -> None:
    method, inputs = AttentionRollout(bart(0)), encoder_decoders.inputs("bart")
    with pytest.raises(InvalidInputError, match="got layer 2; the model has 2"):
        method.maps(inputs, layers=[2])
    assert method.maps(inputs, layers=[2], stacks=["encoder"]).self_attention.shape[1] == 1
    with pytest.raises(InvalidInputError, match="got stacks 'cross'; expected a sequence of names"):
        method.maps(inputs, stacks="cross")
