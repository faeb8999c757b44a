"""DecompX through mixtures of experts: what routers decide is given, and experts' parts are as those by hand."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from captum_norm import DecompX, UnsupportedModelError
from captum_norm.attr.frozen import parts
from captum_norm.attr.frozen.decompx import Bias
from captum_norm.errors import NonFiniteError
from tests import families, feed_forwards, oracle
from tests.attr.frozen.decompx_by_hand import ByHand, eager, share, start
from tests.attr.frozen.test_decompx import SHARINGS, batches_of, first_output, near
from tests.classifiers import randomized

MIXTURES = {
    **{name: feed_forwards.PARTS[name] for name in ("mixtral", "qwen2-moe", "llama4", "gpt-oss")},
    "qwen3-moe": feed_forwards.EXPERTS,
    "olmoe": feed_forwards.EXPERTS,
}
TOLERANCE = 1e-6  # the norms of these files work in float32


class MixtureByHand(ByHand):
    """With the networks of a mixture, their weights at each position taken as given."""

    def root_mean_square(self, parts: Tensor, owner: nn.Module, name: str) -> Tensor:
        norm = families.FAMILIES["llama"].norm(owner, name)
        return oracle.norm_parts(norm, parts[None], torch.zeros(1).double().expand(1, len(parts), parts.shape[-1]))[0][
            0
        ]

    def mixture(self, parts: Tensor, layer: oracle.FeedForwardLayer) -> Tensor:
        total = torch.zeros_like(parts)
        for network, coefficients in layer.networks:
            scaled = parts if network.scale is None else parts * network.scale[0, :, None, None]
            points = [share(scaled @ weight, _unless_zero(bias), self.sharing) for weight, bias in network.inner]
            whole = [point.sum(1) for point in points]
            origins = [torch.zeros_like(point) for point in whole]
            slopes = oracle.integrated_slopes(network.activation, network.factor, origins, whole)
            hidden = points[0] * slopes[0][:, None] + points[1] * slopes[1][:, None]
            weight, bias = network.outer
            written = share(hidden @ weight, _unless_zero(bias), self.sharing)
            # Where nothing was routed to a network its bias is nobody's.
            total = total + (coefficients[0, :, None, None] * written).nan_to_num()
        return total


def _unless_zero(bias: Tensor) -> Tensor | None:
    return bias if bias.any() else None


def by_hand(name: str, model: Any, ids: Tensor, sharing: str) -> tuple[Tensor, Tensor]:
    """The parts of the last layer's output, (S, K + 1, D), and of the last position's logits, of one example."""
    names = [f"model.layers.{index}.post_attention_layernorm" for index in range(len(model.model.layers))]
    with oracle.watched(model, {norm: (norm, "input") for norm in names}) as seen:
        output, step = eager(model, ids), MixtureByHand(sharing)
    ends = [end.double() for (end,) in seen.values()]
    mixtures = feed_forwards.read_layers(families.FAMILIES[name], MIXTURES[name], model, ends)
    parts = start(output.hidden_states[0][0])
    for layer, weights, mixture in zip(model.model.layers, output.attentions, mixtures, strict=True):
        read, attention = step.root_mean_square(parts, layer, "input_layernorm"), layer.self_attn
        parts = parts + step.attention(read, weights[0].double(), attention.v_proj, attention.o_proj)
        read = step.root_mean_square(parts, layer, "post_attention_layernorm")
        parts = parts + step.mixture(read, mixture)
    return parts, step.affine(step.root_mean_square(parts, model.model, "norm")[-1:], model.lm_head)[0]


@pytest.mark.few
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_equal_frozen_experts_by_hand(name: str, seed: int) -> None:
    model, ids = randomized(families.build(name, seed), seed), families.inputs(name, seed, 1, 7)
    with torch.no_grad():
        _, logits = by_hand(name, model, ids, "apart")
    for propagate in (False, True):
        found = DecompX(model, propagate=propagate).decompose(ids, 5)
        near(found.scores[0], logits[:-1, 5], TOLERANCE)
        assert (found.bias[0] - logits[-1, 5]).abs() < TOLERANCE * logits[:, 5].abs().max()
        assert found.convergence_delta.max() < TOLERANCE


@pytest.mark.few
@pytest.mark.parametrize("bias", SHARINGS)
def test_biases_of_experts_and_attention_are_shared_as_by_hand(bias: Bias) -> None:
    """With attention sinks: weights that do not sum to 1 take as much of the value bias."""
    for seed in range(2):
        model, ids = randomized(families.build("gpt-oss", seed), seed), families.inputs("gpt-oss", seed, 1, 7)
        with torch.no_grad():
            states, logits = by_hand("gpt-oss", model, ids, bias)
        method = DecompX(model, bias)
        near(method.maps(ids).self_attention[0, -1], states[:, :-1].norm(dim=-1), TOLERANCE)
        near(method.decompose(ids, 5).scores[0], logits[:-1, 5], TOLERANCE)


class Mixture(nn.Module):
    """A mixture that squares its router's weights."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.experts = mlp.gate, mlp.experts

    def forward(self, hidden: Tensor) -> Tensor:
        read = hidden.flatten(0, 1)
        _, coefficients, chosen = self.gate(read)
        written: Tensor = self.experts(read, chosen, coefficients.square()).reshape(hidden.shape)
        return written


