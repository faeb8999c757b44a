"""Extracts attention's affine map f and the following normalisation from a model, as matrices."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.recording import record
from captum_norm.functional import apply_linear
from captum_norm.lab.analysis.statistics import Array
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block
from captum_norm.models.hooks import hooked
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.projections import Projection, read_projection
from captum_norm.models.search.attention_blocks import find_blocks
from captum_norm.models.stacks import Place

# This many tokens distinguish the columns of a module's output.
_ROWS = 32


@dataclass(frozen=True)
class AffineMap:
    """One layer's f(x) = Σ_h f_h(x) = x W + b, in float64.

    Attributes:
        weight: W, (D, D).
        bias: b, (D,), without the bias of the output projection.
        norm: the normalisation after the residual sum, (I − 11ᵀ/D) diag(γ), or diag(γ) for an RMSNorm, (D, D); None if
            there is no such norm.
    """

    weight: Array
    bias: Array
    norm: Array | None


@dataclass(frozen=True)
class ValueMap:
    """One layer's f and the following normalisation, as parameters of the model.

    Attributes:
        block: the attention block.
        projection: the linear module whose output contains the values.
        columns: the H · d columns of its output that are the values.
        added: a vector that attention adds to them, (H · d,), or None.
        own_heads: the number of heads of the values.
        heads: the number of heads of the queries.
    """

    block: Block
    projection: Projection
    columns: list[int]
    added: Tensor | None
    own_heads: int
    heads: int

    @torch.no_grad()
    def read(self) -> AffineMap:
        """Compute the matrices from the current parameters."""
        dtype = torch.float64
        weight = self.projection.weight(dtype).cpu()[:, self.columns]
        bias = torch.zeros(len(self.columns), dtype=dtype)
        if (own := self.projection.bias(dtype)) is not None:
            bias += own.cpu()[self.columns]
        if self.added is not None:
            bias += self.added.to("cpu", dtype)
        output = self.block.projection.weight(dtype).cpu()
        repeat = self.heads // self.own_heads
        split = partial(torch.unflatten, dim=-1, sizes=(self.own_heads, -1))
        weight, bias = (split(part).repeat_interleave(repeat, dim=-2).flatten(-2) for part in (weight, bias))
        norm = None
        if self.block.final_norm is not None:
            norm = apply_linear(self.block.final_norm.read(dtype), torch.eye(output.shape[-1], dtype=dtype)).numpy()
        return AffineMap((weight @ output).numpy(), (bias @ output).numpy(), norm)


_Calls = dict[nn.Module, list[tuple[Tensor, Tensor]]]


def value_maps(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[ValueMap]:
    """Find each layer's f in the model, which runs twice on the inputs.

    The value projection is the linear module inside attention whose output contains the values as columns, possibly
    plus a vector that is a parameter of attention (DeBERTa). Values that are changed in another way, such as by a norm,
    are refused.

    Args:
        model: a model with one stack of layers.
        inputs: any inputs it accepts, of three tokens or more.

    Raises:
        UnsupportedModelError: no module's output contains the values.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
    """
    call = bind_inputs(model, dict(inputs), None)
    with torch.no_grad():
        blocks = find_blocks(call)
        calls: _Calls = {}
        attended: list[tuple[Block, AttentionCall]] = []

        def note(_: Place, block: Block | None, attention: AttentionCall) -> tuple[()]:
            attended.append((cast(Block, block), replace(attention, value=attention.value.clone())))
            return ()

        with hooked(_hooks(blocks.values(), calls)):
            record(call, note, blocks)
        return [_value_map(block, attention, calls) for block, attention in attended]


def _hooks(blocks: Iterable[Block], calls: _Calls) -> Iterator[Any]:
    """Record the input and output of every module inside attention that has a matrix."""
    inputs: dict[nn.Module, Tensor] = {}

    def enter(module: nn.Module, tensor: Tensor | None) -> None:
        if tensor is not None:
            inputs[module] = tensor

    def leave(module: nn.Module, tensor: Tensor | None) -> None:
        if tensor is not None and module in inputs:
            # Layers may share a module.
            calls.setdefault(module, []).append((inputs[module], tensor.clone()))

    for block in blocks:
        for module in block.attention.modules():
            if any(parameter.dim() == 2 for parameter in module.parameters(recurse=False)):
                yield module, "input", enter
                yield module, "output", leave


def _value_map(block: Block, attention: AttentionCall, calls: _Calls) -> ValueMap:
    own_heads, heads = attention.value.shape[1], attention.query.shape[1]
    values = attention.value.transpose(1, 2).flatten(0, 1).flatten(1)  # (B · K, H · d)
    width = values.shape[1]
    vectors = [parameter for parameter in block.attention.parameters(recurse=False) if parameter.shape == (width,)]
    for module in block.attention.modules():
        for inputs, outputs in calls.get(module, ()):
            for added in (None, *vectors):
                columns = _columns(values, outputs.flatten(0, -2), added)
                projection = None if columns is None else read_projection(module, inputs, outputs)
                if columns is not None and projection is not None:
                    return ValueMap(block, projection, columns, added, own_heads, heads)
    raise UnsupportedModelError(
        f'the value projection of "{block.name}" was not found: no linear module inside attention outputs the values'
    )


def _columns(values: Tensor, outputs: Tensor, added: Tensor | None) -> list[int] | None:
    """The columns of a module's output that, plus a vector, equal the values bit for bit; None unless all are found."""
    if len(outputs) != len(values) or outputs.shape[1] < values.shape[1]:
        return None
    offsets = values.new_zeros(values.shape[1]) if added is None else added.to(values)
    columns, few = list[int](), outputs[:_ROWS].cpu()
    for column, offset in zip(values[:_ROWS].T.cpu(), offsets.cpu(), strict=True):
        places = (few + offset == column[:, None]).all(0).nonzero()
        if not len(places):
            return None
        columns.append(int(places[0]))
    return columns if torch.equal(outputs[:, columns] + offsets, values) else None
