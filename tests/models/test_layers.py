"""The layer around attention, with embeddings of its own too; maps are chained through layers of attention alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

import captum_norm as cn
from captum_norm.errors import UnsupportedScopeError
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.layers import layer_of, seen
from tests import encoder_decoders, families
from tests.families.family import GROUPED, new
from tests.hybrids import HYBRIDS
from tests.versions import since

FIRST = {
    "jamba": "layers.0",
    "falcon-h1": "layers.0",
    "zamba2": "layers.0",
    "recurrent-gemma": "layers.0",
    "deberta-v2 with a convolution": "layer.0",
}
CHAINS: tuple[Any, ...] = (
    cn.AttentionWeights,
    lambda model: cn.AttentionWeights(model, aggregation="rollout"),
    cn.NormAttribution,
    lambda model: cn.NormAttribution(model, aggregation="mean"),
    cn.ALTI,
    cn.ValueZeroing,
    cn.AttentionTimesGradient,
)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_not_chained(name: str, fresh: bool) -> None:
    torch.manual_seed(0)
    model = HYBRIDS[name]().eval() if fresh else families.randomized(HYBRIDS[name], 0, torch.float32)
    ids = families.inputs("llama")
    layer = FIRST.get(name, "layers.1")
    with pytest.raises(cn.UnsupportedModelError, match=rf'mixes positions by more than .* "[a-z.]*{layer}" '):
        cn.AttentionWeights(model).attribute(ids)
    assert cn.AttentionWeights(model).maps(ids).self_attention.isfinite().all()
    assert cn.AttentionWeights(model).attribute(ids, layer=0).isfinite().all()


@pytest.mark.parametrize("frozen", [True, False])
def test_every_aggregation_is_refused_and_single_layers_are_not(frozen: bool) -> None:
    model, ids = families.randomized(HYBRIDS["lfm2"], 0, torch.float32), families.inputs("llama")
    model.requires_grad_(not frozen)
    for build in CHAINS:
        method = build(model)
        with pytest.raises(cn.UnsupportedModelError, match="mixes positions"):
            method.attribute(ids)
        if isinstance(method, cn.ValueZeroing):
            continue
        maps = method.maps(ids)
        torch.testing.assert_close(method.attribute(ids, layer=1, position=10), maps.self_attention[:, 1, 10])
        with pytest.raises(cn.UnsupportedModelError, match="mixes positions"):
            method.scores(maps)
    for whole in (cn.AttentionRollout, cn.DecompX):
        for ask in (whole(model).maps, whole(model).attribute):
            with pytest.raises(cn.UnsupportedModelError, match="mixes positions"):
                ask(ids)
    with pytest.raises(cn.UnsupportedModelError, match="mixes positions"):
        cn.DecompX(model).decompose(ids, target=1)


def test_encoder_decoders_are_chained() -> None:
    """As all families of the matrix are."""
    for name in encoder_decoders.ENCODER_DECODERS:
        call = bind_inputs(encoder_decoders.build(name), encoder_decoders.inputs(name))
        assert seen(call).mixing is None, name


class Convolved(nn.Module):
    """A layer behind which neighbouring positions are added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.convolution = layer, nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + self.convolution(hidden.mT).mT
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def test_a_layer_that_is_exchanged_later_is_noticed() -> None:
    model, ids = families.build("bert", dtype=torch.float32), families.inputs("bert")
    method = cn.AttentionWeights(model)
    assert method.attribute(ids).isfinite().all()
    model.encoder.layer[0] = Convolved(model.encoder.layer[0])
    with pytest.raises(cn.UnsupportedModelError, match=r'"encoder.layer.0" \(Convolved\)'):
        method.attribute(ids)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_without_gradients(mode: Any) -> None:
    ids = families.inputs("llama")
    for name in ("jamba", "lfm2"):
        model = families.randomized(HYBRIDS[name], 0, torch.float32)
        model.forward = mode()(model.forward)
        with pytest.raises(cn.UnsupportedModelError, match="mixes positions"):
            cn.AttentionWeights(model).attribute(ids, position="last")
    for name in ("llama", "mixtral", "bert", "gpt2"):
        model = families.build(name, dtype=torch.float32)
        expected = cn.AttentionWeights(model).attribute(ids, position="last")
        model.forward = mode()(model.forward)
        torch.testing.assert_close(cn.AttentionWeights(model).attribute(ids, position="last"), expected)


