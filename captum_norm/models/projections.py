"""Reads the numbers of linear maps and normalisations off modules of any class.

Module classes differ in how they store their parameters (a Linear's weight is transposed in a Conv1D, Gemma's RMSNorm
adds 1 to its weight). A reading must reproduce what the module computed. Where a bias or a gain is far larger than the
rest, others do so, too; so it must also be known from the module's class, or be shown by what the module computes at
parameters and inputs that tell all readings apart.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.functional import Normalization, normalize
from captum_norm.models.layouts import Site
from captum_norm.models.offloading import present
from captum_norm.models.search.copies import copy_with, drawn, forward_of, output_of

LINEAR: Mapping[Any, bool] = MappingProxyType({nn.Linear.forward: True, Conv1D.forward: False})
"""The forward functions of linear maps that need no probe, and whether they store their weight as (outputs, inputs)."""
NORMS: Mapping[Any, bool] = MappingProxyType({nn.LayerNorm.forward: True, nn.RMSNorm.forward: False})
"""The forward functions of norms that need no probe, and whether they subtract the mean."""
# How many inputs a linear map is probed with.
PROBED = 8
EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute norms in: float32, or the model's own if that is wider."""
    return torch.promote_types(dtype, torch.float32)


Same = Callable[..., bool]
"""Whether a computed tensor is one that was seen, given the summands it was computed from."""


def equal(computed: Tensor, actual: Tensor, *_: Tensor) -> bool:
    """Whether two tensors of any shapes have the same entries in the same order."""
    return computed.numel() == actual.numel() and torch.equal(computed.reshape(actual.shape), actual)


def reproduces(computed: Tensor, actual: Tensor, *summands: Tensor, precision: torch.dtype | None = None) -> bool:
    """Whether ``computed`` is ``actual`` up to the rounding of a few operations.

    Args:
        computed: (..., D).
        actual: as many elements.
        summands: tensors whose size bounds the rounding error, where they may cancel.
        precision: the dtype that was rounded to; that of ``actual`` if None.
    """
    if any(tensor.numel() != actual.numel() for tensor in (computed, *summands)):
        return False
    shape = actual.shape
    sizes = [tensor.reshape(shape).cpu().double().norm(dim=-1) for tensor in (actual, *summands)]
    error = (computed.reshape(shape).cpu().double() - actual.cpu().double()).norm(dim=-1)
    # The roundings of single elements add up in quadrature, so a few units in the last place bound the whole vector.
    rounding = 4 * torch.finfo(precision or actual.dtype).eps
    return bool((error <= rounding * sum(sizes)).all())


