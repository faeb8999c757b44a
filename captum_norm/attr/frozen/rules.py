"""Says as data what is frozen of each step that is not linear, so that the network is linear in its input vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from captum_norm.functional import Elementwise, gate_slopes, secant_slope


class Line(NamedTuple):
    """A function of one argument, or two, as a linear one: Σ slope ⊙ argument + constant.

    Attributes:
        slopes: for each argument, in its shape.
        constant: what the function gives without its arguments, (1,).
    """

    slopes: tuple[Tensor, ...]
    constant: Tensor

    def of(self, *arguments: Tensor) -> Tensor:
        """The linear part for other arguments than those that the slopes are for."""
        total = self.slopes[0] * arguments[0]
        for slope, argument in zip(self.slopes[1:], arguments[1:], strict=True):
            total = total + slope * argument
        return total


@dataclass(frozen=True)
class RuleSet:
    """The rules of one method. Statistics of norms and what routers decide are frozen in all of them.

    Attributes:
        activation: the line that takes the place of g, from g and its argument z.
        product: the line that takes the place of g(u) ⊙ h(w), from g, h (None for the identity), u and w.
        weights: whether attention weights are frozen, so that relevance goes through values alone.
    """

    activation: Callable[[Elementwise, Tensor], Line]
    product: Callable[[Elementwise, Elementwise | None, Tensor, Tensor], Line]
    weights: bool = True


def secant(function: Elementwise, point: Tensor) -> Line:
    """The line from zero: slope (g(z) − g(0)) / z [Modarressi et al. 2023, zero-origin]."""
    zero = point.new_zeros(1)
    return Line((secant_slope(function, zero, point),), function(zero))


def straight_path(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Line:
    """Both factors share their product along the straight path from zero: integrated gradients."""
    zero = gate.new_zeros(1)
    slopes = gate_slopes(function, factor, (zero, zero), (gate, other))
    return Line(slopes, zero if factor is None else function(zero) * factor(zero))


DECOMPX = RuleSet(activation=secant, product=straight_path)
"""Integrated gradients of activations and gated pairs from zero [Modarressi et al. 2023]."""
