"""Finds the numbers and vectors that multiply the summands in a layer: residual multipliers, layer scales, gates."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from captum_norm.functional import Normalization, scaled
from captum_norm.models.offloading import loaded
from captum_norm.models.projections import NormReader

FactorValue = Tensor | float
SMALLEST = 1e-4
"""Numbers no larger than this are an ε, not a factor."""
_GATE = re.compile(r"tanh\((.+)\)")
_DIVISOR = re.compile(r"1/(.+)")


@dataclass(frozen=True, eq=False)
class Factor:
    """A number, or a vector (D,), in a layer; ``tanh(NAME)`` is a gate, ``1/NAME`` a number that divides."""

    name: str
    module: nn.Module

    @property
    def stored(self) -> FactorValue:
        """The factor as the module stores it, a gate's tanh, or 1 over it; on the meta device if it is offloaded."""
        value: FactorValue = getattr(self.module, _attribute(self.name).rpartition(".")[2])
        if _GATE.fullmatch(self.name) and isinstance(value, Tensor):
            return value.tanh()
        return 1 / value if _DIVISOR.fullmatch(self.name) else value

    @property
    def size(self) -> int:
        """The number of its entries."""
        return self.stored.numel() if isinstance(self.stored, Tensor) else 1

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return its present value."""
        with loaded(self.module):
            return torch.as_tensor(self.stored, dtype=dtype)


def _attribute(name: str) -> str:
    """Return the name of what a factor is made from."""
    made = _GATE.fullmatch(name) or _DIVISOR.fullmatch(name)
    return made[1] if made else name


def multiplied(factor: Factor | None, tensor: Tensor) -> Tensor:
    """Multiply a tensor, (..., D), by a factor, if there is one."""
    if factor is None:
        return tensor
    if factor.size not in (1, tensor.shape[-1]):
        return torch.full_like(tensor, torch.nan)  # of another shape: no sum holds with it
    with loaded(factor.module):
        return tensor * (factor.stored.to(tensor.device) if isinstance(factor.stored, Tensor) else factor.stored)


def scaled_norm(norm: NormReader | None, factor: Factor | None, dtype: torch.dtype) -> Normalization | None:
    """Return what a norm and a factor behind it do together; None if there is neither."""
    read = None if norm is None else norm.read(dtype)
    return read if factor is None else scaled(read, factor.read(dtype))


def read_factor(layer: nn.Module, name: str) -> Factor | None:
    """Return the factor of that name inside a layer; None unless it is a number or a vector."""
    path, _, attribute = _attribute(name).rpartition(".")
    try:
        module = layer.get_submodule(path)
    except AttributeError:
        return None
    value = getattr(module, attribute, None)
    divides, gated = (pattern.fullmatch(name) is not None for pattern in (_DIVISOR, _GATE))
    if isinstance(value, Tensor):
        return Factor(name, module) if value.is_floating_point() and value.dim() <= 1 and not divides else None
    number = isinstance(value, int | float) and not isinstance(value, bool) and not (divides and value == 0)
    return Factor(name, module) if number and not gated else None


Factors = tuple[Factor | None, Factor | None]
"""What multiplies the residual stream, and what multiplies the summand added to it."""

UNFACTORED: Factors = (None, None)


def possible_factors(layer: nn.Module, width: int) -> list[Factors]:
    """Return the factors that a sum in a layer may have, none first: numbers and vectors (D,) of the layer itself.

    A parameter of one number may be a gate, whose tanh is the factor; a number may divide.
    """
    own = dict(layer.named_parameters(recurse=False))
    gates = (f"tanh({name})" for name, parameter in own.items() if parameter.numel() == 1)
    divisors = (f"1/{name}" for name, value in vars(layer).items() if isinstance(value, float))
    held = [
        factor
        for name in (*vars(layer), *own, *gates, *divisors)
        if (factor := read_factor(layer, name)) is not None and _matters(factor, width)
    ]
    return list(product((None, *held), (None, *held)))


def with_scales(held: Iterable[Factors], scales: Iterable[Factor]) -> Iterator[Factors]:
    """Yield every factor of the residual stream alone, combined with every layer scale of the added summand."""
    return product((residual for residual, added in held if added is None), scales)


def _matters(factor: Factor, width: int) -> bool:
    """Whether a factor fits and can be told from others.

    Whole numbers are counts, or change nothing; very small ones are an ε, and leave nothing of what they multiply, as a
    gate does that is still closed. An offloaded parameter has no value yet.
    """
    if factor.size not in (1, width):
        return False
    if isinstance(factor.stored, Tensor):
        return factor.stored.is_meta or bool(factor.stored.any())
    return abs(factor.stored) > SMALLEST and not float(factor.stored).is_integer()
