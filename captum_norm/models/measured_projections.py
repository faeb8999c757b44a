"""Measures affine maps: reads the matrix of a module of any class off what it does to unit vectors.

An adapted or quantised linear layer stores no matrix that could be read, but it still computes x W + b. Whether it does
is tested on random inputs, with nothing assumed of its class or its parameters.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.models.hooks import unobserved
from captum_norm.models.precision import EIGHT_BITS, accumulation_dtype
from captum_norm.models.projections import Projection, reproduces, stored_projection, version_of
from captum_norm.models.search.copies import FAILURES, drawn

ROWS = 256
"""How many unit vectors a module is given at a time."""
TOLERATED = 0.04
"""Largest relative error that rounding to eight bits makes in a product with normally distributed numbers.

A step is 1/127 of the largest entry, which is four to five times the typical one.
"""
LARGE = (2.0**60, 2.0**30, 2.0**12, 2.0**7)
"""Factors of the inputs at which an activation is far from linear, unless the module overflows."""


@dataclass(frozen=True, eq=False)
class MeasuredProjection(Projection):
    """A map that no parameter of its module holds: measured on unit vectors, and anew when the module has changed.

    Attributes:
        module: the module.
        received: no rows of its inputs, (0, C), for their dtype and device.
        returned: no rows of its outputs, (0, D).
        rounding: the precision of its products: the dtype of its outputs, ``torch.bfloat16`` if it computes in that
            between others, or :data:`captum_norm.models.precision.EIGHT_BITS` if it rounds its inputs to eight bits.
    """

    module: nn.Module
    received: Tensor
    returned: Tensor
    rounding: torch.dtype

    @property
    def precision(self) -> torch.dtype:
        return self.rounding

    @property
    def dtype(self) -> torch.dtype:
        return self.returned.dtype

    @property
    def outputs(self) -> int:
        return self.returned.shape[1]

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self._read().matrix.to(dtype)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = self._read().bias
        return None if bias is None else bias.to(dtype)

    def version(self) -> object:
        return self._read().state

    def _read(self) -> "_Measured":
        """Measure the map, with gradients to the module's parameters where these are enabled."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.module.parameters()):
            return self._measure()
        kept = _kept.get(self.module)
        if kept is None or not kept.state.holds() or kept.matrix.device != self.returned.device:
            with torch.no_grad():
                kept = _kept[self.module] = self._measure()
        return kept

    def _measure(self) -> "_Measured":
        width = self.received.shape[1]
        bias = _run(self.module, self.received.new_zeros(1, width)).squeeze(0)
        size, pieces = self._size(bias.detach()), []
        for start in range(0, width, ROWS):
            rows = self.received.new_zeros(min(ROWS, width - start), width)
            rows.diagonal(start).fill_(size)
            pieces.append((_run(self.module, rows) - bias) / size)
        return _Measured(_State(self.module), torch.cat(pieces), bias if bool(bias.any()) else None)

    def _size(self, bias: Tensor) -> float:
        """Return the power of two at which an entry of the matrix is about as large as the bias that hides it."""
        width = self.received.shape[1]
        (row,) = drawn(self.received, (1, width))
        with torch.no_grad():
            product = _run(self.module, row).squeeze(0) - bias
        typical = float(product.abs().mean()) / width**0.5
        hidden = float(bias.abs().max()) / max(typical, torch.finfo(bias.dtype).tiny)
        return 2.0 ** round(math.log2(min(max(hidden, 1.0), 1 / torch.finfo(bias.dtype).eps)))


class _Measured(NamedTuple):
    state: "_State"
    matrix: Tensor
    bias: Tensor | None


_kept: WeakKeyDictionary[nn.Module, _Measured] = WeakKeyDictionary()


