"""Models that are not understood are refused quickly, in a short message that names the first such layer."""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from captum_norm import DecompX, InvalidInputError, NormAttribution, UnsupportedModelError
from captum_norm.models import projections
from captum_norm.models.model import understand
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
    assert '"model.layers.1.self_attn.o_proj" (Squashed)' in message
    assert "not affine" in message
    assert "merge" not in message  # there is no adapter
    assert "dequantize" not in message
    model.model.layers[1].self_attn.o_proj.register_buffer("integers", torch.zeros(2, 2, dtype=torch.int8))
    assert "not affine: dequantize() the weights." in refusal(model)
    assert len(message) <= 400


def test_advice_is_given_where_it_helps() -> None:
    def compressed(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
        """Attends to every second position."""
        values = hidden_states[:, ::2]
        heads = (tensor.unflatten(2, (4, -1)).transpose(1, 2) for tensor in (hidden_states, values, values))
        output = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.o_proj(output), None  # type: ignore[return-value]

    model = llama(2)
    module = model.model.layers[1].self_attn
    module.forward = MethodType(compressed, module)
    # The file of a class that is not on the attention interface is intercepted.
    type(model).__module__, before = __name__, type(model).__module__
    try:
        message = refusal(model)
    finally:
        type(model).__module__ = before
    assert "layer 1 (LlamaAttention) attends from 11 to 6 positions; expected 11 keys in self-attention" in message
    assert "encoder–decoder" not in message


def test_weights_are_asked_for_only_where_they_are_not_computed_already() -> None:
    model = llama(1)
    assert understand(model).with_weights == ': attn_implementation="eager"'
    model.set_attn_implementation("eager")
    assert not understand(model).with_weights


def test_the_logits_of_a_dataclass_are_seen() -> None:
    @dataclass
    class Output:
        logits: Tensor

    ids, whole, plain = families.inputs("llama"), llama(2), llama(2)
    own = whole.forward
    whole.forward = lambda input_ids: Output(own(input_ids).logits)
    scores, expected = (DecompX(model).attribute(ids, 1) for model in (whole, plain))
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


def test_a_module_of_attention_alone_names_what_it_lacks() -> None:
    with pytest.raises(InvalidInputError, match="missing 2 required positional arguments: 'key' and 'value'"):
        NormAttribution(nn.MultiheadAttention(32, 4, batch_first=True)).maps(torch.randn(1, 5, 32))


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