def _own(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer of a module, None where it has none of that name."""
    value = getattr(module, name, None)
    if isinstance(value, Tensor) and value.is_meta:
        with present(module):
            value = getattr(module, name)
    return value if isinstance(value, Tensor) else None


@dataclass(frozen=True)
class Projection:
    """An affine map that a module computes: inputs @ weight + bias.

    Attributes:
        module: the module.
        transposed: True if its ``weight`` is (outputs, inputs) as in ``nn.Linear``, False as in GPT-2's ``Conv1D``.
    """

    module: nn.Module
    transposed: bool

    @property
    def output(self) -> Site[nn.Module]:
        """Where the module's output is seen."""
        return Site(self.module, "output")

    @property
    def parameter(self) -> Tensor:
        """The module's own weight, as it stores it; on no device (meta) where it is offloaded."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    def weight(self, dtype: torch.dtype) -> Tensor:
        """(inputs, outputs)."""
        weight = cast(Tensor, _own(self.module, "weight")).to(dtype)
        return weight.T if self.transposed else weight

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """(outputs,), or None."""
        bias = _own(self.module, "bias")
        return None if bias is None else bias.to(dtype)


def read_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Projection | None:
    """The affine map that took ``inputs`` (..., C) to ``outputs`` (..., D), or None if the module's weight does not."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    for transposed in (True, False):
        projection = Projection(module, transposed)
        if (weight.T if transposed else weight).shape != (inputs.shape[-1], outputs.shape[-1]):
            continue
        # Between the layers of a sharded model tensors are on the device that the one before computed on.
        matrix = projection.weight(accumulation_dtype(outputs.dtype)).to(outputs.device)
        computed = inputs.to(matrix.dtype) @ matrix
        bias = projection.bias(matrix.dtype)
        if bias is not None:
            computed = computed + bias.to(outputs.device)
        magnitude = inputs.to(matrix.dtype).abs() @ matrix.abs()
        if reproduces(computed, outputs, magnitude) and _is_linear(projection, matrix):
            return projection
    return None


def _is_linear(projection: Projection, matrix: Tensor) -> bool:
    """Whether a module computes inputs @ weight + bias with its weight in this orientation, whatever the numbers."""
    module = projection.module
    known = LINEAR.get(forward_of(module))
    if known is not None:
        return known == projection.transposed
    width = len(matrix)
    # Of the size of the module's own weight, so that nothing else that it may compute is hidden.
    size = float(matrix.detach().abs().mean()) or 1.0
    inputs, other, bias = drawn(matrix, (1, PROBED, width), matrix.shape, matrix.shape[1:])
    other, bias = size * other, size * width**0.5 * bias
    parameters, computed = {"weight": other.T if projection.transposed else other}, inputs @ other
    if projection.bias(matrix.dtype) is not None:
        parameters["bias"], computed = bias, computed + bias
    outputs = output_of(copy_with(module, parameters, inputs), inputs)
    return outputs is not None and reproduces(computed, outputs, inputs.abs() @ other.abs())


@dataclass(frozen=True)
class NormReader:
    """How to read a normalisation module.

    Attributes:
        module: the module.
        centered: LayerNorm (True) or RMSNorm (False).
        gain_offset: what is added to the module's weight, if it has one (1 in Gemma).
        eps: ε.
        precision: the dtype that the module computes in, where that is narrower than its inputs'.
    """

    module: nn.Module
    centered: bool
    gain_offset: float
    eps: float
    precision: torch.dtype

    @property
    def output(self) -> Site[nn.Module]:
        """Where the module's output is seen."""
        return Site(self.module, "output")

    def read(self, dtype: torch.dtype, device: torch.device | None = None) -> Normalization:
        """The normalisation with the module's present parameters, on the module's device if none is given."""
        with present(self.module):
            weight, bias = (_own(self.module, name) for name in ("weight", "bias"))
        gain = None if weight is None else weight.to(device, dtype) + self.gain_offset
        return Normalization(self.centered, gain, None if bias is None else bias.to(device, dtype), self.eps)


def read_norm(module: nn.Module, inputs: Tensor, outputs: Tensor) -> NormReader | None:
    """The normalisation that took ``inputs`` to ``outputs`` (..., D), or None if it is no normalisation we know."""
    if inputs.shape != outputs.shape:
        return None
    dtype = accumulation_dtype(outputs.dtype)
    for reader in _norm_readings(module, inputs):
        computed = normalize(reader.read(dtype, inputs.device), inputs.to(dtype))
        precision = _precision(computed, outputs)
        if precision is not None and _is_norm(reader, inputs):
            return replace(reader, precision=precision)
    return None


def _is_norm(reader: NormReader, inputs: Tensor) -> bool:
    """Whether a module normalises tensors such as ``inputs`` as ``reader`` says, whatever the numbers."""
    module, width = reader.module, inputs.shape[-1]
    known = NORMS.get(forward_of(module))
    if known is not None and isinstance(module.eps, float):
        return (known, 0) == (reader.centered, reader.gain_offset)
    # With and without a mean, so small that ε counts, and large.
    small = max(reader.eps, torch.finfo(inputs.dtype).tiny) ** 0.5
    scale, shift = inputs.new_tensor([[1.0, 1.0, small, 30.0], [0.0, 3.0, 0.0, 0.0]]).unsqueeze(-1)
    rows, *vectors = drawn(inputs, (4, width), (width,), (width,))
    rows = (rows * scale + shift).expand(*inputs.shape[:-2], 4, width)
    names = [name for name in ("weight", "bias") if isinstance(getattr(module, name, None), Tensor)]
    parameters = dict(zip(names, vectors, strict=False))
    outputs = output_of(copy_with(module, parameters, rows), rows)
    gain, bias = (
        parameters[name].to(accumulation_dtype(rows.dtype)) if name in parameters else None
        for name in ("weight", "bias")
    )
    norm = Normalization(reader.centered, None if gain is None else gain + reader.gain_offset, bias, reader.eps)
    computed = normalize(norm, rows.to(accumulation_dtype(rows.dtype)))
    return outputs is not None and outputs.shape == rows.shape and _precision(computed, outputs) is not None


def _precision(computed: Tensor, outputs: Tensor) -> torch.dtype | None:
    """The dtype to whose rounding a norm's output was met; many model files normalise in float32 whatever their own."""
    precisions = dict.fromkeys((outputs.dtype, _coarser(outputs.dtype, torch.float32)))
    return next((dtype for dtype in precisions if reproduces(computed, outputs, precision=dtype)), None)


def _coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


def _norm_readings(module: nn.Module, inputs: Tensor) -> Iterator[NormReader]:
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.shape != inputs.shape[-1:]:
        return
    offsets = (0.0, 1.0) if isinstance(weight, Tensor) else (0.0,)
    epsilons = [getattr(module, name) for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
    # Without one torch's RMSNorm uses that of a dtype, its layer_norm 1e-5.
    dtypes = dict.fromkeys((inputs.dtype, accumulation_dtype(inputs.dtype)))
    epsilons = epsilons or [*(torch.finfo(dtype).eps for dtype in dtypes), 1e-5]
    for centered, offset, eps in product((True, False), offsets, epsilons):
        yield NormReader(module, centered, offset, eps, inputs.dtype)
