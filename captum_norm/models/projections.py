"""Reads the parameters of linear maps and normalisations from modules that store them.

Module classes store their parameters in different ways (Conv1D's weight is that of Linear transposed, Gemma's RMSNorm
adds 1 to its weight). A reading must reproduce what the module computed. If a bias or a gain is far larger than the
rest, several readings do; so the right one must also be known from the module's class, or be confirmed by running the
module with random parameters and inputs, which tell all readings apart.
"""

from abc import ABC, abstractmethod
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
from captum_norm.models.offloading import is_elsewhere, is_sharded, loaded
from captum_norm.models.precision import accumulation_dtype, coarsest
from captum_norm.models.search.copies import copy_with, drawn, forward_of, output_of

LINEAR: Mapping[Any, bool] = MappingProxyType({nn.Linear.forward: True, Conv1D.forward: False})
"""Forward functions of known linear maps, and whether their weight is stored as (outputs, inputs)."""
NORMS: Mapping[Any, bool] = MappingProxyType({nn.LayerNorm.forward: True, nn.RMSNorm.forward: False})
"""Forward functions of known norms, and whether they subtract the mean."""
# How many random inputs a linear map is tried on.
PROBED = 8
EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")

Same = Callable[..., bool]
"""Whether a computed tensor equals one of the model's, given the summands it was computed from."""


def equal(computed: Tensor, actual: Tensor, *_: Tensor) -> bool:
    """Whether two tensors of any shapes have the same entries in the same order."""
    return computed.numel() == actual.numel() and torch.equal(computed.reshape(actual.shape), actual)


def reproduces(computed: Tensor, actual: Tensor, *summands: Tensor, precision: torch.dtype | None = None) -> bool:
    """Whether ``computed`` is ``actual`` up to the rounding of a few operations.

    Args:
        computed: (..., D).
        actual: as many elements.
        summands: tensors that may cancel, whose size then bounds the rounding error.
        precision: the dtype that was rounded to; that of ``actual`` if None.
    """
    if any(tensor.numel() != actual.numel() for tensor in (computed, *summands)):
        return False
    shape = actual.shape
    sizes = [tensor.reshape(shape).cpu().double().norm(dim=-1) for tensor in (actual, *summands)]
    error = (computed.reshape(shape).cpu().double() - actual.cpu().double()).norm(dim=-1)
    # Rounding errors of the elements add up in quadrature, so a few units in the last place bound the whole vector.
    rounding = 4 * torch.finfo(precision or actual.dtype).eps
    return bool((error <= rounding * sum(sizes)).all())


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer of a module as it stores it, perhaps offloaded or sharded; None if it has none."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def _read(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer of a module, loaded if it is offloaded or sharded; None if it has none."""
    tensor = tensor_of(module, name)
    if tensor is None or not is_elsewhere(module, tensor):
        return tensor
    with loaded(module):
        return tensor_of(module, name)


class Projection(ABC):
    """An affine map that a module computes: inputs @ weight + bias.

    Attributes:
        module: the module.
    """

    module: nn.Module

    @property
    def output(self) -> Site[nn.Module]:
        """Where the module's output is seen."""
        return Site(self.module, "output")

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype that the module computes in."""

    @property
    def precision(self) -> torch.dtype:
        """The precision of its output."""
        return self.dtype

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of output features."""

    @abstractmethod
    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (inputs, outputs)."""

    @abstractmethod
    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias, (outputs,), or None."""

    @abstractmethod
    def version(self) -> object:
        """Return what changes whenever weight or bias do."""


@dataclass(frozen=True)
class StoredProjection(Projection):
    """A map whose matrix is its module's ``weight``.

    Attributes:
        module: the module.
        transposed: True if ``weight`` is (outputs, inputs) as in ``nn.Linear``, False as in GPT-2's ``Conv1D``.
    """

    module: nn.Module
    transposed: bool

    @property
    def _parameter(self) -> Tensor:
        """The weight as the module stores it; on the meta device if it is offloaded."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def dtype(self) -> torch.dtype:
        return self._parameter.dtype

    @property
    def outputs(self) -> int:
        return self._parameter.shape[0 if self.transposed else 1]

    def weight(self, dtype: torch.dtype) -> Tensor:
        weight = cast(Tensor, _read(self.module, "weight")).to(dtype)
        return weight.T if self.transposed else weight

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = _read(self.module, "bias")
        return None if bias is None else bias.to(dtype)

    def version(self) -> object:
        if is_sharded(self.module):
            return object()  # the shards change, and the memory of whole weights is used again
        return [version_of(tensor_of(self.module, name)) for name in ("weight", "bias")]


def version_of(tensor: Tensor | None) -> object:
    """Return what changes when a tensor is replaced or written to."""
    return None if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


def plain_matrix(module: nn.Module) -> Tensor | None:
    """Return a module's ``weight`` if it is a matrix of floating-point numbers, None if it is quantised."""
    weight = tensor_of(module, "weight")
    # What a subclass of Tensor holds, and what its products compute, is its own affair.
    plain = type(weight) in (Tensor, nn.Parameter) or is_sharded(module)
    return weight if weight is not None and plain and weight.is_floating_point() and weight.dim() == 2 else None


