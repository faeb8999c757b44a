"""Propagates the parts of an example, as many tokens at a time as memory allows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_norm.attr.frozen.graph import GraphNetwork
from captum_norm.attr.frozen.network import Exchanges, frozen
from captum_norm.attr.frozen.parts import PartsNetwork
from captum_norm.errors import NotEnoughMemoryError
from captum_norm.functional import length
from captum_norm.memory import MemoryBudget, free_bytes, readable
from captum_norm.models.hooks import tensors_in
from captum_norm.models.inputs import ModelCall
from captum_norm.models.projections import accumulation_dtype
from captum_norm.models.search.experts import stacked_maps
from captum_norm.models.stacks import Stacks

# How many tensors as large as a layer's largest one exist at a time while its steps are exchanged, and how many as
# large as the output, which is made once and handed on.
LAYER_COPIES, OUTPUT_COPIES = 10, 3

Watch = Callable[[range, int, Tensor], None]
"""Told the tokens, the layer's index, and its output's copies: the example, its tokens' parts, the biases' part."""


class _Size(NamedTuple):
    """How many tokens the first layer receives of an example, and how much memory one of its copies takes."""

    tokens: int
    copy: int
    device: torch.device


@dataclass(frozen=True, eq=False)
class Propagation:
    """Runs parts of examples through a model.

    Attributes:
        model: the model.
        exchanges: where it has steps that are not linear.
        sharing: see :class:`PartsNetwork`.
        budget: how much memory the copies may take at a time. Biases are shared among all tokens, so then these go
            together whatever it is.
        advance: told how many tokens' parts went through.
    """

    model: nn.Module
    exchanges: Exchanges
    sharing: str | None
    budget: MemoryBudget
    advance: Callable[[int], object]

    def run(self, example: ModelCall, watch: Watch = lambda *_: None) -> Iterator[tuple[ModelCall, Any, Stacks]]:
        """One example's parts: for some tokens at a time the copies, the model's output for them, and its stacks.

        Raises:
            NotEnoughMemoryError: if all tokens must go together and there is no room.
        """
        size = self._size(example)
        step = self._at_once(size)
        for start in range(0, size.tokens, step):
            tokens = range(start, min(start + step, size.tokens))
            network = PartsNetwork(tokens, example.stacks(), self.sharing, partial(watch, tokens))
            copies = example.repeated(network.copies)
            with torch.no_grad(), frozen(copies, self.exchanges, network):
                output = copies.run()
            self.advance(len(tokens))
            yield copies, output, network.stacks

    def _at_once(self, size: _Size) -> int:
        if self.sharing is None:
            return max(1, self.budget[size.device] // size.copy - 2)
        free, needed = free_bytes(size.device), (size.tokens + 2) * size.copy
        if free is not None and needed > free:
            raise NotEnoughMemoryError(
                f"the parts of {size.tokens} tokens take about {readable(needed)} together, and {readable(free)} are "
                f'free on {size.device}; biases shared as "{self.sharing}" need all of them at once: take '
                'bias="apart", or shorter inputs'
            )
        return size.tokens

    def _size(self, example: ModelCall) -> _Size:
        """Seen in one run of the example alone."""
        network, copy = GraphNetwork(1, example.stacks()), 0
        inside = {module for layer in self.exchanges.layers for module in layer.modules()}

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
            with torch.no_grad(), frozen(example, self.exchanges, network):
                example.run()
        return _Size(network.stream.shape[1], copy, network.stream.device)


class LayerParts:
    """What is kept of each layer's parts, and whether they add up to its output.

    Args:
        keep: what to keep of some tokens' parts, (K, Q, D), along their first axis; none of their memory, into which
            the next layer may write.
        layers: the layers of which to keep it; all if None.

    Attributes:
        kept: by layer, (K, ...).
        bias: by layer the biases' part, (Q, D).
        left: by layer what is left of the output without its parts, (Q, D).
        size: by layer the norm of the output, (Q,).
    """

    def __init__(self, keep: Callable[[Tensor], Tensor], layers: Collection[int] | None = None) -> None:
        self.kept: dict[int, Tensor] = {}
        self.bias: dict[int, Tensor] = {}
        self.left: dict[int, Tensor] = {}
        self.size: dict[int, Tensor] = {}
        self._keep = keep
        self._layers = layers

    def __call__(self, tokens: range, layer: int, copies: Tensor) -> None:
        """A layer's copies: see :data:`Watch`."""
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
    """Tensors of each example's layers as one, (B, L, ...)."""
    return torch.stack([torch.stack([example[layer] for layer in layers]) for example in examples])
