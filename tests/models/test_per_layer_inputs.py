"""Gemma 4: each layer adds embeddings of its own, multiplies its output, and may share keys and values."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm

import captum_norm as cn
from captum_norm.errors import UnsupportedScopeError
from tests.families import randomized
from tests.families.family import GROUPED, new

TYPES = ["sliding_attention", "full_attention"] * 2
SETTINGS: dict[str, Any] = GROUPED | {"num_hidden_layers": 4, "layer_types": TYPES, "sliding_window": 3, "head_dim": 8}
SETTINGS |= {"vocab_size_per_layer_input": 60, "global_head_dim": 12, "attn_implementation": "eager"}
PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 6}
SHARED: dict[str, Any] = PER_LAYER | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
ALIKE: dict[str, Any] = PER_LAYER | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
NO_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0}
IDS = torch.tensor([[5, 9, 33, 14, 7, 52, 8], [11, 4, 40, 21, 6, 3, 17]])


def gemma4(settings: dict[str, Any], seed: int = 0, scalar: float | None = None) -> Any:
    model = randomized(new("Gemma4ForCausalLM", **SETTINGS | settings), seed, torch.float64)
    for place, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.6 + 0.2 * place if scalar is None else scalar)
    return model


def by_hand(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Norms of attention's vectors and of those behind the norm and the residual connection, (B, Q, K) by layer."""
    streams, values = list[Tensor](), dict[int, Tensor]()
    for place, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, received: streams.append(received[0].clone()))
        if hasattr(layer.self_attn, "v_norm"):
            layer.self_attn.v_norm.register_forward_hook(lambda *seen, place=place: values.update({place: seen[2]}))
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions
    attn, atb = [], []
    for place, (layer, x) in enumerate(zip(model.model.layers, streams, strict=True)):
        source = max(other for other in values if other <= place and TYPES[other] == TYPES[place])
        value = values[source].repeat_interleave(4 // values[source].shape[2], 2)  # (B, K, H, d)
        projection = layer.self_attn.o_proj.weight.unflatten(1, (4, -1))
        vectors = torch.einsum("bhqk,bkhd,ohd->bqko", weights[place].double(), value, projection).detach()
        attn.append(vector_norm(vectors, dim=-1))
        norm, total = layer.post_attention_layernorm, vectors.sum(2, keepdim=True)
        vectors = vectors * norm.weight.detach() / (total.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        vectors += torch.diag_embed(x.detach().movedim(1, -1)).permute(0, 2, 3, 1)
        atb.append(vector_norm(vectors, dim=-1))
    return attn, atb


@pytest.mark.few
@pytest.mark.parametrize(
    ("settings", "seed"),
    [(NO_INPUTS, 0), (PER_LAYER, 1), (SHARED, 2), (SHARED, 3), (ALIKE, 4)],
    ids=["none", "inputs", "shared", "shared again", "k = v"],
)
def test_vectors_up_to_the_attention_block_are_exact(settings: dict[str, Any], seed: int) -> None:
    model = gemma4(settings, seed)
    methods = cn.NormAttribution(model, "attn"), cn.AttentionBlockAttribution(model, "atb")
    found = [method.maps(IDS).self_attention.unbind(1) for method in methods]
    for maps, expected in zip(found, by_hand(model), strict=True):
        for layer_map, norms in zip(maps, expected, strict=True):
            # Its file takes the softmax and the norms in float32.
            torch.testing.assert_close(layer_map.double(), norms, rtol=1e-5, atol=1e-6)
    assert cn.ALTI(model).attribute(IDS).isfinite().all()


def test_the_factor_of_a_layer_multiplies_the_vectors_of_its_output() -> None:
    """A layer's own vectors are those of the same layer without the factor, times it."""
    once, twice = (
        cn.AttentionBlockAttribution(gemma4(NO_INPUTS, scalar=scalar), "atb_ff_res")
        .maps(IDS, layers=[0])
        .self_attention
        for scalar in (1.0, -2.5)
    )
    torch.testing.assert_close(twice, 2.5 * once, rtol=1e-5, atol=1e-6)


def test_a_factor_that_changes_is_never_ignored() -> None:
    model = gemma4(NO_INPUTS, scalar=1.0)
    method = cn.AttentionBlockAttribution(model, "atb_ff_res")
    before = method.maps(IDS, layers=[0]).self_attention
    model.model.layers[0].layer_scalar.fill_(0.5)
    torch.testing.assert_close(method.maps(IDS, layers=[0]).self_attention, before / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.few
@pytest.mark.parametrize("scalar", [None, 1.0])
@pytest.mark.parametrize("settings", [PER_LAYER, SHARED])
def test_scopes_through_the_network_name_the_embeddings_behind_it(
    settings: dict[str, Any], scalar: float | None
) -> None:
    model = gemma4(settings, scalar=scalar)
    for explain in (
        lambda: cn.AttentionBlockAttribution(model, "atb_ff_res").maps(IDS),
        lambda: cn.ALTILogit(model).attribute(IDS, target=5),
    ):
        with pytest.raises(UnsupportedScopeError) as caught:
            explain()
        assert (
            '"per_layer_input_gate" reads the sum with the feed-forward network\'s output, to which the layer adds the '
            'output of "post_per_layer_input_norm", and no scope names what is between the two'
        ) in str(caught.value)


def test_layers_at_the_last_positions_alone_are_refused_and_not_asked_for() -> None:
    method, whole = cn.NormAttribution(model := gemma4(SHARED)), {"input_ids": IDS}
    with pytest.raises(
        cn.UnsupportedModelError, match=r"from 1 to 7 .* the 2 layers before it from 7: .* logits_to_keep"
    ):
        method.maps(whole | {"logits_to_keep": 1})
    last, every = method.maps(IDS, last=2).self_attention, cn.NormAttribution(model).maps(IDS).self_attention
    torch.testing.assert_close(last, every[..., -2:, :])


@pytest.mark.few
@pytest.mark.parametrize("settings", [PER_LAYER, SHARED], ids=["inputs", "shared"])
@pytest.mark.parametrize("rules", [cn.DecompX, cn.AttnLRP, cn.GIM, cn.CPLRP])
def test_rule_sets_take_the_embeddings_of_layers_as_constants(rules: Any, settings: dict[str, Any]) -> None:
    """As where the model makes them without gradients, which says so itself."""
    model = gemma4(settings)
    explained = rules(model).attribute(IDS, target=5)
    made = model.model.project_per_layer_inputs
    model.model.project_per_layer_inputs = lambda *received: made(*received).detach()
    torch.testing.assert_close(rules(model).attribute(IDS, target=5), explained, rtol=1e-5, atol=1e-7)
    if rules is cn.DecompX:
        propagated = cn.DecompX(model, propagate=True).attribute(IDS, target=5)
        torch.testing.assert_close(propagated, explained, rtol=1e-5, atol=1e-7)
