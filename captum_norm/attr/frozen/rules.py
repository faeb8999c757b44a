"""Defines, as data, how nonlinear steps are frozen so that the network is linear in its input vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from captum_norm.functional import Elementwise, gate_slopes, secant_slope


class Line(NamedTuple):
    """A function of one or two arguments made linear: Σ slope ⊙ argument + constant.

    Attributes:
        slopes: one per argument, in its shape.
        constant: the function's value at zero, (1,).
    """

    slopes: tuple[Tensor, ...]
    constant: Tensor

    def of(self, *arguments: Tensor) -> Tensor:
        """Apply the linear part to other arguments."""
        total = self.slopes[0] * arguments[0]
        for slope, argument in zip(self.slopes[1:], arguments[1:], strict=True):
            total = total + slope * argument
        return total


@dataclass(frozen=True)
class RuleSet:
    """The rules of one method. All freeze the norms' statistics and the routers' decisions.

    Attributes:
        activation: makes the line that replaces g, from g and its argument z.
        product: makes the line that replaces g(u) ⊙ h(w), from g, h (None for the identity), u and w.
        weights: whether attention weights are frozen, so that relevance flows through values alone.
    """

    activation: Callable[[Elementwise, Tensor], Line]
    product: Callable[[Elementwise, Elementwise | None, Tensor, Tensor], Line]
    weights: bool = True


def secant(function: Elementwise, point: Tensor) -> Line:
    """Return the line from zero, with slope (g(z) − g(0)) / z [Modarressi et al. 2023, zero-origin]."""
    zero = point.new_zeros(1)
    return Line((secant_slope(function, zero, point),), function(zero))


def straight_path(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Line:
    """Split a product between its factors along the straight path from zero: integrated gradients."""
    zero = gate.new_zeros(1)
    slopes = gate_slopes(function, factor, (zero, zero), (gate, other))
    return Line(slopes, zero if factor is None else function(zero) * factor(zero))


DECOMPX = RuleSet(activation=secant, product=straight_path)
"""Integrated gradients of activations and gated pairs from zero [Modarressi et al. 2023]."""