class _State:
    """What a module's output depends on, as far as it can be seen: its modules, tensors, and plain attributes.

    Args:
        module: the module; it is not kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(ref(part), _plain_names(part)) for part in module.modules()]
        self._root, self._values = ref(module), self._read()

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        root = self._root()
        parts = None if root is None else list(root.modules())
        if parts is None or len(parts) != len(self._modules):
            return False
        return all(part is known() for part, (known, _) in zip(parts, self._modules, strict=True)) and (
            self._read() == self._values
        )

    def _read(self) -> list[object]:
        values: list[object] = []
        for reference, names in self._modules:
            part = reference()
            if part is None:
                return []
            own = vars(part)
            values += [_plain(own.get(name)) for name in names]
            for tensors in (own["_parameters"], own["_buffers"]):
                values += [version_of(tensor) for tensor in tensors.values()]
        return values


# Attributes of every module, among them its hooks, which come and go with our own.
_COMMON = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, list, tuple, set, dict)


def _plain_names(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if name not in _COMMON and isinstance(value, _PLAIN)]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, _PLAIN) else None


def read_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Projection | None:
    """Return the affine map from ``inputs`` (..., C) to ``outputs`` (..., D); None if the module computes none."""
    return stored_projection(module, inputs, outputs) or measured_projection(module, inputs, outputs)


def measured_projection(module: nn.Module, inputs: Tensor, outputs: Tensor) -> MeasuredProjection | None:
    """Return the affine map from ``inputs`` (..., C) to ``outputs`` (..., D) that a module computes of any such inputs.

    Returns:
        the map; None if the module computes none, or if its outputs depend on more than these inputs.
    """
    found = affine_map(module, inputs) if inputs.shape[:-1] == outputs.shape[:-1] else None
    if found is None:
        return None
    with torch.no_grad(), unobserved():
        again = module(inputs)
    return found if reproduces(again, outputs) else None


def may_be_affine(module: nn.Module) -> bool:
    """Whether to test if a module that holds no plain matrix, or more than one, is an affine map."""
    owners = [part for part in module.modules() if any(True for _ in _tensors(part))]
    # Running statistics would change.
    if any(part.training and any(True for _ in part.buffers(recurse=False)) for part in owners):
        return False
    # A sequence's elements are looked at one by one.
    if isinstance(module, (nn.Linear, nn.Embedding, Conv1D, nn.modules.conv._ConvNd, nn.Sequential)):
        return False
    if module in owners:
        return len(owners) > 1 or any(tensor.dim() > 1 for tensor in _tensors(module))
    return len(owners) != 1


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def affine_map(module: nn.Module, like: Tensor) -> MeasuredProjection | None:
    """Return the affine map that a module computes of tensors such as ``like`` (..., C); None if it computes none.

    An affine map preserves sums of vectors, up to its bias, and treats each row alone. Element-wise maps do not count.
    """
    width = like.shape[-1]
    try:
        with torch.no_grad():
            zero = _run(module, like.new_zeros(1, width))
            precision = _precision(module, like, zero)
    except FAILURES:
        return None
    return None if precision is None else MeasuredProjection(module, like.new_empty(0, width), zero[:0], precision)


def _precision(module: nn.Module, like: Tensor, zero: Tensor) -> torch.dtype | None:
    """Return the precision in which a module preserves sums of rows and ignores other rows; None if it does not."""
    normal, other = drawn(like.new_empty(0), *2 * [(4, like.shape[-1])])
    if _is_elementwise(module, normal):
        return None
    # Zeros and ones, whose sums are zeros and ones again.
    first = (normal > 0).to(like)
    second = ((normal <= 0) & (other > 0)).to(like)
    of_normal, of_binary = _products(module, zero, normal, other), _products(module, zero, first, second)
    alone = [_run(module, first[:2]) - zero, torch.zeros_like(zero), of_binary[0][:2]]
    # With small weights, activations are linear near zero.
    sizes = (size for size in LARGE if size < torch.finfo(like.dtype).max ** 0.5)
    larger = (_products(module, zero, size * normal, size * other) for size in sizes)
    of_large = next((found for found in larger if found[-1].isfinite().all()), of_normal)
    real, binary = (
        max(_error(products, zero) for products in several) for several in ((of_normal, of_large), (of_binary, alone))
    )
    exact = 4 * torch.finfo(zero.dtype).eps + 32 * torch.finfo(accumulation_dtype(zero.dtype)).eps
    if real <= exact and binary <= exact:
        return zero.dtype
    # Quantisation by the largest entry represents zeros and ones exactly.
    if real <= TOLERATED and binary <= exact:
        return EIGHT_BITS
    # Rounding of products commutes with powers of two and with the sign.
    twice, negative = (
        _error([(_run(module, factor * normal) - zero) / factor, torch.zeros_like(zero), of_normal[0]], zero)
        for factor in (2, -1)
    )
    rounded = max(real, binary) <= 4 * torch.finfo(torch.bfloat16).eps and max(twice, negative) <= exact
    return torch.bfloat16 if rounded else None


def _products(module: nn.Module, zero: Tensor, *rows: Tensor) -> list[Tensor]:
    """Return what a module adds to its bias for two inputs and for their sum."""
    return [_run(module, row) - zero for row in (*rows, sum(rows, torch.zeros_like(rows[0])))]


def _error(products: Sequence[Tensor], zero: Tensor) -> float:
    """Return the largest relative error of x W + y W as (x + y) W; infinity if there is NaN."""
    first, second, total = (product.double() for product in products)
    sizes = sum(part.norm(dim=-1) for part in (first, second, total, zero.double()))
    error = (first + second - total).norm(dim=-1)
    return float(torch.where(error == 0, error, error / sizes).nan_to_num(torch.inf).max())


def _is_elementwise(module: nn.Module, rows: Tensor) -> bool:
    """Whether each output depends on its own input alone: change every second input, and the others' outputs stay."""
    changed = rows.clone()
    changed[:, ::2] += 1
    before, after = _run(module, rows), _run(module, changed)
    return before.shape == rows.shape and torch.equal(before[:, 1::2], after[:, 1::2])


def _run(module: nn.Module, rows: Tensor) -> Tensor:
    """Return a module's output, (N, D), for rows (N, C), as one sequence."""
    with unobserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module that expects something else
        output = module(rows.unsqueeze(0))
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise TypeError("expected one sequence")
    return output.squeeze(0)
