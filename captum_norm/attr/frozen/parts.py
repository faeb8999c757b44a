"""Propagates the parts of an example through the frozen network, as many tokens at a time as memory allows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.attr.frozen.network import FrozenNetwork, HookedModules
from captum_norm.errors import NotEnoughMemoryError, UnsupportedModelError
from captum_norm.functional import Normalization, apply_linear, inverse_scale
from captum_norm.functional.contributions import add_bias
from captum_norm.functional.feed_forward import Affine, Elementwise, Network, Use
from captum_norm.memory import MemoryBudget, free_bytes, readable
from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, first_tensor, tensors_in
from captum_norm.models.networks import stacked_maps

# Number of tensors alive at a time: as large as the largest inside a layer, and as large as the model's output.
LAYER_COPIES, OUTPUT_COPIES = 10, 3

Watch = Callable[[int, Tensor], None]
"""Called with each layer's index and its output's copies, (K + 2, S, D): the example, the tokens' and biases' parts."""


class PartsNetwork(FrozenNetwork):
    """The frozen network on copies of one example: itself, one part per token, and the part of biases not shared."""

    # Attention has one bias [Modarressi et al. 2023, eq. 3, 5]: all from its first linear map to its output projection
    # are shared together, before the residual joins.

    def __init__(
        self, modules: HookedModules, example: ModelCall, tokens: range, sharing: str | None, watch: Watch
    ) -> None:
        self.copies = len(tokens) + 2
        super().__init__(modules, example.repeated(self.copies))
        self._tokens = tokens
        self._sharing = sharing
        self._watch = watch
        self._layer = 0
        self._in_attention = self._attention_begins = False

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        hooks, known = super().hooks(), self.modules
        hooks.append(("after", known.layers, self._leave))
        if self._sharing is not None:
            hooks.append(("before", known.blocks, self._expect_attention))
            hooks.append(("before", known.linear, self._begin_attention))
            # After the hook that counts the projection's own bias.
            hooks.append(("after", [block.projection.module for block in known.blocks.values()], self._end_attention))
        return hooks

    def enter(self, stream: Tensor) -> Tensor:
        before = sum(self.lengths)
        self._see_axes(stream)
        stream = stream.transpose(0, 1) if self._queries_first else stream
        self._expect_copies(stream)
        parts = torch.zeros_like(stream)
        parts[0] = stream[0]
        tokens = before + torch.arange(stream.shape[1], device=stream.device)
        tokens = tokens[(tokens >= self._tokens.start) & (tokens < self._tokens.stop)]
        parts[1 + tokens - self._tokens.start, tokens - before] = stream[0, tokens - before]
        return parts.transpose(0, 1) if self._queries_first else parts

    def _expect_copies(self, tensor: Tensor) -> None:
        if len(tensor) != self.copies:
            raise UnsupportedModelError(
                f"the layers of {type(self.call.model).__name__} receive {len(tensor)} examples for {self.copies} "
                "copies of one, so it is unknown which axis of the inputs is theirs; pass an example of several "
                "positions, or take another method, such as alti-logit"
            )

    def example(self, tensor: Tensor) -> Tensor:
        tensor = self._batch_first(tensor)
        return tensor[: len(tensor) // self.copies]

    def constant(self, tensor: Tensor) -> Tensor:
        if not self.depends(tensor):
            return tensor
        return self._ordered(self.example(tensor).repeat(self.copies, *[1] * (tensor.dim() - 1)), tensor)

    def depends(self, tensor: Tensor) -> bool:
        return tensor.dim() > 1 and len(self._batch_first(tensor)) % self.copies == 0

    def projection(self, bias: Tensor | None, output: Tensor) -> Tensor:
        self._begin_attention()
        return super().projection(bias, output)

    def attention(self, call: AttentionCall) -> Tensor:
        if self._sharing is not None and not self._in_attention:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} receives values projected outside of it, so attention's bias cannot be "
                'separated from earlier ones; expected its linear maps inside, or bias="apart"'
            )
        self._expect_copies(call.value)
        _, output, weights = self.stacks.attend(call.part(Part(slice(1))))
        heads = call.value[1:].repeat_interleave(weights.shape[1] // call.value.shape[1], dim=1)
        return torch.cat([output, (weights @ heads.to(weights.dtype)).transpose(1, 2).to(output.dtype)])

    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        copies = self._copies(inputs).to(self.dtype)
        return self._result(apply_linear(norm, copies) * inverse_scale(norm, copies[:1]), norm.bias, output)

    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        copies = self._copies(output).to(bias.dtype)
        return self._result(copies - bias, bias, output)

    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        copies = self._copies(inputs)
        line = self.rules.activation(function, copies[:1])
        return self._with_constant(line.of(copies), line.constant, output)

    def product(
        self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor, factor: Elementwise | None = None
    ) -> Tensor:
        gates, others = self._copies(gate), self._copies(other)
        if torch.equal(others, others[:1].expand_as(others)):
            return output  # a constant, such as embeddings for each layer: all parts of a sum would have 0
        line = self.rules.product(function, factor, gates[:1], others[:1])
        return self._with_constant(line.of(gates, others), line.constant, output)

    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        inputs = inputs.to(self.dtype)
        total = torch.zeros_like(inputs)
        for use in uses:
            chosen = (rows if use.queries is None else rows[:, use.queries]).flatten()
            written = self._carried(use.network, inputs[chosen])
            if use.coefficient is not None:
                written = written * use.coefficient.repeat(self.copies, 1)
            total.index_add_(0, chosen, written)
        total[rows[0]] = output[rows[0]].to(total)
        return total.to(output.dtype)

    def _carried(self, network: Network, inputs: Tensor) -> Tensor:
        points = [self._mapped(affine, inputs) for affine in network.inner]
        hidden = network.hidden(points)
        if len(points) == 1:
            hidden = self.activation(network.activation, points[0], hidden)
        else:
            gate, other = points
            hidden = self.product(network.activation, gate, other, hidden, network.factor)
        return self._mapped(network.outer, hidden)

    def _mapped(self, affine: Affine, inputs: Tensor) -> Tensor:
        output = affine.whole(inputs)
        return output if affine.bias is None else self.affine(affine.bias.to(output.dtype), output)

    def _with_constant(self, linear: Tensor, constant: Tensor, output: Tensor) -> Tensor:
        """Add the function's value at zero, (1,)."""
        return self._result(linear, constant.expand(linear.shape[-1]) if constant.any() else None, output)

    def _leave(self, *seen: Any) -> None:
        stream = first_tensor(seen[-1])
        if stream is not None:
            self._watch(self._layer, stream.transpose(0, 1) if self._queries_first else stream)
            self._layer += 1

    def _expect_attention(self, *_: Any) -> None:
        self._attention_begins = self.is_active

    def _begin_attention(self, *_: Any) -> None:
        """Prepare for the first linear map of an attention module: that of queries, keys or values."""
        if self._attention_begins and self.is_active:
            self._attention_begins, self._in_attention = False, True

    def _end_attention(self, *seen: Any) -> Tensor | None:
        """Share attention's bias once its output has been projected."""
        output = seen[-1]
        if not self.is_active or not isinstance(output, Tensor) or not self.depends(output):
            return None
        self._in_attention = False
        *copies, bias = self._copies(output).to(self.dtype)
        return self._result(torch.stack([*copies, torch.zeros_like(bias)]), bias, output)

    def _copies(self, tensor: Tensor) -> Tensor:
        """Reshape to (K + 2, R, D), whatever the model's axes of positions."""
        return self._batch_first(tensor).reshape(self.copies, -1, tensor.shape[-1])

    def _ordered(self, parts: Tensor, tensor: Tensor) -> Tensor:
        """Reshape parts, (K + 2, ...), to a tensor's shape and order of axes."""
        ordered = self._batch_first(tensor)
        parts = parts.reshape(ordered.shape)
        return parts if ordered is tensor else parts.transpose(0, 1).contiguous()

    def _result(self, linear: Tensor, constant: Tensor | None, output: Tensor) -> Tensor:
        """Add a constant to the biases' copy, or share it among the tokens'."""
        tokens, biases = linear[1:-1], linear[-1:]
        if constant is not None:
            if self._sharing is None or self._in_attention:
                biases = biases + constant
            else:
                tokens = add_bias(tokens, constant, self._sharing)
        whole = self._copies(output)[:1].to(linear.dtype)
        return self._ordered(torch.cat([whole, tokens, biases]).to(output.dtype), output)


