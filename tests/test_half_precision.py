"""Half-precision models: norms are accumulated in float32, so what is off is the model's own rounding."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients, Occlusion, Saliency
from torch import Tensor, nn

import captum_norm as cn
from benchmarks.precision import COMPARABLE, errors
from captum_norm.attr.layer_maps import TOLERANCE
from tests import families, feed_forwards, oracle
from tests.classifiers import classifier
from tests.test_matrix import SCOPES


@pytest.mark.parametrize("name", families.tiers(kind=families.arrangement_of))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_norms_are_accumulated_in_single_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    found = errors(name, dtype)
    assert found.accumulation < 1e-6
    assert found.completeness < TOLERANCE[dtype]
    if name in COMPARABLE:
        assert found.mixing_ratio < tolerance
        assert found.maps < tolerance


@pytest.mark.parametrize("name", families.tiers(feed_forwards.PARTS, families.arrangement_of))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
def test_the_first_layer_stays_near_the_same_weights_in_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """The model rounds each activation to 2⁻⁸ (2⁻¹¹); behind the first layer rounding may choose other experts."""
    model, inputs = families.build(name, 0, dtype), families.inputs(name, dtype=dtype)
    style = feed_forwards.EVERY[name].style
    scopes = (*SCOPES[style], *feed_forwards.SCOPES[style])
    measured = families.measured(model, inputs, scopes=scopes)
    assert measured.convergence_delta.max() < TOLERANCE[dtype]
    assert measured.convergence_delta.dtype == torch.float32
    model, inputs = model.double(), inputs.double() if inputs.is_floating_point() else inputs
    layer = oracle.layers(feed_forwards.EVERY[name], model, inputs)[0]
    behind = feed_forwards.vectors(name, model, inputs)[0]
    for scope in scopes:
        expected = (behind[scope] if scope in behind else layer.vectors(scope))[0].norm(dim=-1)
        maps = measured.norms[scope][:, 0]
        assert maps.dtype == torch.float32
        error = (maps.double() - expected).flatten(1).norm(dim=-1) / expected.flatten(1).norm(dim=-1)
        assert error.max() < tolerance


@pytest.mark.parametrize("scope", ["atb", "atb_ff_res"])
def test_automatic_mixed_precision_is_refused(scope: Any) -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    with torch.autocast("cpu"), pytest.raises(cn.InvalidInputError, match=r"torch\.autocast is on"):
        cn.AttentionBlockAttribution(model, scope).maps(ids)
    with torch.autocast("cpu"):
        assert cn.AttentionWeights(model).maps(ids).encoder is not None


IDS = families.inputs("bert", 0, 2, 5)

# In the feed-forward network the residual connection passes gradients on beside the layer.
PLACES = ("bert.encoder.layer.1.intermediate.dense", "bert.encoder.layer.1.attention.self.value")

GRADIENTS: list[Any] = [
    cn.AttentionTimesGradient,
    cn.AttnLRP,
    cn.DecompX,
    lambda model: cn.TokenAttribution(model, IntegratedGradients, n_steps=5),
    lambda model: cn.TokenAttribution(model, Saliency),
]


class Integers(nn.Module):
    """A linear map with a matrix of integers and a bias that is trained; ``rounds`` is in a kernel without gradient."""

    def __init__(self, plain: nn.Linear, *, rounds: bool) -> None:
        super().__init__()
        self.scale = float(plain.weight.detach().abs().max()) / 127
        self.register_buffer("integers", (plain.weight.detach() / self.scale).round().to(torch.int8))
        self.bias, self.rounds = nn.Parameter(plain.bias.detach().clone()), rounds

    def matrix(self) -> Tensor:
        integers: Any = self.integers
        matrix: Tensor = integers.to(self.bias.dtype) * self.scale
        return matrix

    def forward(self, inputs: Tensor) -> Tensor:
        product = inputs @ self.matrix().T
        return (product.detach() if self.rounds else product) + self.bias


def built(place: str, *, rounds: bool) -> tuple[Any, Any]:
    """A classifier with one layer of integers, and the same with their numbers as floating-point ones."""
    model = classifier(dtype=torch.float64)
    parent, name = place.rpartition(".")[::2]
    integers = Integers(model.get_submodule(place), rounds=rounds)
    plain = deepcopy(model)
    with torch.no_grad():
        plain.get_submodule(place).weight.copy_(integers.matrix())
    setattr(model.get_submodule(parent), name, integers)
    return model, plain


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", range(len(GRADIENTS)))
def test_a_layer_that_passes_gradients_on_is_the_dequantized_one(place: str, number: int) -> None:
    model, plain = built(place, rounds=False)
    scores, expected = (GRADIENTS[number](each).attribute(IDS, 1) for each in (model, plain))
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", range(len(GRADIENTS)))
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_that_passes_none_on_is_refused(place: str, number: int, trained: bool) -> None:
    model, _ = built(place, rounds=True)
    model.requires_grad_(trained)
    with pytest.raises(cn.UnsupportedModelError, match=rf'^"{place}" \(Integers\) of BertForSeq.* no gradient on'):
        GRADIENTS[number](model).attribute(IDS, 1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_methods_without_gradients_explain_it() -> None:
    model, plain = built(PLACES[0], rounds=True)
    methods: list[Any] = [
        cn.NormAttribution,
        lambda model: cn.DecompX(model, propagate=True),
        lambda model: cn.TokenAttribution(model, Occlusion),
    ]
    for method in methods:
        scores, expected = (method(each).attribute(IDS, 1) for each in (model, plain))
        torch.testing.assert_close(scores, expected, rtol=1e-7, atol=1e-9)


def test_a_backward_pass_that_fails_is_refused() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(_: Any, *__: Any) -> Tensor:
            raise RuntimeError("view size is not compatible")

    model = classifier()
    model.bert.encoder.layer[1].output.register_forward_hook(lambda _, __, output: Fails.apply(output))  # type: ignore[no-untyped-call]
    with pytest.raises(cn.UnsupportedModelError, match=r"backward pass of BertFor.* fails: view size .*; try model"):
        cn.AttentionTimesGradient(model).attribute(IDS, 1)
