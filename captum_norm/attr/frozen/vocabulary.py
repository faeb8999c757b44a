"""Differentiates maps to a vocabulary at the positions alone whose outputs are explained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# A map to at least as many times its inputs is one to a vocabulary.
TIMES = 8


class _Linear(torch.autograd.Function):
    """x W + b, whose gradient is computed in the rows that have one."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ((weight,), (gradient,)) = ctx.saved_tensors, gradients
        some = gradient.any(-1)
        passed = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1])
        passed[some] = gradient[some] @ weight
        return passed, None, None


def in_few_rows(args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    """Return torch's ``linear``, or a function in its place if its arguments make it a map to a vocabulary."""
    if len(args) < 2 or options.keys() - {"bias"}:
        return F.linear
    inputs, weight = args[:2]
    plain = type(weight) in (Tensor, nn.Parameter) and type(inputs) is Tensor and inputs.requires_grad
    return _linear if plain and len(weight) >= TIMES * weight.shape[1] else F.linear


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return output
