"""Reads affine maps, normalisations and activations from single modules, by what they compute.

Module classes store their parameters in different ways (Conv1D's weight is that of Linear transposed, Gemma's RMSNorm
adds 1 to its weight). A reading must reproduce what the module computed. If a bias or a gain is far larger than the
rest, several readings do; so the right one must also be known from the module's class, or be confirmed by running the
module with random parameters and inputs, which tell all readings apart. An adapted or quantised linear layer stores no
matrix that could be read, but still computes x W + b: its matrix is measured on unit vectors.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.functional import Normalization, normalize
from captum_norm.functional.feed_forward import Elementwise
from captum_norm.models import probes
from captum_norm.models.hooks import evaluation, unobserved
from captum_norm.models.layouts import Site
from captum_norm.models.offloading import is_sharded, loaded_tensors, tensor_of, version_of, versions_of
from captum_norm.models.precision import accumulation_dtype, epsilon_of, least_precise

LINEAR: Mapping[Any, bool] = {nn.Linear.forward: True, Conv1D.forward: False}
"""Forward functions of known linear maps, and whether their weight is stored as (outputs, inputs)."""
NORMS: Mapping[Any, bool] = {nn.LayerNorm.forward: True, nn.RMSNorm.forward: False}
"""Forward functions of known norms, and whether they subtract the mean."""
EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")
ROWS = 8  # how many random inputs a linear map is tried on, and how many positions a step
UNIT_VECTORS = 1024  # how many a module is given at a time
MEASURED_SIZES = (4, -28)  # binary logarithms of the sizes of rows among which one is near the root of a norm's ε

Same = Callable[..., bool]
"""Whether a computed tensor equals one of the model's, given the summands it was computed from."""


def equal(computed: Tensor, actual: Tensor, *_: Tensor) -> bool:
    """Whether two tensors of any shapes have the same entries in the same order."""
    return computed.numel() == actual.numel() and torch.equal(computed.reshape(actual.shape), actual)


def reproduces(computed: Tensor, actual: Tensor, *summands: Tensor, precision: torch.dtype | None = None) -> bool:
    """Whether a tensor, (..., D), is another up to the rounding of a few operations and of summands that may cancel."""
    if any(tensor.numel() != actual.numel() for tensor in (computed, *summands)):
        return False
    shape = actual.shape
    sizes = [tensor.reshape(shape).cpu().double().norm(dim=-1) for tensor in (actual, *summands)]
    error = (computed.reshape(shape).cpu().double() - actual.cpu().double()).norm(dim=-1)
    # Rounding errors of the elements add up in quadrature, so a few units in the last place bound the whole vector.
    rounding = 4 * torch.finfo(precision or actual.dtype).eps
    return bool((error <= rounding * sum(sizes)).all())


@dataclass(frozen=True, eq=False)
class Projection:
    """An affine map that a module computes: inputs @ weight + bias."""

    module: nn.Module
    outputs: int
    dtype: torch.dtype
    precision: torch.dtype  # of its products: bfloat16 between other dtypes, EIGHT_BITS, else its dtype
    read: Callable[[], tuple[Tensor, Tensor | None]]  # the present weight, (inputs, outputs), and bias, (outputs,)
    version: Callable[[], object]  # changes whenever weight or bias do
    transposed: bool | None = None  # whether the module stores (outputs, inputs); None if the weight was measured

    @cached_property
    def output(self) -> Site[nn.Module]:
        """Where the module's output is seen."""
        return Site(self.module, "output")

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (inputs, outputs)."""
        return self.read()[0].to(dtype)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias, (outputs,), or None."""
        bias = self.read()[1]
        return None if bias is None else bias.to(dtype)


def read_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Projection | None:
    """Return the affine map from ``inputs`` (..., C) to ``outputs`` (..., D); None if the module computes none."""
    return _stored_projection(module, inputs, outputs) or _measured_projection(module, inputs, outputs)


def plain_matrix(module: nn.Module) -> Tensor | None:
    """Return a module's ``weight`` if it is a matrix of floating-point numbers, None if it is quantised."""
    weight = tensor_of(module, "weight")
    # What a subclass of Tensor holds, and what its products compute, is its own affair.
    plain = type(weight) in (Tensor, nn.Parameter) or is_sharded(module)
    return weight if weight is not None and plain and weight.is_floating_point() and weight.dim() == 2 else None


