"""Norms of what nearly cancels, against sums in float64 of the same weights, values and matrices."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import ALTI, AttentionBlockAttribution, GlobEnc, NormAttribution
from captum_norm.errors import IncompleteDecompositionError
from captum_norm.models import Scope
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.families import EVERY, GROUPED, HEADS
from tests.families.family import new

SCOPES: dict[str, tuple[Scope, ...]] = {
    "bert": ("attn", "attn_res", "attn_res_ln"),
    "gpt2": ("attn", "attn_res", "atb"),
    "llama": ("attn", "atb"),
    "olmo2": ("attn", "atb"),
}
CROSS = ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj")
PAIRED = ("self.query", "self.key", "self.value", "q_norm")
OUTPUTS = ("attention.output.dense.weight", "o_proj.weight", "attn.c_proj.weight", "encoder_attn.out_proj.weight")
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
    return cancel(model, name, size, seed)


def cancel(model: Any, name: str, size: float, seed: int) -> Any:
    """Make a model's heads cancel in pairs up to ``size``."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in (CROSS if name == "marian" else (*PAIRED, "q_proj"))):
                paired(parameter, 0)
            elif "c_attn" in key:
                paired(parameter, parameter.dim() - 1)
            elif any(part in key for part in OUTPUTS):
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


def expect_norms(found: Any, scope: str, vectors: Iterable[Tensor], tolerance: float = 1e-5) -> None:
    """Norms and mixing ratios are those of the vectors of each layer, (B, Q, K, D)."""
    carried = torch.stack(list(vectors), 1)
    assert error(found.norms[scope], carried.norm(dim=-1)) < tolerance
    ratios = torch.stack([oracle.mixing_ratio(parts) for parts in carried.unbind(1)], 1)
    assert (found.mixing_ratio[scope] - ratios).abs().max() < 1e-5


