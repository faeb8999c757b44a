"""The layer around attention; maps are chained through layers that mix positions by attention alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import captum_norm as cn
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.layers import layer_of, seen
from tests import encoder_decoders, families
from tests.hybrids import HYBRIDS

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