def _stored_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Projection | None:
    """Return the map from ``inputs`` to ``outputs`` that the module's ``weight`` gives, or None."""
    stored = plain_matrix(module)
    if stored is None:
        return None
    for transposed in (True, False):
        if (stored.T if transposed else stored).shape != (inputs.shape[-1], outputs.shape[-1]):
            continue
        read: Any = partial(loaded_tensors, module, transposed=transposed)
        dtype = accumulation_dtype(outputs.dtype)
        # In a sharded model, inputs are on the device of the layer before.
        weight, bias = (None if part is None else part.to(outputs.device, dtype) for part in read())
        matrix = cast(Tensor, weight)
        computed = inputs.to(dtype) @ matrix
        computed = computed if bias is None else computed + bias
        # Only where summands cancel, their magnitudes matter.
        fits = reproduces(computed, outputs) or reproduces(computed, outputs, inputs.to(dtype).abs() @ matrix.abs())
        if fits and _is_linear(module, matrix, biased=bias is not None, transposed=transposed):
            # Shards change, and the memory of whole weights is used again.
            version = object if is_sharded(module) else partial(versions_of, module)
            return Projection(module, outputs.shape[-1], stored.dtype, stored.dtype, read, version, transposed)
    return None


def _is_linear(module: nn.Module, matrix: Tensor, *, biased: bool, transposed: bool) -> bool:
    """Whether a module computes inputs @ weight + bias with its weight in this orientation, for any parameters."""
    known = LINEAR.get(probes.forward_of(module))
    if known is not None:
        return known == transposed
    width = len(matrix)
    # As large as the module's own weight, so anything else that it computes still shows.
    size = float(matrix.detach().abs().mean()) or 1.0
    inputs, other, bias = probes.drawn(matrix, (1, ROWS, width), matrix.shape, matrix.shape[1:])
    other, bias = size * other, size * width**0.5 * bias
    parameters, computed = {"weight": other.T if transposed else other}, inputs @ other
    if biased:
        parameters["bias"], computed = bias, computed + bias
    outputs = probes.output_of(probes.copy_with(module, parameters, inputs), inputs)
    return outputs is not None and reproduces(computed, outputs, inputs.abs() @ other.abs())


def _measured_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Projection | None:
    """Return the affine map that a module computes of any such inputs; None if outputs depend on more than these."""
    projection = affine_map(module, inputs) if inputs.shape[:-1] == outputs.shape[:-1] else None
    if projection is None:
        return None
    try:
        with torch.no_grad(), unobserved(), probes.statistics_kept(module):
            again = module(inputs.clone())
    except probes.FAILURES:
        return None
    return projection if isinstance(again, Tensor) and reproduces(again, outputs) else None


_Measured = tuple[tuple[Tensor, Tensor | None], list[object], Tensor]
"""A module's matrix and bias, in which state, and its outputs for zeros and for random numbers, (2, D)."""
_measured: WeakKeyDictionary[nn.Module, _Measured] = WeakKeyDictionary()


def affine_map(module: nn.Module, like: Tensor) -> Projection | None:
    """Return the affine map that a module computes of tensors such as ``like`` (..., C); None if it computes none."""
    # It may have changed without a trace.
    _measured.pop(module, None)
    tested = probes.affinity(module, like)
    if tested is None:
        return None
    returned, precision = tested
    received = like.new_empty(0, like.shape[-1])
    # Not every change leaves a trace; in single precision, sums that do not add up would tell.
    coarse = epsilon_of(precision) > torch.finfo(torch.float32).eps
    checked: int | None = None  # the evaluation in which the module was last compared

    def holds(measured: _Measured) -> bool:
        (matrix, _), state, tried = measured
        if matrix.device != returned.device or state != _state(module):
            return False
        return not coarse or torch.equal(tried, _tried(module, received))

    def present() -> _Measured:
        """Measure the module if it has changed, with gradients to its parameters where these are enabled."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            return _measure(module, received)
        nonlocal checked
        measured, now = _measured.get(module), evaluation()
        if measured is None or now is None or checked != now:
            with torch.no_grad():
                if measured is None or not holds(measured):
                    measured = _measured[module] = _measure(module, received)
            checked = now
        return measured

    return Projection(module, returned.shape[1], returned.dtype, precision, lambda: present()[0], lambda: present()[1])


def _state(module: nn.Module) -> list[object]:
    """Return what a module's output depends on: modules, tensors (not through ``.data``) and plain attributes."""
    values: list[object] = []
    for part in module.modules():
        values += [ref(part), *probes.plain_attributes(part)]
        values += [version_of(tensor) for held in (part._parameters, part._buffers) for tensor in held.values()]
    return values


