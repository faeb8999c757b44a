"""Builds the frozen network as an autograd graph, where gradient × input decomposes an output value."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_norm.attr.frozen.network import FrozenNetwork, HookedModules
from captum_norm.attr.frozen.rules import DECOMPX, RuleSet
from captum_norm.functional import (
    Elementwise,
    FrozenFeedForward,
    Normalization,
    Use,
    apply_linear,
    inverse_scale,
    lengths,
)
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.precision import accumulation_dtype


class GraphNetwork(FrozenNetwork):
    """The frozen network as an autograd graph.

    Args:
        modules: what to hook.
        call: the call to run.
        rules: what to freeze.

    Attributes:
        streams: the first layer's input, a leaf, (B, S, D), in an encoder–decoder model for either half.
        biases: each constant's contribution to the value last differentiated, (B,) each.
        deviations: each step's relative deviation from the model's own.
        copies: 1.
    """

    copies = 1

    def __init__(self, modules: HookedModules, call: ModelCall, rules: RuleSet = DECOMPX) -> None:
        super().__init__(modules)
        self.streams: list[Tensor] = []
        self.biases: list[Tensor] = []
        self.deviations: list[Tensor] = []
        self._batch, self._stacks = call.batch, call.stacks()
        self._rules = rules

    def enter(self, stream: Tensor) -> Tensor:
        self.streams.append(stream.detach().clone().requires_grad_())
        # The model may write in place, which a leaf does not allow.
        return self.streams[-1].clone()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def given(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def carries(self, tensor: Tensor) -> bool:
        return tensor.requires_grad

    def attention(self, call: AttentionCall) -> Tensor:
        if self._rules.weights:
            mask = None if call.mask is None else call.mask.detach()
            call = replace(call, query=call.query.detach(), key=call.key.detach(), mask=mask)
        output, _ = self._stacks.attend(call)
        return output

    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        inputs = inputs.to(accumulation_dtype(inputs.dtype))
        linear = apply_linear(norm, inputs) * inverse_scale(norm, inputs.detach())
        return self._replaced(linear, norm.bias, output)

    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        self._count(output, bias)
        return output

    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        line = self._rules.activation(function, inputs.detach())
        constant = line.constant.detach()
        return self._replaced(line.of(inputs), constant if constant.any() else None, output)

    def product(self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor) -> Tensor:
        line = self._rules.product(function, None, gate.detach(), other.detach())
        return self._replaced(line.of(gate, other), None, output)

    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        inputs, every = inputs.to(accumulation_dtype(inputs.dtype)), rows[0]
        with torch.no_grad():
            networks = FrozenFeedForward(uses, inputs, torch.zeros_like(inputs), "zero")
        constant = networks.constant
        return self._replaced(networks.through(inputs, every, 0), constant if constant.any() else None, output)

    def _replaced(self, linear: Tensor, constant: Tensor | None, output: Tensor) -> Tensor:
        new = (linear if constant is None else linear + constant).to(output.dtype)
        with torch.no_grad():
            error, size = lengths(*(tensor.float().flatten() for tensor in (new - output, output)))
            self.deviations.append(error / size.clamp(min=torch.finfo(size.dtype).tiny))
        if constant is not None:
            self._count(new, constant)
        return new

    def _count(self, tensor: Tensor, constant: Tensor) -> None:
        """Record the contribution of a constant added to ``tensor``, once its gradient is known."""
        constant = constant.detach()

        def count(gradient: Tensor) -> None:
            shares = (gradient.to(constant.dtype) * constant).sum(-1)
            self.biases.append(shares.reshape(self._batch, -1).sum(1))

        if tensor.requires_grad:
            tensor.register_hook(count)
