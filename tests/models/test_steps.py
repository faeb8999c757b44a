"""What a module computes is read off what it received and returned."""

from types import FunctionType
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.activations import ACT2FN

from captum_norm.models.projections import NormReader, Projection, read_step

WIDTH = 6
Conv1D: Any = hf.pytorch_utils.Conv1D  # without type annotations
STEPS: dict[str, tuple[Any, type | None]] = {
    "linear": (lambda: nn.Linear(WIDTH, 4), Projection),
    "square linear": (lambda: nn.Linear(WIDTH, WIDTH), Projection),
    "no bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), None),
    "Conv1D": (lambda: Conv1D(4, WIDTH), Projection),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), NormReader),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), NormReader),
    "norm without parameters": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), NormReader),
    "softmax": (lambda: nn.Softmax(dim=-1), None),
    "identity": (nn.Identity, None),
    "dropout": (lambda: nn.Dropout(0.5).train(mode=False), None),
    **{name: (lambda name=name: ACT2FN[name], FunctionType) for name in ("gelu_new", "quick_gelu", "silu", "relu2")},
    "sigmoid": (nn.Sigmoid, FunctionType),
    "PReLU": (nn.PReLU, FunctionType),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", [(2, 5, WIDTH), (1, WIDTH)])
def test_steps_are_told_apart(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    build, kind = STEPS[name]
    module, inputs = build(), torch.randn(shape)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        step = read_step(module, inputs, module(inputs))
    assert type(step) is (kind or type(None))
    if isinstance(step, FunctionType):
        torch.testing.assert_close(step(inputs), module(inputs))
