"""Reading the numbers of linear maps and normalisations off modules of any class.

Module classes differ in how they store their parameters (a Linear's weight is transposed in a Conv1D, Gemma's RMSNorm
adds 1 to its weight). A reading is accepted only if it reproduces what the module computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from captum_norm.functional import Normalization, normalize

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
    def parameter(self) -> Tensor:
        """The module's own weight, as it stores it."""
        return self.module.get_parameter("weight")

    def weight(self, dtype: torch.dtype) -> Tensor:
        """(inputs, outputs)."""
        weight = self.parameter.to(dtype)
        return weight.T if self.transposed else weight

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """(outputs,), or None."""
        bias = getattr(self.module, "bias", None)
        return bias.to(dtype) if isinstance(bias, Tensor) else None


def read_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Projection | None:
    """The affine map that took ``inputs`` (..., C) to ``outputs`` (..., D), or None if the module's weight does not."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    for transposed in (True, False):
        projection = Projection(module, transposed)
        matrix = projection.weight(accumulation_dtype(outputs.dtype))
        if matrix.shape != (inputs.shape[-1], outputs.shape[-1]):
            continue
        computed = inputs.to(matrix.dtype) @ matrix
        bias = projection.bias(matrix.dtype)
        if bias is not None:
            computed = computed + bias
        magnitude = inputs.to(matrix.dtype).abs() @ matrix.abs()
        if reproduces(computed, outputs, magnitude):
            return projection
    return None


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

    def read(self, dtype: torch.dtype) -> Normalization:
        """The normalisation with the module's present parameters."""
        weight, bias = (getattr(self.module, name, None) for name in ("weight", "bias"))
        gain = weight.to(dtype) + self.gain_offset if isinstance(weight, Tensor) else None
        return Normalization(self.centered, gain, bias.to(dtype) if isinstance(bias, Tensor) else None, self.eps)


def read_norm(module: nn.Module, inputs: Tensor, outputs: Tensor) -> NormReader | None:
    """The normalisation that took ``inputs`` to ``outputs`` (..., D), or None if it is no normalisation we know."""
    if inputs.shape != outputs.shape or torch.equal(inputs, outputs):
        return None
    dtype = accumulation_dtype(outputs.dtype)
    readings: list[tuple[float, NormReader]] = []
    for reader in _norm_readings(module, inputs):
        computed = normalize(reader.read(dtype), inputs.to(dtype))
        error = float((computed - outputs).norm())
        # Many model files normalise in float32 whatever the model's dtype.
        for precision in dict.fromkeys((outputs.dtype, _coarser(outputs.dtype, torch.float32))):
            if reproduces(computed, outputs, precision=precision):
                readings.append((error, replace(reader, precision=precision)))
                break
    # In half precision several pass; the right one errs by the module's own rounding alone.
    return min(readings, key=lambda reading: reading[0], default=(0.0, None))[1]


def _coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


def _norm_readings(module: nn.Module, inputs: Tensor) -> Iterator[NormReader]:
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.shape != inputs.shape[-1:]:
        return
    offsets = (0.0, 1.0) if isinstance(weight, Tensor) else (0.0,)
    epsilons = [getattr(module, name) for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
    # torch's RMSNorm without an ε uses the input dtype's own.
    epsilons = epsilons or [torch.finfo(inputs.dtype).eps]
    for centered, offset, eps in product((True, False), offsets, epsilons):
        yield NormReader(module, centered, offset, eps, inputs.dtype)
