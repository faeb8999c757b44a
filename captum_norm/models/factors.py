"""Finds the numbers and vectors that multiply the summands in a layer: residual multipliers, layer scales, gates."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.functional import Normalization, scaled
from captum_norm.models.offloading import loaded
from captum_norm.models.projections import NormReader

FactorValue = Tensor | float
SMALLEST = 1e-4
"""Numbers no larger than this are an ε, not a factor."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A number, or a vector (D,), in a layer; ``tanh(NAME)`` is a gate, ``1/NAME`` a number that divides."""

    name: str
    module: nn.Module
    attribute: str
    form: Literal["plain", "gate", "divisor"]

    @property
    def stored(self) -> FactorValue:
        """Its present value; on the meta device if it is offloaded."""
        value: Any = getattr(self.module, self.attribute)
        stored: FactorValue = value.tanh() if self.form == "gate" else 1 / value if self.form == "divisor" else value
        return stored

    @property
    def size(self) -> int:
        """The number of its entries."""
        stored = self.stored
        return stored.numel() if isinstance(stored, Tensor) else 1

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return its present value."""
        with loaded(self.module):
            return torch.as_tensor(self.stored, dtype=dtype)


def read_factor(layer: nn.Module, name: str) -> Factor | None:
    """Return the factor of that name inside a layer; None unless it is a number or a vector."""
    form: Literal["plain", "gate", "divisor"] = "plain"
    path = name
    if name.startswith("tanh(") and name.endswith(")"):
        form, path = "gate", name[5:-1]
    elif name.startswith("1/"):
        form, path = "divisor", name[2:]
    parent, _, attribute = path.rpartition(".")
    try:
        module = layer.get_submodule(parent)
    except AttributeError:
        return None
    value = getattr(module, attribute, None)
    if isinstance(value, Tensor):
        fits = value.is_floating_point() and value.dim() <= 1 and form != "divisor"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and form != "gate" and not (form == "divisor" and value == 0)
    return Factor(name, module, attribute, form) if fits else None


def multiplied(factor: Factor | None, tensor: Tensor) -> Tensor:
    """Multiply a tensor, (..., D), by a factor, if there is one."""
    if factor is None:
        return tensor
    if factor.size not in (1, tensor.shape[-1]):
        return torch.full_like(tensor, torch.nan)  # of another shape: no sum holds with it
    with loaded(factor.module):
        stored = factor.stored
        return tensor * (stored.to(tensor.device) if isinstance(stored, Tensor) else stored)


def scaled_norm(norm: NormReader | None, factor: Factor | None, dtype: torch.dtype) -> Normalization | None:
    """Return what a norm and a factor behind it do together; None if there is neither."""
    read = None if norm is None else norm.read(dtype)
    return read if factor is None else scaled(read, factor.read(dtype))


Factors = tuple[Factor | None, Factor | None]
"""What multiplies the residual stream, and what multiplies the summand added to it."""

UNFACTORED: Factors = (None, None)


def possible_factors(layer: nn.Module, width: int) -> list[Factors]:
    """Return the factors that a sum in a layer may have, none first: numbers and vectors (D,) of the layer itself.

    A parameter of one number may be a gate, whose tanh is the factor; a number may divide.
    """
    parameters = dict(layer.named_parameters(recurse=False))
    gates = (f"tanh({name})" for name, parameter in parameters.items() if parameter.numel() == 1)
    divisors = (f"1/{name}" for name, value in vars(layer).items() if isinstance(value, float))
    named = (read_factor(layer, name) for name in (*vars(layer), *parameters, *gates, *divisors))
    held = [factor for factor in named if factor is not None and _matters(factor, width)]
    return list(product((None, *held), (None, *held)))


def with_scales(held: Iterable[Factors], scales: Iterable[Factor]) -> Iterator[Factors]:
    """Yield every factor of the residual stream alone, combined with every layer scale of the added summand."""
    return product((residual for residual, added in held if added is None), scales)


def _matters(factor: Factor, width: int) -> bool:
    """Whether a factor fits and can be told from others.

    Whole numbers are counts, or change nothing; very small ones are an ε, and leave nothing of what they multiply, as a
    gate does that is still closed. An offloaded parameter has no value yet.
    """
    stored = factor.stored
    if isinstance(stored, Tensor):
        return stored.numel() in (1, width) and (stored.is_meta or bool(stored.any()))
    return abs(stored) > SMALLEST and not float(stored).is_integer()
