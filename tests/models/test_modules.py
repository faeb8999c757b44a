"""The list of a model's modules."""

from typing import Any

import torch
import transformers as hf
from torch import nn

from captum_norm.models.hooks import modules_of


def test_the_modules_of_a_model_in_their_order() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared, nn.ReLU(), nn.ModuleDict({"again": shared}))
    inner.register_module("nothing", None)
    model = nn.ModuleList([inner, shared, nn.TransformerEncoderLayer(4, 2), nn.ModuleList([inner])])
    assert modules_of(model) == list(model.modules())


def test_the_modules_of_a_real_model() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model = hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=2))
    assert modules_of(model) == list(model.modules())
