"""ALTI, ALTI+ and N-Enc against the direct way: every vector formed, every sum written out."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import captum_norm as cn
from captum_norm import ALTI, GlobEnc, InvalidInputError, NormAttribution, UnsupportedModelError
from captum_norm.errors import IncompleteDecompositionError
from captum_norm.functional import Carry, inverse_scale
from captum_norm.loading import load
from captum_norm.models.outputs import Position
from tests import encoder_decoders, families, oracle


def shares(vectors: Tensor, constant: Tensor) -> Tensor:
    """Of vectors (B, Q, K, D) that add up with a constant (B, Q, D): (B, Q, K)."""
    whole = vectors.sum(2) + constant
    near = (whole.abs().sum(-1)[:, :, None] - (whole[:, :, None] - vectors).abs().sum(-1)).clamp(min=0)
    return (near / near.sum(-1, keepdim=True)).nan_to_num(0)  # a row where no vector is near


@pytest.mark.parametrize("name", families.tiers(kind=families.arrangement_of))
def test_maps_equal_the_oracle(name: str) -> None:
    tolerance = 1e-6 if families.FAMILIES[name].single else 1e-11
    model, inputs = families.build(name, 1, torch.float64), families.inputs(name, 1, dtype=torch.float64)
    layers = oracle.layers(families.FAMILIES[name], model, inputs)
    expected = torch.stack([shares(*layer.vectors("atb")) for layer in layers], 1)
    for memory_budget in (None, 5600):
        maps: Any = ALTI(model, memory_budget=memory_budget).maps(inputs)
        assert (maps.self_attention - expected).abs().max() < tolerance
        assert maps.convergence_delta.max() < tolerance
    rolled = expected[:, 1] @ expected[:, 0]
    assert (ALTI(model, "rollout").attribute(inputs, position=3) - rolled[:, 3]).abs().max() < tolerance
    single = ALTI(model.float()).maps(inputs.float() if inputs.is_floating_point() else inputs)
    assert (single.self_attention - expected).abs().max() < 1e-4  # of differences of sums over D numbers


def cross_shares(layer: oracle.Layer) -> Tensor:
    """(B, T, S)."""
    return shares(*layer.across())[..., :-1]


def chain(encoder: list[Tensor], decoder: list[Tensor], cross: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One example: each layer's output in shares of the encoder's inputs and the decoder's, (T, S) and (T, T)."""
    source_positions = torch.eye(len(encoder[0])).double()
    for layer in encoder:
        source_positions = layer @ source_positions
    targets = len(decoder[0])
    state = torch.cat([torch.zeros(targets, len(source_positions)), torch.eye(targets)], 1).double()
    for self_map, cross_map in zip(decoder, cross, strict=True):
        mixed = self_map @ state
        read = torch.cat([cross_map @ source_positions, torch.zeros(targets, targets)], 1)
        state = read + (1 - cross_map.sum(1))[:, None] * mixed
    return state[:, : len(source_positions)], state[:, len(source_positions) :]