def test_layers_with_gradients_that_overflow() -> None:
    ids = families.inputs("llama")
    models = {"jamba": families.randomized(HYBRIDS["jamba"], 0, torch.float32), "gpt2": families.build("gpt2")}
    for model in models.values():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(30)
        model.bfloat16()
    with pytest.raises(cn.UnsupportedModelError, match="mixes positions"):
        cn.AttentionWeights(models["jamba"]).attribute(ids, position="last")
    assert cn.AttentionWeights(models["gpt2"]).attribute(ids, position="last").isfinite().all()


class Nested(nn.Module):
    """A layer with its attention in a list of its own, and perhaps a convolution of what it is given beside it."""

    def __init__(self, *, convolved: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])
        self.convolution = nn.Conv1d(16, 16, 3, padding=1) if convolved else None

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        attended: Tensor = hidden + self.attention[0](normed, normed, normed)[0]
        return attended if self.convolution is None else attended + self.convolution(hidden.mT).mT


@pytest.mark.parametrize("convolved", [True, False])
def test_lists_inside_layers(convolved: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Nested(convolved=convolved), Nested(convolved=convolved))
    method = cn.AttentionWeights(nn.Sequential(nn.Embedding(30, 16), layers).eval())
    ids = torch.randint(30, (1, 8))
    if convolved:
        with pytest.raises(cn.UnsupportedModelError, match=r'in "1.0" \(Nested\)'):
            method.attribute(ids, position=0)
    else:
        assert method.attribute(ids, position=0).isfinite().all()


@pytest.mark.parametrize(
    ("name", "attention", "layer"),
    [
        ("bert", "encoder.layer.1.attention.self", "encoder.layer.1"),
        ("albert", "encoder.albert_layer_groups.0.albert_layers.0.attention", "encoder.albert_layer_groups.0"),
        ("t5-encoder", "encoder.block.0.layer.0.SelfAttention", "encoder.block.0"),
        ("gpt2", "transformer.h.1.attn", "transformer.h.1"),
    ],
)
def test_the_layer_is_the_largest_list_element_with_one_attention(name: str, attention: str, layer: str) -> None:
    model = families.build(name)
    kind = type(model.get_submodule(attention))
    every = [module for module in model.modules() if type(module) is kind]
    assert layer_of(model, every)[model.get_submodule(attention)] is model.get_submodule(layer)


def test_attention_outside_a_list_or_beside_another_is_refused() -> None:
    alone = nn.Linear(2, 2)
    with pytest.raises(cn.UnsupportedModelError, match=r'no layer around the attention module "0\.part" of Sequential'):
        layer_of(nn.Sequential(nn.ModuleDict({"part": alone, "other": (other := nn.Linear(2, 2))})), [alone, other])
    model = encoder_decoders.build("t5")
    attention = [model.decoder.block[0].layer[index] for index in (0, 1)]
    names = {layer: module for module, layer in layer_of(model, attention).items()}
    assert set(names) == set(attention)


TYPES = ["sliding_attention", "full_attention"] * 2
SETTINGS: dict[str, Any] = GROUPED | {"num_hidden_layers": 4, "layer_types": TYPES, "sliding_window": 3, "head_dim": 8}
SETTINGS |= {"vocab_size_per_layer_input": 60, "global_head_dim": 12, "attn_implementation": "eager"}
PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 6}
SHARED: dict[str, Any] = PER_LAYER | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
ALIKE: dict[str, Any] = PER_LAYER | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
NO_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0}
IDS = torch.tensor([[5, 9, 33, 14, 7, 52, 8], [11, 4, 40, 21, 6, 3, 17]])


def gemma4(settings: dict[str, Any], seed: int = 0, scalar: float | None = None) -> Any:
    model = families.randomized(new("Gemma4ForCausalLM", **SETTINGS | settings), seed, torch.float64)
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


@since("5.21", "Gemma 4 runs all of its layers at all positions")
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
