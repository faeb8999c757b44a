"""N-Enc against the direct way: every vector through both normalisations."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import GlobEnc, NormAttribution, UnsupportedModelError
from captum_norm.errors import IncompleteDecompositionError
from captum_norm.functional import inverse_scale
from captum_norm.loading import load
from captum_norm.models.outputs import Position
from tests import encoder_decoders, families, oracle

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
def test_maps_equal_the_oracle(name: str, seed: int, dtype: torch.dtype) -> None:
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
    monkeypatch.setattr("captum_norm.attr.attention_block.inverse_scale", lambda *norm: 1.001 * inverse_scale(*norm))
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