def _tried(module: nn.Module, received: Tensor) -> Tensor:
    (row,) = probes.drawn(received, (1, received.shape[1]))
    return probes.run_alone(module, torch.cat([torch.zeros_like(row), row]))


def _measure(module: nn.Module, received: Tensor) -> _Measured:
    width, tried = received.shape[1], _tried(module, received)
    bias = tried[0]
    size, pieces = _size(tried.detach(), width), []
    for start in range(0, width, UNIT_VECTORS):
        rows = received.new_zeros(min(UNIT_VECTORS, width - start), width)
        rows.diagonal(start).fill_(size)
        pieces.append((probes.run_alone(module, rows) - bias) / size)
    return (torch.cat(pieces), bias if bool(bias.any()) else None), _state(module), tried


def _size(tried: Tensor, width: int) -> float:
    """Return the power of two at which an entry of the matrix is about as large as the bias that hides it."""
    bias, product = tried
    typical = float((product - bias).abs().mean()) / width**0.5
    hidden = float(bias.abs().max()) / max(typical, torch.finfo(bias.dtype).tiny)
    return 2.0 ** round(math.log2(min(max(hidden, 1.0), 1 / torch.finfo(bias.dtype).eps)))


@dataclass(frozen=True, eq=False)
class NormReader:
    """How to read a normalisation module, a LayerNorm if centered or an RMSNorm: from weight and bias, or measured."""

    module: nn.Module
    centered: bool
    gain_offset: float  # added to the module's weight, 1 in Gemma
    eps: float | None  # None if it is measured
    precision: torch.dtype  # what the module computes in, if narrower than its inputs
    version: Callable[[], object]  # changes whenever its parameters do
    received: Tensor | None = None  # no rows of its inputs, (0, D), if gain and bias are measured

    @cached_property
    def output(self) -> Site[nn.Module]:
        """Where the module's output is seen."""
        return Site(self.module, "output")

    def read(self, dtype: torch.dtype, device: torch.device | None = None) -> Normalization:
        """Return the normalisation with the module's present parameters, on its own device if none is given."""
        if self.received is not None:
            norm = _measured_norm(self.module, self.centered, self.received, self.eps)
            gain, shift = (cast(Tensor, part).to(device, dtype) for part in (norm.gain, norm.bias))
            return replace(norm, gain=gain, bias=shift)
        stored = loaded_tensors(self.module)
        weight, bias = (None if tensor is None else tensor.to(device, dtype) for tensor in stored)
        return self.normalization(weight, bias)

    def normalization(self, weight: Tensor | None, bias: Tensor | None) -> Normalization:
        """Return the normalisation with these parameters of the module."""
        gain = None if weight is None else weight + self.gain_offset
        return Normalization(self.centered, gain, bias, cast(float, self.eps))


def read_norm(module: nn.Module, inputs: Tensor, outputs: Tensor) -> NormReader | None:
    """Return the normalisation from ``inputs`` to ``outputs`` (..., D); None if it is neither LayerNorm nor RMSNorm."""
    if inputs.shape != outputs.shape:
        return None
    dtype = accumulation_dtype(outputs.dtype)
    for reader, test in chain(_norm_readings(module, inputs), _measured_readings(module, inputs)):
        computed = normalize(reader.read(dtype, inputs.device), inputs.to(dtype))
        precision = _precision(computed, outputs)
        if precision is not None and test(reader, inputs):
            return replace(reader, precision=precision)
    return None


