"""Numbers and vectors that a layer multiplies by: residual multipliers, layer scale."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

from captum_norm.models.tracing import Trace

FactorValue = Tensor | float


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor in a layer.

    Attributes:
        name: of the parameter or attribute inside the layer.
        value: a number, or a vector (D,).
    """

    name: str
    value: FactorValue

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self.value.numel() if isinstance(self.value, Tensor) else 1

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor, (..., D), times this."""
        return tensor * self.value


def multiplied(factor: Factor | None, tensor: Tensor) -> Tensor:
    """The tensor, (..., D), times a factor, if there is one."""
    return tensor if factor is None else factor.of(tensor)


def read_factor(layer: nn.Module, name: str) -> Factor | None:
    """The factor of that name inside a layer; None if there is no number or vector."""
    value: Any = layer
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, Tensor):
        return Factor(name, value) if value.is_floating_point() and value.dim() <= 1 else None
    return Factor(name, float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


Factors = tuple[Factor | None, Factor | None]
"""What multiplies the residual stream, and what is added to it."""

UNFACTORED: Factors = (None, None)


def possible_factors(layer: nn.Module, width: int) -> list[Factors]:
    """The factors that a sum in a layer may have, none first: numbers and vectors (D,) that the layer holds itself."""
    held = [
        factor
        for name in (*vars(layer), *(name for name, _ in layer.named_parameters(recurse=False)))
        if (factor := read_factor(layer, name)) is not None and _matters(factor, width)
    ]
    return list(product((None, *held), (None, *held)))


def layer_scales(trace: Trace, branch: Tensor) -> Iterator[Factor]:
    """The one parameter of each module that receives ``branch``, (..., D)."""
    for call in trace.calls_on(branch):
        parameters = list(call.module.named_parameters())
        if len(parameters) == 1 and parameters[0][1].shape == branch.shape[-1:]:
            name, value = parameters[0]
            yield Factor(f"{trace.name(call.module)}.{name}", value)


def _matters(factor: Factor, width: int) -> bool:
    """Whether a factor fits, and is no whole number: those count things, or change nothing."""
    return factor.size in (1, width) and not (isinstance(factor.value, float) and factor.value.is_integer())