def stored_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> StoredProjection | None:
    """Return the map from ``inputs`` (..., C) to ``outputs`` (..., D) that the module's ``weight`` gives, or None."""
    weight = plain_matrix(module)
    if weight is None:
        return None
    for transposed in (True, False):
        projection = StoredProjection(module, transposed)
        if (weight.T if transposed else weight).shape != (inputs.shape[-1], outputs.shape[-1]):
            continue
        # In a sharded model, inputs are on the device of the layer before.
        matrix = projection.weight(accumulation_dtype(outputs.dtype)).to(outputs.device)
        computed = inputs.to(matrix.dtype) @ matrix
        bias = projection.bias(matrix.dtype)
        if bias is not None:
            computed = computed + bias.to(outputs.device)
        magnitude = inputs.to(matrix.dtype).abs() @ matrix.abs()
        if reproduces(computed, outputs, magnitude) and _is_linear(projection, matrix):
            return projection
    return None


def _is_linear(projection: StoredProjection, matrix: Tensor) -> bool:
    """Whether a module computes inputs @ weight + bias with its weight in this orientation, for any parameters."""
    module = projection.module
    known = LINEAR.get(forward_of(module))
    if known is not None:
        return known == projection.transposed
    width = len(matrix)
    # As large as the module's own weight, so anything else that it computes still shows.
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
        precision: the dtype that the module computes in, if narrower than that of its inputs.
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
        """Return the normalisation with the module's present parameters, on its own device if none is given."""
        found = (_read(self.module, name) for name in ("weight", "bias"))
        weight, bias = (None if tensor is None else tensor.to(device, dtype) for tensor in found)
        return self.normalization(weight, bias)

    def normalization(self, weight: Tensor | None, bias: Tensor | None) -> Normalization:
        """Return the normalisation with these parameters of the module."""
        return Normalization(self.centered, None if weight is None else weight + self.gain_offset, bias, self.eps)


def read_norm(module: nn.Module, inputs: Tensor, outputs: Tensor) -> NormReader | None:
    """Return the normalisation from ``inputs`` to ``outputs`` (..., D); None if it is neither LayerNorm nor RMSNorm."""
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
    """Whether a module normalises tensors such as ``inputs`` as ``reader`` says, for any parameters."""
    module, width = reader.module, inputs.shape[-1]
    known = NORMS.get(forward_of(module))
    if known is not None and isinstance(module.eps, float):
        return (known, 0) == (reader.centered, reader.gain_offset)
    # With and without a mean, so small that ε counts, and large.
    small = max(reader.eps, torch.finfo(inputs.dtype).tiny) ** 0.5
    scale, shift = inputs.new_tensor([[1.0, 1.0, small, 30.0], [0.0, 3.0, 0.0, 0.0]]).unsqueeze(-1)
    rows, *vectors = drawn(inputs, (4, width), (width,), (width,))
    rows = (rows * scale + shift).expand(*inputs.shape[:-2], 4, width)
    names = [name for name in ("weight", "bias") if tensor_of(module, name) is not None]
    parameters = dict(zip(names, vectors, strict=False))
    outputs = output_of(copy_with(module, parameters, rows), rows)
    dtype = accumulation_dtype(rows.dtype)
    gain, bias = (parameters[name].to(dtype) if name in parameters else None for name in ("weight", "bias"))
    computed = normalize(reader.normalization(gain, bias), rows.to(dtype))
    return outputs is not None and outputs.shape == rows.shape and _precision(computed, outputs) is not None


def _precision(computed: Tensor, outputs: Tensor) -> torch.dtype | None:
    """Return the dtype to which a norm's output was rounded; many models normalise in float32 whatever their dtype."""
    precisions = dict.fromkeys((outputs.dtype, coarsest(outputs.dtype, torch.float32)))
    return next((dtype for dtype in precisions if reproduces(computed, outputs, precision=dtype)), None)


def _norm_readings(module: nn.Module, inputs: Tensor) -> Iterator[NormReader]:
    weight = tensor_of(module, "weight")
    if weight is not None and weight.shape != inputs.shape[-1:]:
        return
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    epsilons = [getattr(module, name) for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
    # Without one, torch's RMSNorm uses the dtype's machine epsilon, and layer_norm 1e-5.
    dtypes = dict.fromkeys((inputs.dtype, accumulation_dtype(inputs.dtype)))
    epsilons = epsilons or [*(torch.finfo(dtype).eps for dtype in dtypes), 1e-5]
    for centered, offset, eps in product((True, False), offsets, epsilons):
        yield NormReader(module, centered, offset, eps, inputs.dtype)
