"""Gradients through layers of integers: exact where a layer passes them on, refused in a sentence where it does not."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients, Occlusion, Saliency
from torch import Tensor, nn

from captum_norm import (
    AttentionTimesGradient,
    AttnLRP,
    DecompX,
    NormAttribution,
    TokenAttribution,
    UnsupportedModelError,
)
from tests import families
from tests.classifiers import classifier

IDS = families.inputs("bert", 0, 2, 5)
# In the feed-forward network the residual connection passes gradients on beside the layer.
PLACES = ("bert.encoder.layer.1.intermediate.dense", "bert.encoder.layer.1.attention.self.value")
GRADIENTS: list[Any] = [
    AttentionTimesGradient,
    AttnLRP,
    DecompX,
    lambda model: TokenAttribution(model, IntegratedGradients, n_steps=5),
    lambda model: TokenAttribution(model, Saliency),
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
    with pytest.raises(UnsupportedModelError, match=rf'^"{place}" \(Integers\) of BertForSeq.* no gradient on'):
        GRADIENTS[number](model).attribute(IDS, 1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_methods_without_gradients_explain_it() -> None:
    model, plain = built(PLACES[0], rounds=True)
    methods: list[Any] = [
        NormAttribution,
        lambda model: DecompX(model, propagate=True),
        lambda model: TokenAttribution(model, Occlusion),
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
    with pytest.raises(UnsupportedModelError, match=r"backward pass of BertFor.* fails: view size .*; try model"):
        AttentionTimesGradient(model).attribute(IDS, 1)
