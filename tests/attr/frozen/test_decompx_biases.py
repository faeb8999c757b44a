"""DecompX's shared biases: attention has one, whatever adds to it, and all others are shared where they are added."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from captum_norm import DecompX, UnsupportedModelError
from tests import families
from tests.attr.frozen import decompx_by_hand
from tests.attr.frozen.test_decompx import SHARINGS, WIDTH, near
from tests.classifiers import classifier, randomized

LLAMA_WITH_BIASES = families.GROUPED | {"attention_bias": True, "mlp_bias": True}
# The norms of llama's like work in float32, and the softmax of these files' eager attention.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor, str], Tensor], float]] = {
    "fused projection": (lambda: families.build("gpt2"), decompx_by_hand.gpt2_by_hand, 1e-10),
    "fused by head, parallel": (lambda: families.build("gpt-neox"), decompx_by_hand.gpt_neox_by_hand, 1e-6),
    "grouped": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_WITH_BIASES)), decompx_by_hand.llama_by_hand, 1e-6),
    "grouped, no output bias": (lambda: families.build("qwen2"), decompx_by_hand.llama_by_hand, 1e-6),
}


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
def test_biases_of_attention_are_shared_as_one(name: str) -> None:
    build, by_hand, tolerance = MODELS[name]
    for seed, bias in enumerate(SHARINGS):
        torch.manual_seed(seed)
        model, ids = randomized(build(), seed), families.inputs("llama", seed, 1, 7)
        with torch.no_grad():
            logits = by_hand(model, ids, bias)
        found = DecompX(model, bias).decompose(ids, 5)
        near(found.scores[0], logits[:-1, 5], tolerance)
        assert found.bias.abs().max() == 0


@torch.no_grad()
def test_all_that_is_added_from_the_value_projection_on_is_one_bias() -> None:
    config, ids = hf.LlamaConfig(**LLAMA_WITH_BIASES | {"num_hidden_layers": 1}), families.inputs("llama", 0, 1, 7)
    model = hf.LlamaForCausalLM(config)
    attention = model.model.layers[0].self_attn
    width, head_width = attention.v_proj.out_features, attention.head_dim
    attention.v_proj = nn.Sequential(nn.Linear(WIDTH, width), nn.LayerNorm(width), nn.Linear(width, width))
    model = randomized(model, 0)
    layer, value, output = model.model.layers[0], attention.v_proj, decompx_by_hand.eager(model, ids)
    parts = decompx_by_hand.start(output.hidden_states[0][0])
    for bias in SHARINGS:
        step, apart = decompx_by_hand.ByHand(bias), decompx_by_hand.ByHand()
        read = step.norm(parts, layer.input_layernorm)
        values = apart.affine(apart.norm(apart.affine(read, value[0]), value[1]), value[2])
        heads = values.unflatten(-1, (-1, head_width)).repeat_interleave(attention.num_key_value_groups, dim=2)
        mixed = torch.einsum("hqs,skhd->qkhd", output.attentions[0][0], heads).flatten(2)
        written = apart.affine(mixed, attention.o_proj)
        together = written[:, -1].clone()
        written[:, -1] = 0
        expected = decompx_by_hand.behind_attention(step, layer, parts + decompx_by_hand.share(written, together, bias))
        near(DecompX(model, bias).maps(ids).self_attention[0, 0], expected[:, :-1].norm(dim=-1), 1e-6)


class NormedInside(LlamaAttention):
    """Attention that begins with the norm of what it reads."""

    norm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(self.norm(hidden_states), *args, **options)


def test_the_shift_of_a_norm_in_front_of_attention_is_shared_where_it_is_added() -> None:
    model, ids = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_WITH_BIASES)), families.inputs("llama", 0, 1, 7)
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(WIDTH)
    model = randomized(model, 0)
    expected = DecompX(model, "absdot").maps(ids).self_attention
    for layer in model.model.layers:
        layer.self_attn.__class__, layer.self_attn.norm = NormedInside, layer.input_layernorm
        layer.input_layernorm = nn.Identity()
        # Linear maps that are called when attention is over are none of its own.
        layer.self_attn.others = layer.mlp
    near(DecompX(model, "absdot").maps(ids).self_attention, expected)


def test_values_projected_outside_of_attention_are_refused_where_biases_are_shared() -> None:
    model, ids = classifier(), families.inputs("bert", 0, 1, 7)
    expected = DecompX(model).attribute(ids, 1)
    model.projections = nn.ModuleList()
    for layer in model.bert.encoder.layer:
        for name in ("query", "key", "value"):
            projection = getattr(layer.attention.self, name)
            model.projections.append(projection)
            # No child of attention any more.
            delattr(layer.attention.self, name)
            object.__setattr__(layer.attention.self, name, projection)
    near(DecompX(model, propagate=True).attribute(ids, 1), expected)
    with pytest.raises(UnsupportedModelError, match=r'projected outside of it.*bias="apart"'):
        DecompX(model, "absdot").attribute(ids, 1)