@pytest.mark.few
@pytest.mark.parametrize(("seed", "name"), list(enumerate(encoder_decoders.ENCODER_DECODERS)))
def test_source_and_prefix_equal_the_oracle(seed: int, name: str) -> None:
    family = encoder_decoders.ENCODER_DECODERS[name]
    dtype = torch.float32 if family.narrow else torch.float64
    tolerance = 1e-4 if family.narrow else 1e-6 if family.single else 1e-11
    model, inputs = encoder_decoders.build(name, seed, dtype), encoder_decoders.inputs(name, seed, dtype=dtype)
    layers = encoder_decoders.oracle(name, model, inputs)
    exact = {
        "encoder": [shares(*layer.vectors("atb")) for layer in layers["encoder"]],
        "decoder": [shares(*layer.vectors("atb")) for layer in layers["decoder"]],
        "cross": [cross_shares(layer) for layer in layers["cross"]],
    }
    method = ALTI(model)
    maps: Any = method.maps(inputs)
    for stack, expected in exact.items():
        assert (getattr(maps, stack) - torch.stack(expected, 1)).abs().max() < tolerance
    found = method.chain(maps)
    for example in range(2):
        source, prefix = chain(*([layer[example] for layer in exact[stack]] for stack in exact))
        assert (found.source[example] - source).abs().max() < tolerance
        assert (found.prefix[example] - prefix).abs().max() < tolerance
    torch.testing.assert_close(found.source.sum(-1) + found.prefix.sum(-1), torch.ones(2, 6, dtype=dtype))
    last, delta = method.attribute(inputs, return_convergence_delta=True)
    assert torch.equal(delta, method.compute_convergence_delta(last, inputs))
    places = [0, 1], [2, 4]
    for one, whole in zip(last, found, strict=True):
        torch.testing.assert_close(one, whole[:, -1])
    for one, whole in zip(method.attribute(inputs, position=[2, 4]), found, strict=True):
        torch.testing.assert_close(one, whole[places])
    for one, stack in zip(method.attribute(inputs, layer=0, position=1), (maps.cross, maps.decoder), strict=True):
        torch.testing.assert_close(one, stack[:, 0, 1])
    averaged = ALTI(model, "mean").attribute(inputs, position=1)
    for one, stack in zip(averaged, (maps.cross, maps.decoder), strict=True):
        torch.testing.assert_close(one, stack.mean(1)[:, 1])


@pytest.mark.parametrize("method", [ALTI, cn.NormAttribution])
def test_a_call_for_one_stack_does_not_decide_how_later_ones_combine_layers(method: Any) -> None:
    model, inputs = encoder_decoders.build("bart"), encoder_decoders.inputs("bart")
    used, fresh = method(model), method(model)
    used.scores(used.maps(inputs, stacks=["decoder"]))
    for one, other in zip(used.attribute(inputs, position=2), fresh.attribute(inputs, position=2), strict=True):
        assert torch.equal(one, other)


def test_maps_of_single_heads_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no maps of single heads"):
        ALTI(families.build("bert")).maps(families.inputs("bert"), per_head=True)


def test_vectors_that_do_not_add_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method, ids = ALTI(families.build("bert")), families.inputs("bert")
    method.maps(ids)
    monkeypatch.setattr(Carry, "constant", lambda _, part, *__: 1.001 * part)
    with pytest.raises(IncompleteDecompositionError, match="layer 0 do not add up"):
        method.maps(ids)


# Where a reader of the code finds each layer's second norm.
SECOND = {
    "bert": "encoder.layer.{}.output.LayerNorm",
    "roberta": "encoder.layer.{}.output.LayerNorm",
    "electra": "encoder.layer.{}.output.LayerNorm",
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm",
    "distilbert": "transformer.layer.{}.output_layer_norm",
    "opt-350m": "model.decoder.layers.{}.final_layer_norm",
}
every_family = pytest.mark.parametrize("name", SECOND)


def rows(maps: Tensor) -> Tensor:
    """Each divided by its sum."""
    return maps / maps.sum(-1, keepdim=True)


def direct(name: str, model: Any, ids: Tensor) -> Tensor:
    """(B, L, Q, K)."""
    family, maps = families.FAMILIES[name], []
    names = dict.fromkeys(SECOND[name].format(layer) for layer in range(model.config.num_hidden_layers))
    with oracle.watched(model, {norm: (norm, "input") for norm in names}) as seen:
        layers = oracle.layers(family, model, ids)
    received = [whole.double() for notes in seen.values() for whole in notes]
    for index, (layer, whole) in enumerate(zip(layers, received, strict=True)):
        second: Any = family.norm(model, SECOND[name].format(index))
        vectors, _ = layer.vectors("attn_res_ln")
        _, sigma = second.statistics(whole)
        vectors = second.part(vectors, sigma[:, :, None].expand(vectors.shape[:-1]))
        maps.append(vectors.norm(dim=-1))
    return torch.stack(maps, 1)