def behind(name: str, model: Any, layers: list[oracle.Layer]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Vectors at the scopes behind the attention block of these layers."""
    family, ends = EVERY[name], [layer.vectors("atb") for layer in layers]
    streams = [parts.sum(2) + constant for parts, constant in ends]
    found = feed_forwards.read_layers(family, feed_forwards.PARTS[name], model, streams)
    return [layer.scopes(*end) for layer, end in zip(found, ends, strict=True)]


def with_weights(layers: list[oracle.Layer], found: Any) -> list[oracle.Layer]:
    """The layers with the weights that norms are made of: another kernel's rounding does not cancel."""
    for layer, made in zip(layers, found.weights.unbind(1), strict=True):
        layer.weights = made.double()
    return layers


def measured(name: str, model: Any, inputs: Any, scopes: Sequence[str], **asked: Any) -> tuple[Any, list[oracle.Layer]]:
    """What a meter finds, and the same layers in float64."""
    found = families.measured(model, inputs, scopes=scopes, weights=True, per_head=True, **asked)
    return found, with_weights(oracle.layers(EVERY[name], model, inputs), found)


def inputs_of(name: str, seed: int) -> Tensor:
    return families.inputs(name, seed, batch=2, length=9)


EACH = list(product(range(3), SIZES))
"""Seeds and sizes."""


@pytest.mark.few
@pytest.mark.parametrize("name", SCOPES)
def test_norms_of_heads_that_cancel(name: str) -> None:
    scopes, beyond = SCOPES[name], feed_forwards.SCOPES[EVERY[name].style]
    for seed, size in EACH:
        model, inputs = cancelling(name, size, seed), inputs_of(name, seed)
        found, exact = measured(name, model, inputs, (*scopes, *beyond), head_norms=True)
        heads = [oracle.vectors_per_head(layer.weights, layer.values, layer.projection).norm(dim=-1) for layer in exact]
        assert error(found.head_norms, torch.stack(heads, 1)) < 1e-5
        for scope in scopes:
            expect_norms(found, scope, [layer.vectors(scope)[0] for layer in exact])
        further = behind(name, model, exact)
        for scope in beyond:
            expect_norms(found, scope, [layer[scope][0] for layer in further], 1e-4)
        alone = families.measured(model, inputs, scopes=scopes, maps=False)
        for scope in scopes:
            torch.testing.assert_close(alone.mixing_ratio[scope], found.mixing_ratio[scope], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_norms_of_vectors_that_are_all_but_their_mean(name: str) -> None:
    """A LayerNorm subtracts nearly all of what attention adds, whose channels are nearly equal."""
    for seed, size in EACH:
        model, inputs = families.build(name, seed), inputs_of(name, seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith(("attention.output.dense.weight", "attn.c_proj.weight")):
                    matrix = parameter if name == "bert" else parameter.T  # (D, H·d)
                    matrix.copy_(matrix.mean(0) + size * matrix.std() * torch.randn_like(matrix))
        found, exact = measured(name, model, inputs, ["attn_res_ln"] if name == "bert" else ["atb_ln", "atb_ff"])
        further = behind(name, model, exact)
        for scope, norms in found.norms.items():
            vectors = [
                ends[scope][0] if scope in ends else layer.vectors(scope)[0]
                for layer, ends in zip(exact, further, strict=True)
            ]
            assert error(norms, torch.stack(vectors, 1).norm(dim=-1)) < (1e-5 if name == "bert" else 1e-4)


@pytest.mark.few
@pytest.mark.parametrize("name", SCOPES)
def test_norms_of_segments(name: str) -> None:
    numbers = torch.tensor([[0, 1, 1, 2, 2, 2, 3, -1, 3], [3, 2, 2, 1, 1, -1, 0, 0, 3]])
    inside = (numbers.unsqueeze(-1) == torch.arange(4)).double()  # (B, K, G)
    for seed, size in EACH:
        model, inputs = cancelling(name, size, seed), inputs_of(name, seed)
        _, exact = measured(name, model, inputs, ["attn"])
        for scope in SCOPES[name]:
            kind: Any = AttentionBlockAttribution if scope == "atb" else NormAttribution
            method = kind(model, scope)
            vectors = torch.stack([layer.vectors(scope)[0] for layer in exact], 1)
            summed = vectors.sum(2, keepdim=True)
            for whole, together in ((vectors, False), (summed, True)):
                maps = method.maps(inputs, segments=numbers, together=together).self_attention
                assert error(maps, torch.einsum("blqke,bkg->blqge", whole, inside).norm(dim=-1)) < 1e-4
            assert error(method.maps(inputs, together=True).self_attention, summed.norm(dim=-1)) < 1e-4


@pytest.mark.long
def test_norms_of_cross_attention() -> None:
    scopes: Any = ("attn", "attn_res_ln", *feed_forwards.SCOPES["post-norm"])
    for seed, size in EACH:
        model = cancel(encoder_decoders.build("marian", seed), "marian", size, seed)
        inputs = encoder_decoders.inputs("marian", seed)
        found = families.measured(model, inputs, scopes=scopes, weights=True, per_head=True, stacks=["cross"])
        layers = with_weights(encoder_decoders.oracle("marian", model, inputs)["cross"], found)
        exact: list[dict[str, Tensor]] = []
        for layer, beyond in zip(layers, feed_forwards.cross_vectors("marian", model, layers), strict=True):
            (parts, _), (normed, _) = layer.across(norm=False), layer.across()
            exact.append({"attn": parts, "attn_res_ln": normed} | {key: ends[0] for key, ends in beyond.items()})
        for scope in scopes:
            vectors = torch.stack([layer[scope][:, :, :-1] for layer in exact], 1)
            assert error(found.norms[scope], vectors.norm(dim=-1)) < 1e-4


@pytest.mark.parametrize("size", SIZES)
def test_other_methods_on_heads_that_cancel(size: float) -> None:
    """GlobEnc's norms are as accurate; nearness to the block's output, in shares of 1, needs no more than rounding."""
    model, inputs = cancelling("bert", size), inputs_of("bert", 0)
    _, layers = measured("bert", model, inputs, ["attn"])
    maps = GlobEnc(model).maps(inputs).self_attention
    nearness = ALTI(model).maps(inputs).self_attention
    for index, (layer, exact) in enumerate(zip(layers, behind("bert", model, layers), strict=True)):
        vectors, constant = layer.vectors("attn_res_ln")
        (network,) = feed_forwards.read_layers(
            EVERY["bert"], replace(feed_forwards.PARTS["bert"], layer=f"encoder.layer.{index}"), model, [layer.residual]
        )
        total, unowned = exact["atb_ff_res"]
        final: Any = network.final_norm
        _, sigma = final.statistics(total.sum(2) + unowned)
        ends = final.part(vectors, sigma[:, :, None].expand(vectors.shape[:-1])).norm(dim=-1)
        assert error(maps[:, index], ends) < 1e-5
        whole = (vectors.sum(2) + constant).unsqueeze(2)
        near = (whole.abs().sum(-1) - (whole - vectors).abs().sum(-1)).clamp(min=0)
        assert (nearness[:, index] - near / near.sum(-1, keepdim=True)).abs().max() < 2e-6


@pytest.mark.few
@pytest.mark.parametrize("size", SIZES)
def test_a_head_whose_channels_cancel(size: float) -> None:
    for seed in range(3):
        model, inputs = families.build("bert", seed), inputs_of("bert", seed)
        with torch.no_grad():
            for layer in model.encoder.layer:
                for parameter in layer.attention.self.value.parameters():
                    halves = parameter.unflatten(0, (HEADS, 2, -1))
                    halves[:, 1] = halves[:, 0]
                rows = layer.attention.output.dense.weight.T.unflatten(0, (HEADS, 2, -1))
                rows[:, 1] = -rows[:, 0] + size * rows.std() * torch.randn_like(rows[:, 0])
        found, layers = measured("bert", model, inputs, ["attn", "atb_ff"], head_norms=True)
        vectors = [oracle.vectors_per_head(layer.weights, layer.values, layer.projection) for layer in layers]
        assert error(found.head_norms, torch.stack(vectors, 1).norm(dim=-1)) < 1e-5
        expect_norms(found, "attn", [parts.sum(1) for parts in vectors])
        expect_norms(found, "atb_ff", [ends["atb_ff"][0] for ends in behind("bert", model, layers)], 1e-4)


def test_a_model_whose_whole_output_is_rounding_is_refused() -> None:
    """Without a bias, heads that all cancel leave an output with few digits, which no sum equals."""
    model = families.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            paired(layer.self_attn.q_proj.weight, 0)
            heads = layer.self_attn.o_proj.weight.T.unflatten(0, (-1, 2, 8))
            heads[:, 1] = -heads[:, 0] + 1e-5 * torch.randn_like(heads[:, 0])
    with pytest.raises(IncompleteDecompositionError, match="do not add up"):
        NormAttribution(model).maps(families.inputs("llama"))
