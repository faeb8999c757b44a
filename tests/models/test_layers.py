"""The layer around an attention module."""

import pytest
from torch import nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.layers import layer_of
from tests import encoder_decoders, families


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
    with pytest.raises(UnsupportedModelError, match=r'no layer around the attention module "0\.part" of Sequential'):
        layer_of(nn.Sequential(nn.ModuleDict({"part": alone, "other": (other := nn.Linear(2, 2))})), [alone, other])
    model = encoder_decoders.build("t5")
    attention = [model.decoder.block[0].layer[index] for index in (0, 1)]
    names = {layer: module for module, layer in layer_of(model, attention).items()}
    assert set(names) == set(attention)
