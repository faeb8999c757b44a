"""Norms of what nearly cancels, against sums in float64 of the same weights, values and matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import IncompleteDecompositionError, NormMeter
from captum_norm.models import Scope
from tests import families, oracle
from tests.families import EVERY, GROUPED, HEADS
from tests.families.family import new

SCOPES: dict[str, tuple[Scope, ...]] = {
    "bert": ("attn", "attn_res", "attn_res_ln"),
    "gpt2": ("attn", "attn_res", "atb"),
    "llama": ("attn", "atb"),
    "olmo2": ("attn", "atb"),
}
PAIRED = ("self.query", "self.key", "self.value", "q_proj", "q_norm")
SIZES = (1e-2, 1e-3, 1e-4, 1e-5)


def paired(weight: Tensor, axis: int) -> None:
    """Give each second of four heads, and of as many again, the numbers of the head before it."""
    heads = weight.unflatten(axis, (-1, 2, weight.shape[axis] // HEADS // max(1, weight.shape[axis] // 32)))
    heads.select(axis + 1, 1).copy_(heads.select(axis + 1, 0))


def cancelling(name: str, size: float, seed: int = 0) -> Any:
    """A model whose heads cancel in pairs up to ``size``."""
    # Attention's bias leaves an output in which the model's own rounding does not show.
    biased = GROUPED | {"attention_bias": True}
    makers = {"llama": new("LlamaForCausalLM", **biased), "olmo2": new("Olmo2ForCausalLM", **biased)}
    model = families.randomized(makers.get(name, EVERY[name].build), seed, torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in PAIRED):
                paired(parameter, 0)
            elif "c_attn" in key:
                paired(parameter, parameter.dim() - 1)
            elif any(part in key for part in ("attention.output.dense.weight", "o_proj.weight", "attn.c_proj.weight")):
                rows = parameter if name == "gpt2" else parameter.T
                heads = rows.unflatten(0, (-1, 2, rows.shape[0] // HEADS))
                noise = torch.randn(heads[:, 1].shape, generator=random) * heads.std()
                heads[:, 1] = -heads[:, 0] + size * noise
    return model


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of an entry, relative to itself."""
    zero = expected == 0
    assert (actual[zero] == 0).all()
    return float(((actual.double() - expected).abs() / expected)[~zero].max())


def exact_layers(name: str, model: Any, inputs: Tensor, weights: Tensor) -> list[oracle.Layer]:
    """The layers in float64, with the weights that norms are made of: another kernel's rounding does not cancel."""
    layers = oracle.layers(EVERY[name], model, inputs)
    for layer, made in zip(layers, weights.unbind(1), strict=True):
        layer.weights = made.double()
    return layers


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SCOPES)
def test_norms_of_heads_that_cancel(name: str, seed: int) -> None:
    for size in SIZES:
        model, inputs = cancelling(name, size, seed), families.inputs(name, seed, batch=2, length=9)
        meter = NormMeter(model)
        (found,) = meter.measure(inputs, scopes=SCOPES[name], weights=True, per_head=True, head_norms=True).values()
        assert found.weights is not None
        exact = exact_layers(name, model, inputs, found.weights)
        for scope in SCOPES[name]:
            carried = torch.stack([layer.vectors(scope)[0] for layer in exact], 1)
            assert error(found.norms[scope], carried.norm(dim=-1)) < 1e-5
            ratios = torch.stack([oracle.mixing_ratio(parts) for parts in carried.unbind(1)], 1)
            assert (found.mixing_ratio[scope] - ratios).abs().max() < 1e-5
        (alone,) = meter.measure(inputs, scopes=SCOPES[name], maps=False).values()
        for scope in SCOPES[name]:
            torch.testing.assert_close(alone.mixing_ratio[scope], found.mixing_ratio[scope], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", SIZES)
def test_norms_of_vectors_that_are_all_but_their_mean(size: float) -> None:
    """LayerNorm subtracts nearly all of what attention adds, whose channels are nearly equal."""
    for seed in range(3):
        model, inputs = families.build("bert", seed), families.inputs("bert", seed, batch=2, length=9)
        with torch.no_grad():
            for layer in model.encoder.layer:
                matrix = layer.attention.output.dense.weight  # (D, H·d)
                matrix.copy_(matrix.mean(0) + size * matrix.std() * torch.randn_like(matrix))
        (found,) = NormMeter(model).measure(inputs, scopes=["attn_res_ln"], weights=True, per_head=True).values()
        assert found.weights is not None
        exact = exact_layers("bert", model, inputs, found.weights)
        carried = torch.stack([layer.vectors("attn_res_ln")[0].norm(dim=-1) for layer in exact], 1)
        assert error(found.norms["attn_res_ln"], carried) < 1e-5


def test_a_model_whose_whole_output_is_rounding_is_refused() -> None:
    """Without a bias, heads that all cancel leave an output with few digits, which no sum equals."""
    model = families.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            paired(layer.self_attn.q_proj.weight, 0)
            heads = layer.self_attn.o_proj.weight.T.unflatten(0, (-1, 2, 8))
            heads[:, 1] = -heads[:, 0] + 1e-5 * torch.randn_like(heads[:, 0])
    with pytest.raises(IncompleteDecompositionError, match="do not add up"):
        NormMeter(model).measure(families.inputs("llama"), scopes=["attn"])
