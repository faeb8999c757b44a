"""What a family of the test matrix is, and the pieces that several of them share.

The places are written down by hand, so that the oracle shares nothing with the library's search for them.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.oracle import DirectNorm
from tests.versions import SINCE, older


def new(name: str, /, **settings: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers, named by its class, with these settings of its configuration.

    Its tests are skipped where transformers is older than ``SINCE`` says.
    """

    def make() -> nn.Module:
        if older(SINCE.get(name, "0")):
            pytest.skip(f"transformers {hf.__version__} has another {name}, or none")
        kind = getattr(hf, name)
        model: nn.Module = kind(kind.config_class(**deepcopy(settings)))
        return model

    return make


VOCABULARY = 60
HEADS = 4
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        build: makes a model.
        layer: name of layer i, with ``{}`` for i; its first argument is the residual stream.
        value: the module inside the layer whose output holds the values.
        projection: the output projection inside the layer.
        branch_norm: the norm on the attention output before the residual sum.
        final_norm: the norm on the sum, in post-norm layers.
        branch_factor: what multiplies the attention output before the sum: a number or parameter inside the layer, or
            ``1/NAME`` of one that divides it.
        residual_factor: what multiplies the residual stream in the sum.
        gate: a module inside the layer, its end, and what multiplies attention's output, from the tensor there.
        centered: LayerNorm or RMSNorm.
        gain_offset: added to the norm's weight.
        values: cuts (B, K, H, d) out of what the value module returns.
        value_bias: a parameter inside the layer that is added to the values.
        style: the arrangement.
        causal: whether attention looks back only.
        single: whether its file takes the softmax or the norms in float32 even in a float64 model.
        narrow: whether its file cannot run in float64.
        signal: the shape of one example's image or sound; empty for a family that reads text.
        positions: how positions are encoded.
        special: what else is special; :mod:`tests.test_special` has a check for each.
    """

    build: Callable[[], nn.Module]
    layer: str
    value: str
    projection: str
    style: str
    branch_norm: str | None = None
    final_norm: str | None = None
    branch_factor: str | None = None
    residual_factor: str | None = None
    gate: tuple[str, str, Callable[[Any, Tensor], Tensor]] | None = None
    centered: bool = True
    gain_offset: float = 0.0
    values: Callable[[Tensor], Tensor] = lambda output: output
    value_bias: str | None = None
    causal: bool = False
    single: bool = False
    narrow: bool = False
    signal: tuple[int, ...] = ()
    positions: str = "learned"
    special: tuple[str, ...] = ()

    @property
    def image(self) -> bool:
        """Whether it reads images."""
        return len(self.signal) == 3

    def norm(self, layer: nn.Module, name: str | None) -> DirectNorm | None:
        """The norm of that name, in the oracle's form."""
        if name is None:
            return None
        module: Any = layer.get_submodule(name)
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        bias = getattr(module, "bias", None)
        gain = module.weight.detach() + self.gain_offset
        return DirectNorm(self.centered, gain, torch.zeros_like(gain) if bias is None else bias.detach(), float(eps))


def part(index: int, parts: int = 3) -> Callable[[Tensor], Tensor]:
    """One of several equal parts of the last axis: queries, keys or values of a fused projection."""
    return lambda output: output.chunk(parts, dim=-1)[index]


def last(width: int) -> Callable[[Tensor], Tensor]:
    """The last numbers of a fused projection."""
    return lambda output: output[..., -width:]


def each_last(groups: int, width: int) -> Callable[[Tensor], Tensor]:
    """The last numbers of each group of heads, whose queries, keys and values stand together."""
    return lambda output: output.unflatten(-1, (groups, -1))[..., -width:].flatten(-2)


BERT: dict[str, Any] = {
    "layer": "encoder.layer.{}",
    "value": "attention.self.value",
    "projection": "attention.output.dense",
    "final_norm": "attention.output.LayerNorm",
    "style": "post-norm",
}
BERT_PRE_NORM = BERT | {"final_norm": None, "style": "pre-norm"}
LLAMA: dict[str, Any] = {
    "layer": "model.layers.{}",
    "value": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
    "style": "pre-norm",
    "centered": False,
    "causal": True,
    "single": True,
    "positions": "rotary",
    "special": ("grouped queries",),
}
