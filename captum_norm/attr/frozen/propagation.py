"""Propagates the parts of an example, as many tokens at a time as memory allows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.attr.frozen.graph import GraphNetwork
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.attr.frozen.parts import PartsNetwork
from captum_norm.errors import NotEnoughMemoryError
from captum_norm.functional import length
from captum_norm.memory import MemoryBudget, free_bytes, readable
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import tensors_in
from captum_norm.models.networks import stacked_maps
from captum_norm.models.precision import accumulation_dtype

# Number of tensors alive at a time: as large as the largest inside a layer, and as large as the model's output.
LAYER_COPIES, OUTPUT_COPIES = 10, 3

Watch = Callable[[range, int, Tensor], None]
"""Called with the tokens, the layer's index and its output's copies: the example, the tokens' and the biases' parts."""


@dataclass(frozen=True, eq=False)
class Propagation:
    """Runs parts of examples through a model.

    Attributes:
        model: the model.
        modules: its modules to hook.
        sharing: see :class:`PartsNetwork`.
        budget: memory for the copies; ignored if biases are shared, which takes the parts of all tokens together.
        advance: called with the number of tokens whose parts have run.
    """

    model: nn.Module
    modules: HookedModules
    sharing: str | None
    budget: MemoryBudget
    advance: Callable[[int], object]

    def run(self, example: ModelCall, watch: Watch = lambda *_: None) -> Iterator[tuple[ModelCall, Any, PartsNetwork]]:
        """Run one example's parts; for some tokens at a time, yield the copies, the model's output and the network.

        Raises:
            NotEnoughMemoryError: if all tokens must run together and do not fit.
        """
        count, step = self._tokens(example)
        for start in range(0, count, step):
            tokens = range(start, min(start + step, count))
            network = PartsNetwork(self.modules, tokens, example.stacks(), self.sharing, partial(watch, tokens))
            copies = example.repeated(network.copies)
            with torch.no_grad():
                output = network.run(copies)
            self.advance(len(tokens))
            yield copies, output, network

    def _tokens(self, example: ModelCall) -> tuple[int, int]:
        """Return how many tokens enter the first layers, and the parts of how many to run at a time."""
        streams, copy = self._measured(example)
        tokens, device = sum(stream.shape[1] for stream in streams), streams[0].device
        if self.sharing is None:
            return tokens, max(1, self.budget[device] // copy - 2)
        free, needed = free_bytes(device), (tokens + 2) * copy
        if free is not None and needed > free:
            raise NotEnoughMemoryError(
                f"the parts of {tokens} tokens take about {readable(needed)} together, but {readable(free)} are "
                f'free on {device}; biases shared as "{self.sharing}" need all of them at once: pass '
                'bias="apart", or shorter inputs'
            )
        return tokens, tokens

    def _measured(self, example: ModelCall) -> tuple[list[Tensor], int]:
        """Run the example alone; return the first layers' inputs and the bytes that one copy of the example takes."""
        network, copy = GraphNetwork(self.modules, example), 0
        inside = {module for layer in self.modules.layers for module in layer.modules()}

        def look(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            nonlocal copy
            times = LAYER_COPIES if module in inside else OUTPUT_COPIES
            neurons = [max(parameter.shape[1:]) for parameter in stacked_maps(module).values()]
            for tensor in tensors_in(output):
                width = max([1, *tensor.shape[-1:]])
                numbers = tensor.numel() // width * max([width, *neurons])
                copy = max(copy, times * numbers * tensor.element_size())

        with ExitStack() as stack:
            for module in self.model.modules():
                stack.callback(module.register_forward_hook(look).remove)
            with torch.no_grad():
                network.run(example)
        return network.streams, copy


class LayerParts:
    """Collects each layer's parts, reduced, and the remainder of its output.

    Args:
        keep: reduces some tokens' parts, (K, Q, D), to (K, ...); must copy, as the next layer may write in place.
        layers: the layers to collect; all if None.

    Attributes:
        kept: by layer, the reduced parts, (K, ...).
        bias: by layer, the biases' part, (Q, D).
        left: by layer, the output minus its parts, (Q, D).
        size: by layer, the norm of the output, (Q,).
    """

    def __init__(self, keep: Callable[[Tensor], Tensor], layers: Collection[int] | None = None) -> None:
        self.kept: dict[int, Tensor] = {}
        self.bias: dict[int, Tensor] = {}
        self.left: dict[int, Tensor] = {}
        self.size: dict[int, Tensor] = {}
        self._keep = keep
        self._layers = layers

    def __call__(self, tokens: range, layer: int, copies: Tensor) -> None:
        """Collect one layer: see :data:`Watch`."""
        if self._layers is not None and layer not in self._layers:
            return
        copies = copies.to(accumulation_dtype(copies.dtype))
        whole, parts, bias = copies[0], copies[1:-1], copies[-1].clone()
        kept = self._keep(parts)
        if tokens.start == 0:
            self.kept[layer] = kept
            self.bias[layer], self.left[layer], self.size[layer] = bias, whole - bias, length(whole)
        else:
            self.kept[layer] = torch.cat([self.kept[layer], kept])
        self.left[layer] = self.left[layer] - parts.sum(0)


def by_layer(examples: Sequence[Mapping[int, Tensor]], layers: Sequence[int]) -> Tensor:
    """Stack tensors by example and layer, (B, L, ...)."""
    return torch.stack([torch.stack([example[layer] for layer in layers]) for example in examples])