def test_coefficients_are_those_that_experts_receive() -> None:
    """Whatever a block makes of a router's weights is given, too."""
    model, ids = families.build("mixtral"), families.inputs("mixtral", 0, 2, 7)
    for layer in model.model.layers:
        layer.mlp = Mixture(layer.mlp)
    graph, parts = (DecompX(model, propagate=propagate).decompose(ids, 5) for propagate in (False, True))
    near(graph.scores, parts.scores, 1e-5)
    assert max(graph.convergence_delta.max(), parts.convergence_delta.max()) < 1e-5


def test_neurons_of_experts_count_as_memory() -> None:
    model, ids = families.build("mixtral"), families.inputs("mixtral", 0, 1, 7)
    method = DecompX(model, memory_budget=5 * parts.LAYER_COPIES * 7 * 2 * families.TEXT["intermediate_size"] * 4)
    method.maps(ids)  # what is learnt of the model takes runs of its own
    copies = batches_of(model)
    method.maps(ids)
    assert [count for count in copies if count > 1] == [5, 5, 3]


def test_clamped_factors_add_up() -> None:
    """Kinks on the path cost accuracy of the shares, not of their sum."""
    model, ids = families.build("gpt-oss"), families.inputs("gpt-oss", 0, 2, 7)
    for layer in model.model.layers:
        layer.mlp.experts.limit = 0.4
    graph, parts = (DecompX(model, propagate=propagate).decompose(ids, 5) for propagate in (False, True))
    near(graph.scores, parts.scores, 1e-5)
    assert max(graph.convergence_delta.max(), parts.convergence_delta.max()) < 1e-5


def test_experts_that_are_not_understood_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build("mixtral"), families.inputs("mixtral", 0, 2, 7)
    experts = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(
        experts, "forward", lambda module, hidden, *_: hidden @ module.down_proj[0] @ module.down_proj[0].T
    )
    for propagate in (False, True):
        with pytest.raises(
            UnsupportedModelError, match=r"MixtralExperts with the stacked maps gate_up_proj \(4, 96, 32"
        ):
            DecompX(model, propagate=propagate, readout=first_output).decompose(ids, 5)


def test_infinite_activations_outside_of_routers_are_refused() -> None:
    config = hf.LlamaConfig(**families.GROUPED, hidden_act="relu")
    model, ids = hf.LlamaForCausalLM(config).train(False), families.inputs("llama", 0, 2, 7)
    negative = float("-inf")
    gate = model.model.layers[0].mlp.gate_proj
    gate.register_forward_hook(lambda _, __, output: output.masked_fill(output < 0, negative))
    with pytest.raises(NonFiniteError, match="receives infinite numbers"):
        DecompX(model).decompose(ids, 5)
