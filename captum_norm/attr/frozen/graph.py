"""Builds the frozen network as an autograd graph, where gradient × input decomposes an output value."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_norm.attr.frozen.attention import AttentionRules, with_rules
from captum_norm.attr.frozen.network import ACTIVATIONS, FrozenNetwork, HookedModules
from captum_norm.attr.frozen.rules import DECOMPX, Line, RuleSet
from captum_norm.attr.frozen.vocabulary import in_few_rows
from captum_norm.functional import (
    Elementwise,
    Network,
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
        rules: what steps pass on.

    Attributes:
        streams: the first layer's input, a leaf, (B, S, D), in an encoder–decoder model for either half.
        deviations: each step's relative deviation from the model's own.
        scored_apart: whether the model's own code computes scores of attention that are not constant.
        copies: 1.
    """

    copies = 1

    def __init__(self, modules: HookedModules, call: ModelCall, rules: RuleSet = DECOMPX) -> None:
        super().__init__(modules)
        self.streams: list[Tensor] = []
        self.deviations: list[Tensor] = []
        self.scored_apart = False
        # What constants and softmaxes keep of the value that is being differentiated, (B,) each.
        self._kept: list[Tensor] = []
        self._attended = 0
        self._batch, self._stacks = call.batch, call.stacks()
        self._rules = rules

    def relevances(self, numbers: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
        """Compute the relevance of the streams' positions for numbers of the output, (B,): (B, S), and what is kept.

        Args:
            numbers: one for each example.
            again: keep the graph for further numbers.
        """
        self._kept.clear()
        gradients = torch.autograd.grad(numbers.sum(), self.streams, retain_graph=again, materialize_grads=True)
        dtype, device = accumulation_dtype(numbers.dtype), numbers.device
        pairs = zip(gradients, self.streams, strict=True)
        relevance = torch.cat([(g.to(dtype) * x.detach().to(dtype)).sum(-1).to(device) for g, x in pairs], 1)
        kept = [part.to(relevance) for part in self._kept]
        return relevance, torch.stack(kept).sum(0) if kept else relevance.new_zeros(self._batch)

    def enter(self, stream: Tensor) -> Tensor:
        self.streams.append(stream.detach().clone().requires_grad_())
        # The model may write in place, which a leaf does not allow.
        return self.streams[-1].clone()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def given(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def carries(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and not tensor.is_leaf  # no parameter

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace also what the model's own code computes of attention weights, and maps to a vocabulary."""
        options = kwargs or {}
        if not self.is_active or self._replacing:
            return func(*args, **options)
        before = self._attended
        if func is F.linear:
            func = in_few_rows(args, options)
        output = super().__torch_function__(func, types, args, options)
        if self._rules.temperature is None or self._attended != before or not isinstance(output, Tensor):
            return output
        return with_rules(func, args, options, output, self._rules.temperature)

    def attention(self, call: AttentionCall) -> Tensor:
        self._attended += 1
        call = call.whole()
        temperature = self._rules.temperature
        if temperature is None:
            mask = None if call.mask is None else call.mask.detach()
            _, output, _ = self._stacks.attend(
                replace(call, query=call.query.detach(), key=call.key.detach(), mask=mask)
            )
            return output
        # Where attention weights come in place of the queries, they do in place of the keys.
        self.scored_apart |= call.key is call.value
        query, key, value = (tensor.view_as(tensor) for tensor in (call.query, call.key, call.value))
        with AttentionRules(temperature, self._inside_attention):
            _, output, _ = self._stacks.attend(replace(call, query=query, key=key, value=value))
        output = output.view_as(output)
        self._keep(output, output)
        for tensor in (query, key, value):
            self._keep(tensor, tensor, -1)
        return output

    def _inside_attention(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> Tensor:
        if func not in ACTIVATIONS or not args or not output.requires_grad:
            return output
        inputs, rest = args[0], args[1:]
        line = self._rules.activation(lambda values: func(values, *rest, **options), inputs.detach())
        return (line.of(inputs) + line.constant).to(output.dtype)

    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        inputs = inputs.to(accumulation_dtype(inputs.dtype))
        linear = apply_linear(norm, inputs) * inverse_scale(norm, inputs.detach())
        return self._replaced(linear, norm.bias, output)

    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        self._keep(output, bias)
        return output

    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        return self._linear(self._rules.activation(function, inputs.detach()), (inputs,), output)

    def product(self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor) -> Tensor:
        line = self._rules.product(function, None, gate.detach(), other.detach())
        return self._linear(line, (gate, other), output)

    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        inputs, every = inputs.to(accumulation_dtype(inputs.dtype)), rows[0]
        linear, constant = torch.zeros_like(inputs), torch.zeros_like(inputs).detach()
        for use in uses:
            chosen = every if use.queries is None else use.queries
            written, kept = self._through(use.network, use.reads(inputs))
            if use.coefficient is not None:
                written, kept = written * use.coefficient, kept * use.coefficient
            linear, constant = linear.index_add(0, chosen, written), constant.index_add(0, chosen, kept)
        # Experts that read rows of their own have the whole batch for each expert.
        times = max(1, len(every) // self.streams[-1][..., 0].numel())
        linear, constant, whole = (_swapped(part, times, self._batch) for part in (linear, constant, output))
        return _swapped(self._replaced(linear, constant if constant.any() else None, whole), self._batch, times)

    def _through(self, network: Network, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Carry inputs, (n, D), through a network; return what depends on them, and what does not."""
        points = [affine.linear(inputs) for affine in network.inner]
        with torch.no_grad():
            biases = [affine.whole(torch.zeros_like(inputs)) for affine in network.inner]
            whole = [point + bias for point, bias in zip(points, biases, strict=True)]
            if len(whole) == 1:
                line = self._rules.activation(network.activation, *whole)
            else:
                line = self._rules.product(network.activation, network.factor, *whole)
            kept = network.outer.whole(line.of(*biases) + line.constant)
        return network.outer.linear(line.of(*points)), kept

    def _linear(self, line: Line, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        constant = line.constant.detach()
        return self._replaced(line.of(*arguments), constant if constant.any() else None, output)

    def _replaced(self, linear: Tensor, constant: Tensor | None, output: Tensor) -> Tensor:
        new = (linear if constant is None else linear + constant).to(output.dtype)
        with torch.no_grad():
            error, size = lengths(*(tensor.float().flatten() for tensor in (new - output, output)))
            self.deviations.append(error / size.clamp(min=torch.finfo(size.dtype).tiny))
        if constant is not None:
            self._keep(new, constant)
        return new

    def _keep(self, tensor: Tensor, constant: Tensor, sign: int = 1) -> None:
        """Record the contribution of a constant added to ``tensor``, once its gradient is known."""
        constant = constant.detach()

        def keep(gradient: Tensor) -> None:
            dtype = accumulation_dtype(constant.dtype)
            shares = (gradient.to(dtype) * constant.to(dtype)).sum(-1)
            self._kept.append(sign * shares.reshape(self._batch, -1).sum(1))

        if tensor.requires_grad:
            tensor.register_hook(keep)


def _swapped(rows: Tensor, first: int, second: int) -> Tensor:
    """Swap the two outer of three axes that the rows have, (first · second · n, D)."""
    swapped: Tensor = rows.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)
    return swapped
