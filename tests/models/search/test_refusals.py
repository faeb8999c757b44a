"""Models that are not understood are refused quickly, in a short message that names the first such layer."""

from types import MethodType
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from captum_norm import NormAttribution, UnsupportedModelError
from captum_norm.models import projections
from captum_norm.models.search import attention_blocks
from tests import families


def llama(layers: int) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**(families.TEXT | {"num_hidden_layers": layers}))
    model: Any = hf.LlamaForCausalLM(config)
    return model.eval()


def odd_sum(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Attention's output goes through a sine before the sum."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
    hidden_states = hidden_states + attended.sin()
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # type: ignore[no-any-return]


def odd_end(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """The sum is plain, but not what follows it."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)).sin()  # type: ignore[no-any-return]


class Squashed(nn.Linear):
    """Not affine."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).tanh()


def refusal(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        NormAttribution(model).maps(families.inputs("llama"))
    return str(caught.value)


@pytest.mark.parametrize("forward", [odd_sum, odd_end])
def test_the_first_layer_that_is_not_understood_is_named(forward: Any) -> None:
    model = llama(6)
    for layer in model.model.layers[2:]:
        layer.forward = MethodType(forward, layer)
    message = refusal(model)
    assert '"model.layers.2.self_attn" attends' in message
    assert '"model.layers.2.self_attn.o_proj" projects' in message
    assert len(message) <= 400


def test_a_projection_that_is_not_affine_is_named_with_the_way_out() -> None:
    model = llama(2)
    projection = model.model.layers[1].self_attn.o_proj
    model.model.layers[1].self_attn.o_proj = Squashed(projection.in_features, projection.out_features)
    message = refusal(model)
    for part in ('"model.layers.1.self_attn.o_proj" (Squashed)', "not affine", "merge_and_unload()", "dequantize()"):
        assert part in message
    assert len(message) <= 400


@pytest.mark.parametrize("forward", [odd_sum, odd_end])
def test_the_search_grows_no_faster_than_the_model(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    for function in (projections.equal, projections.reproduces):

        def counting(*tensors: Tensor, function: Any = function, **options: Any) -> Any:
            compared.append(tensors[0].numel())
            return function(*tensors, **options)

        monkeypatch.setattr(attention_blocks, function.__name__, counting)
    counts = []
    for layers in (6, 12):
        model = llama(layers)
        for layer in model.model.layers:
            layer.forward = MethodType(forward, layer)
        compared.clear()
        refusal(model)
        counts.append(len(compared))
    assert counts[1] <= 2.2 * counts[0]
