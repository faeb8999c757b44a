"""Whole layers of a model: attention and feed-forward network, from one residual stream to the next."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.blocks import Block, sum_of
from captum_norm.models.inputs import ModelCall
from captum_norm.models.parameters import NormReader, read_norm, reproduces
from captum_norm.models.tracing import Call, evaluating, hooked


def layer_of(model: nn.Module, attention: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The layer around each attention module: the largest element of a list of modules that holds no other one.

    Args:
        model: the model.
        attention: its attention modules.

    Raises:
        UnsupportedModelError: if an attention module is in no such element.
    """
    wanted = set(attention)
    names = {module: name for name, module in model.named_modules() if module in wanted}
    return {module: _layer(model, name, wanted) for module, name in names.items()}


def _layer(model: nn.Module, name: str, attention: set[nn.Module]) -> nn.Module:
    path = name.split(".")
    for length in range(1, len(path) + 1):
        parent = model.get_submodule(".".join(path[: length - 1]))
        layer = model.get_submodule(".".join(path[:length]))
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len(attention.intersection(layer.modules())) == 1:
            return layer
    raise UnsupportedModelError(
        f'the layer around the attention module "{name}" of {type(model).__name__} is not found; expected an element '
        "of a ModuleList that holds one attention module"
    )


def output_norms(call: ModelCall, blocks: Mapping[nn.Module, Block]) -> dict[nn.Module, NormReader]:
    """The norm on the feed-forward residual sum, behind each post-norm attention block.

    It returns what the layer returns, and what it receives is the attention block's end and another module's output.

    Args:
        call: the model with few and short examples.
        blocks: the model's blocks by attention module.

    Returns:
        The norms by attention module.

    Raises:
        UnsupportedModelError: if a block has none.
    """
    layers = layer_of(call.model, blocks)
    probes = [_OutputNorm(blocks[attention], layer) for attention, layer in layers.items()]
    hooks = [hook for probe in probes for hook in probe.hooks()]
    with torch.no_grad(), hooked(hooks), evaluating(call.model):
        call.run()
    return {probe.block.attention: probe.reader() for probe in probes}


@dataclass
class _OutputNorm:
    """Watches one layer for the norm at its end."""

    block: Block
    layer: nn.Module
    calls: list[Call] = field(default_factory=list)
    opened: dict[nn.Module, Tensor] = field(default_factory=dict)
    found: NormReader | None = None

    def hooks(self) -> Iterator[Any]:
        for module in self.layer.modules():
            if module is not self.layer:
                yield module, "input", self.enter
                yield module, "output", self.leave
        yield self.layer, "output", self.end

    def enter(self, module: nn.Module, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.opened[module] = tensor

    def leave(self, module: nn.Module, tensor: Tensor | None) -> None:
        if tensor is not None and module in self.opened:
            self.calls.append(Call(module, self.opened.pop(module), tensor, len(self.calls)))

    def end(self, _module: nn.Module, output: Tensor | None) -> None:
        calls, self.calls = self.calls, []
        final_norm = None if self.block.final_norm is None else self.block.final_norm.module
        stream = next((call.output for call in calls if call.module is final_norm), None)
        if stream is None or output is None:
            return
        for call in calls:
            if call.module is final_norm or not torch.equal(call.output, output):
                continue
            others = (other.output for other in calls if other.output.numel() == stream.numel())
            if any(reproduces(sum_of(stream, other), call.inputs, stream, other) for other in others):
                self.found = read_norm(call.module, call.inputs, call.output) or self.found

    def reader(self) -> NormReader:
        if self.found is None:
            raise UnsupportedModelError(
                f'no normalisation of the feed-forward residual sum was found behind "{self.block.name}" '
                f"({self.block.layout.style}); only post-norm layers have one"
            )
        return self.found
