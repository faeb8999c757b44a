"""Reading the numbers of linear maps and normalisations off modules of any class.

Module classes differ in how they store their parameters (a Linear's weight is transposed in a Conv1D, Gemma's RMSNorm
adds 1 to its weight). A reading is accepted only if it reproduces what the module computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
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


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """A module's own parameters, for a while, as its forward function finds them.

    A hook of accelerate may keep them on another device or on disk, and brings them for each call of the module.

    Raises:
        UnsupportedModelError: if they are nowhere.
    """
    if not _is_elsewhere(module):
        yield
        return
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        raise UnsupportedModelError(
            f"the weights of a {type(module).__name__} are on no device (meta), and no hook of accelerate brings them; "
            "load the model's weights, or offload module by module (without preload_module_classes)"
        )
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def _is_elsewhere(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters(recurse=False))


def _own(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer of a module, None where it has none of that name."""
    with present(module):
        value = getattr(module, name, None)
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
    def parameter(self) -> Tensor:
        """The module's own weight, as it stores it; on no device (meta) where it is offloaded."""
        return self.module.get_parameter("weight")

    def weight(self, dtype: torch.dtype) -> Tensor:
        """(inputs, outputs)."""
        with present(self.module):
            weight = self.parameter.to(dtype)
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

    def read(self, dtype: torch.dtype, device: torch.device | None = None) -> Normalization:
        """The normalisation with the module's present parameters, on the module's device if none is given."""
        with present(self.module):
            weight, bias = (_own(self.module, name) for name in ("weight", "bias"))
        gain = None if weight is None else weight.to(device, dtype) + self.gain_offset
        return Normalization(self.centered, gain, None if bias is None else bias.to(device, dtype), self.eps)


def read_norm(module: nn.Module, inputs: Tensor, outputs: Tensor) -> NormReader | None:
    """The normalisation that took ``inputs`` to ``outputs`` (..., D), or None if it is no normalisation we know."""
    if inputs.shape != outputs.shape or torch.equal(inputs, outputs):
        return None
    dtype = accumulation_dtype(outputs.dtype)
    readings: list[tuple[float, NormReader]] = []
    for reader in _norm_readings(module, inputs):
        computed = normalize(reader.read(dtype, inputs.device), inputs.to(dtype))
        error = float((computed - outputs).detach().norm())
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
    # Without one torch's RMSNorm uses the input dtype's own, its layer_norm 1e-5.
    epsilons = epsilons or [torch.finfo(inputs.dtype).eps, 1e-5]
    for centered, offset, eps in product((True, False), offsets, epsilons):
        yield NormReader(module, centered, offset, eps, inputs.dtype)