def _is_norm(reader: NormReader, inputs: Tensor) -> bool:
    """Whether a module normalises tensors such as ``inputs`` as ``reader`` says, for any parameters."""
    module, width = reader.module, inputs.shape[-1]
    known = NORMS.get(probes.forward_of(module))
    if known is not None and isinstance(module.eps, float):
        return (known, 0) == (reader.centered, reader.gain_offset)
    vectors = probes.drawn(inputs, (width,), (width,))
    names = [name for name in ("weight", "bias") if tensor_of(module, name) is not None]
    parameters = dict(zip(names, vectors, strict=False))
    gain, bias = (parameters.get(name) for name in ("weight", "bias"))
    return _normalises(module, parameters, reader.normalization(gain, bias), inputs)


def _behaves(reader: NormReader, inputs: Tensor) -> bool:
    """Whether a module with its present parameters normalises tensors such as ``inputs`` as was measured."""
    norm = reader.read(torch.float64, inputs.device)
    # In double precision no size is too small, but there ε may be another one.
    exact = replace(reader, eps=None).read(torch.float64)
    if not cast(Tensor, exact.gain).any():
        return False  # what it divides by would be a guess
    return all(_normalises(reader.module, {}, *of) for of in ((exact, inputs.double()), (norm, inputs)))


def _normalises(module: nn.Module, parameters: Mapping[str, Tensor], norm: Normalization, inputs: Tensor) -> bool:
    """Whether a module with these parameters normalises random rows of several sizes so."""
    # With and without a mean, so small that ε counts, and large.
    small = max(norm.eps or 2.0**-20, torch.finfo(inputs.dtype).tiny) ** 0.5
    sizes = [[1.0, 1.0, 4 * small, small, small / 4, 30.0], [0.0, 3.0, 0.0, 0.0, 0.0, 0.0]]
    scale, shift = inputs.new_tensor(sizes).unsqueeze(-1)
    rows = probes.drawn(inputs, (len(scale), inputs.shape[-1]))[0] * scale + shift
    rows = rows.expand(*inputs.shape[:-2], *rows.shape)
    outputs, dtype = probes.output_of(probes.copy_with(module, parameters, rows), rows), accumulation_dtype(rows.dtype)
    gain, bias = (None if part is None else part.to(dtype) for part in (norm.gain, norm.bias))
    computed = normalize(replace(norm, gain=gain, bias=bias), rows.to(dtype))
    return outputs is not None and outputs.shape == rows.shape and _precision(computed, outputs) is not None


def _measured_norm(module: nn.Module, centered: bool, received: Tensor, eps: float | None) -> Normalization:
    """Return γ, β and, unless given, ε of a module that normalises, from what it makes of rows of several sizes."""
    # They are divided by their root mean square σ, so γ is what large ones are multiplied with, and rows whose σ² is
    # near ε tell it: they become σ / sqrt(σ² + ε) times as large.
    (rows,) = probes.drawn(received, (ROWS, received.shape[-1]))
    rows = normalize(Normalization(centered, None, None, 0.0), rows.double())
    sizes = 2.0 ** torch.arange(MEASURED_SIZES[0], MEASURED_SIZES[1], -1, dtype=rows.dtype, device=rows.device)
    points = torch.cat([probes.LARGE[2] * rows, sizes[:, None] * rows[:1]])
    copy: Any = probes.copy_with(module, {}, points)
    positive, negative = copy.forward(torch.cat([points, -points])[None])[0].chunk(2)
    odd, bias = (positive - negative) / 2, ((positive + negative) / 2)[:ROWS].mean(0)
    gain = (odd[:ROWS] * rows).sum(0) / rows.square().sum(0)
    if eps is None:
        shares = odd[ROWS:].detach() @ odd[0].detach() / odd[0].detach().square().sum()
        nearest = int((shares - 0.7).abs().argmin())
        share, size = float(shares[nearest]), float(sizes[nearest])
        eps = 0.0 if share > 0.9 else size**2 * (1 / share**2 - 1)
    return Normalization(centered, gain, bias, eps)