def propagated(
    modules: HookedModules,
    example: ModelCall,
    sharing: str | None,
    budget: MemoryBudget,
    advance: Callable[[int], object],
    watch: Watch = lambda *_: None,
) -> Iterator[tuple[Any, PartsNetwork]]:
    """Run the parts of an example; for some tokens at a time, yield the model's output and the network."""
    alone, copy = _measured(modules, example)
    count, device = sum(alone.lengths), alone.streams[0].device
    step = count  # biases that are shared take the parts of all tokens together
    if sharing is None:
        step = max(1, budget[device] // copy - 2)
    else:
        free, needed = free_bytes(device), (count + 2) * copy
        if free is not None and needed > free:
            raise NotEnoughMemoryError(
                f"the parts of {count} tokens take about {readable(needed)} together, but {readable(free)} are free on "
                f'{device}; biases shared as "{sharing}" need all at once: pass bias="apart", or shorter inputs'
            )
    for start in range(0, count, step):
        tokens = range(start, min(start + step, count))
        network = PartsNetwork(modules, example, tokens, sharing, watch)
        network.deviations = alone.deviations
        with torch.no_grad():
            output = network.run()
        advance(len(tokens))
        yield output, network


def _measured(modules: HookedModules, example: ModelCall) -> tuple[FrozenNetwork, int]:
    """Run an example alone; return the network, and the bytes that one copy of the example takes."""
    network, copy = FrozenNetwork(modules, example), 0
    inside = {module for layer in modules.layers for module in layer.modules()}

    def look(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        nonlocal copy
        times = LAYER_COPIES if module in inside else OUTPUT_COPIES
        neurons = [max(parameter.shape[1:]) for parameter in stacked_maps(module).values()]
        for tensor in tensors_in(output):
            width = max([1, *tensor.shape[-1:]])
            numbers = tensor.numel() // width * max([width, *neurons])
            copy = max(copy, times * numbers * tensor.element_size())

    with ExitStack() as stack:
        for module in modules.names:
            stack.callback(module.register_forward_hook(look).remove)
        with torch.no_grad():
            output = network.run()
    example.note(output)
    return network, copy