@every_family
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float64), (1, torch.float64), (2, torch.float32)])
def test_globencs_maps_equal_the_oracle(name: str, seed: int, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6 if families.FAMILIES[name].single else 1e-11
    model, ids = families.build(name, seed, dtype), families.inputs(name, seed)
    expected = direct(name, model.double(), ids)
    method = GlobEnc(model.to(dtype))
    maps: Any = method.maps(ids)
    assert (maps.self_attention - expected).abs().max() < tolerance * expected.max()
    assert maps.convergence_delta.max() < tolerance
    through, rolled = expected[:, 1] @ expected[:, 0], rows(expected[:, 1]) @ rows(expected[:, 0])
    scores: dict[tuple[GlobEnc, Position], Tensor] = {
        (method, 3): rows(through[:, 3]),
        (method, "mean"): rows(through.mean(1)),
        (GlobEnc(model, "rollout"), 3): rolled[:, 3],
        (GlobEnc(model, "mean"), 3): expected.mean(1)[:, 3],
    }
    for (aggregated, position), values in scores.items():
        found = aggregated.attribute(ids, position=position).double()
        torch.testing.assert_close(found, values, rtol=10 * tolerance, atol=tolerance)
    torch.testing.assert_close(method.attribute(ids, position=3, layer=-1), maps.self_attention[:, 1, 3])


def test_tokens_rank_as_by_the_product_of_the_maps_themselves() -> None:
    """What the authors' code ranks first for this sentence."""
    model, tokenizer = load()
    inputs = tokenizer("A man is playing a guitar on stage.", return_tensors="pt")
    for aggregation, names in (("product", ["guitar", "stage", "man"]), ("rollout", ["[CLS]", "guitar", "."])):
        scores = GlobEnc(model, aggregation).attribute(inputs, position="first")[0]
        assert [inputs.tokens()[index] for index in scores.topk(3).indices] == names


def test_changed_weights_are_seen() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    method = GlobEnc(model)
    method.maps(ids)
    for norm in ("encoder.layer.1.output.LayerNorm", "encoder.layer.0.attention.output.LayerNorm"):
        model.get_submodule(norm).weight.data.mul_(torch.rand(32) + 0.5)
        expected = direct("bert", deepcopy(model).double(), ids)
        assert (method.maps(ids).self_attention - expected).abs().max() < 1e-5 * expected.max()


def test_products_of_the_second_norm_are_not_those_of_the_first() -> None:
    """Also where one session has both."""
    model, ids = families.build("bert"), families.inputs("bert")
    methods = NormAttribution(model, "attn_res_ln"), GlobEnc(model)
    expected = [method.maps(ids).self_attention for method in methods]
    methods[1].session = methods[0].session
    for _ in range(2):
        for method, maps in zip(methods, expected, strict=True):
            assert torch.equal(method.maps(ids).self_attention, maps)


def test_an_error_of_the_second_norm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    method = GlobEnc(model)
    method.maps(ids)
    monkeypatch.setattr("captum_norm.attr.layer_norms.inverse_scale", lambda *norm: 1.001 * inverse_scale(*norm))
    with pytest.raises(IncompleteDecompositionError, match="layer 0 do not add up"):
        method.maps(ids)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_layers_without_a_second_norm_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="expected post-norm layers"):
        GlobEnc(families.build(name)).maps(families.inputs(name))


def test_encoder_decoders_are_refused_and_their_encoders_are_not() -> None:
    model, inputs = encoder_decoders.build("bart"), encoder_decoders.inputs("bart")
    with pytest.raises(UnsupportedModelError, match="pass the encoder alone"):
        GlobEnc(model).maps(inputs)
    maps: Any = GlobEnc(model.get_encoder()).maps(inputs["input_ids"])
    assert maps.encoder.shape == (2, 2, 9, 9)
