"""Attention's affine map f and the normalisation behind it, as matrices read off a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_norm.analysis.statistics import Array
from captum_norm.errors import UnsupportedModelError
from captum_norm.functional import apply_linear
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.parameters import Projection, read_projection
from captum_norm.models.resolver import resolve
from captum_norm.models.stacks import Place
from captum_norm.models.tracing import hooked
from captum_norm.recording import BlockTensors, Part, record


@dataclass(frozen=True)
class AffineMap:
    """One layer's f(x) = Σ_h f_h(x) = x W + b, in float64.

    Attributes:
        weight: W, (D, D).
        bias: b, (D,), without the output projection's own bias.
        norm: (I − 11ᵀ/D) diag(γ) of the normalisation behind the residual sum, without the mean for an RMSNorm, (D, D);
            None where there is none.
    """

    weight: Array
    bias: Array
    norm: Array | None


class _Values:
    """The values of one layer, (B · K, H · d), each head's own."""

    def __init__(self) -> None:
        self.flat: Tensor
        self.own_heads = self.heads = 0

    def begin(self, values: Tensor, heads: int, queries: int, *, cross: bool) -> None:  # noqa: ARG002
        self.flat = values.transpose(1, 2).flatten(0, 1).flatten(1)
        self.own_heads, self.heads = values.shape[1], heads

    def consume(self, weights: Tensor, part: Part) -> None:
        """Only values are of interest."""

    def finish(self, tensors: BlockTensors | None) -> None:
        """Nothing is left to do."""


def value_maps(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[AffineMap]:
    """Each layer's f; the model runs twice on the inputs.

    The value projection is the linear module inside attention of whose output the values are columns, whichever they
    are; values that are changed on their way (by a norm, say) are refused.

    Args:
        model: a model with one stack of layers.
        inputs: any that it accepts, of three tokens or more.

    Raises:
        UnsupportedModelError: no module's output has the values as its columns.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
    """
    call = bind_inputs(model, dict(inputs), None)
    with torch.no_grad():
        blocks = resolve(call)
        found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        values: list[tuple[Block, _Values]] = []

        def make(_: Place, block: Block | None) -> _Values | None:
            if block is None:
                return None
            values.append((block, _Values()))
            return values[-1][1]

        with hooked(_hooks(blocks.values(), found)):
            record(call, make, blocks)
        return [_affine_map(block, layer, found) for block, layer in values]


def _hooks(blocks: Any, found: dict[nn.Module, tuple[Tensor, Tensor]]) -> Iterator[Any]:
    """At both ends of every module inside attention that has a matrix."""
    inputs: dict[nn.Module, Tensor] = {}

    def enter(module: nn.Module, tensor: Tensor | None) -> None:
        if tensor is not None:
            inputs[module] = tensor

    def leave(module: nn.Module, tensor: Tensor | None) -> None:
        if tensor is not None and module in inputs:
            found[module] = inputs[module], tensor.clone()

    for block in blocks:
        for module in block.attention.modules():
            if any(parameter.dim() == 2 for parameter in module.parameters(recurse=False)):
                yield module, "input", enter
                yield module, "output", leave


def _affine_map(block: Block, values: _Values, found: Mapping[nn.Module, tuple[Tensor, Tensor]]) -> AffineMap:
    dtype = torch.float64
    weight, bias = _value_projection(block, values, found)
    output = block.projection.weight(dtype).cpu()
    repeat = values.heads // values.own_heads
    split = partial(torch.unflatten, dim=-1, sizes=(values.own_heads, -1))
    weight, bias = (split(part).repeat_interleave(repeat, dim=-2).flatten(-2) for part in (weight, bias))
    norm = None
    if block.final_norm is not None:
        norm = apply_linear(block.final_norm.read(dtype), torch.eye(output.shape[-1], dtype=dtype)).numpy()
    return AffineMap((weight @ output).numpy(), (bias @ output).numpy(), norm)


def _value_projection(
    block: Block, values: _Values, found: Mapping[nn.Module, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    for module in block.attention.modules():
        if module not in found:
            continue
        inputs, outputs = found[module]
        columns = _columns(values.flat, outputs)
        projection: Projection | None = None if columns is None else read_projection(module, inputs, outputs)
        if projection is not None:
            weight, bias = projection.weight(torch.float64).cpu(), projection.bias(torch.float64)
            bias = torch.zeros(weight.shape[1], dtype=torch.float64) if bias is None else bias.cpu()
            return weight[:, columns], bias[columns]
    raise UnsupportedModelError(
        f'the value projection of "{block.name}" was not found: no linear module inside attention gives the values'
    )


def _columns(values: Tensor, outputs: Tensor) -> list[int] | None:
    """Which columns of a module's output the values are, bit for bit; None if they are not all there."""
    flat = outputs.flatten(0, -2)
    if len(flat) != len(values) or flat.shape[1] < values.shape[1]:
        return None
    ours, theirs = (
        [np.ascontiguousarray(column).tobytes() for column in rows.T.cpu().float().numpy()] for rows in (values, flat)
    )
    places = {column: place for place, column in enumerate(theirs)}
    chosen = [places[column] for column in ours if column in places]
    return chosen if len(chosen) == len(ours) else None