def _measured_readings(module: nn.Module, inputs: Tensor) -> Iterator[tuple[NormReader, Callable[..., bool]]]:
    """Yield the readings of a module that may be a norm whatever its parameters are called and stand for."""
    held = [tensor for held in (module._parameters, module._buffers) for tensor in held.values() if tensor is not None]
    if any(True for _ in module.children()) or any(tensor.numel() > inputs.shape[-1] for tensor in held):
        return
    received = inputs.new_empty(0, inputs.shape[-1])
    # torch takes ε from the dtype if none is given.
    epsilons = dict.fromkeys((None, torch.finfo(inputs.dtype).eps, torch.finfo(accumulation_dtype(inputs.dtype)).eps))
    for centered, eps in product((True, False), epsilons):
        try:
            with torch.no_grad():
                measured = _measured_norm(module, centered, received, None)
        except (*probes.FAILURES, ZeroDivisionError):
            return
        if all(part.isfinite().all() for part in (measured.gain, measured.bias) if part is not None):
            yield NormReader(module, centered, 0.0, eps, inputs.dtype, partial(_state, module), received), _behaves


def _precision(computed: Tensor, outputs: Tensor) -> torch.dtype | None:
    """Return the dtype to which a norm's output was rounded; many models normalise in float32 whatever their dtype."""
    precisions = dict.fromkeys((outputs.dtype, least_precise(outputs.dtype, torch.float32)))
    return next((dtype for dtype in precisions if reproduces(computed, outputs, precision=dtype)), None)


def _norm_readings(module: nn.Module, inputs: Tensor) -> Iterator[tuple[NormReader, Callable[..., bool]]]:
    """Yield the readings of a module whose only tensors are its weight and bias."""
    weight, held = tensor_of(module, "weight"), (module._parameters, module._buffers)
    names = {name for tensors in held for name, tensor in tensors.items() if tensor is not None}
    if names - {"weight", "bias"} or (weight is not None and weight.shape != inputs.shape[-1:]):
        return
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    epsilons = [getattr(module, name) for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
    # Without one, torch's RMSNorm uses the dtype's machine epsilon, and layer_norm 1e-5.
    dtypes = dict.fromkeys((inputs.dtype, accumulation_dtype(inputs.dtype)))
    epsilons = epsilons or [*(torch.finfo(dtype).eps for dtype in dtypes), 1e-5]
    for centered, offset, eps in product((True, False), offsets, epsilons):
        yield NormReader(module, centered, offset, eps, inputs.dtype, partial(versions_of, module)), _is_norm


def read_step(module: nn.Module, inputs: Tensor, output: Tensor) -> NormReader | Projection | Elementwise | None:
    """Return what a module computes, (..., C) to (..., D): a norm, an affine map but a plain matrix, an activation."""
    inputs, output = inputs.detach().reshape(-1, inputs.shape[-1]), output.detach().reshape(-1, output.shape[-1])
    weight, composite = tensor_of(module, "weight"), any(True for _ in module.children())
    # A plain matrix without a bias is no step; of a quantised one the precision counts.
    quantised = weight is not None and weight.dim() > 1 and plain_matrix(module) is None
    if (composite or quantised or tensor_of(module, "bias") is not None) and len(inputs) == len(output):
        projection = read_projection(module, inputs[:ROWS], output[:ROWS])
        if projection is not None:
            return projection
    if inputs.shape != output.shape or torch.equal(inputs, output):
        return None
    if all(parameter.numel() == 1 for parameter in module.parameters()):
        activation: Elementwise = module.forward
        if _is_activation(activation, inputs, output):
            return activation
    return read_norm(module, inputs[:ROWS], output[:ROWS])


def _is_activation(function: Elementwise, inputs: Tensor, output: Tensor) -> bool:
    """Whether every second entry stays the same when the others become zero, and these all get one value."""
    even = (torch.arange(inputs.numel(), device=inputs.device) % 2 == 0).reshape(inputs.shape)
    changed = function(inputs.where(even, 0))
    between = changed[~even]
    same = between.numel() == 0 or bool((between == between[0]).all())
    return same and reproduces(changed.where(even, 0), output.where(even, 0), output)
