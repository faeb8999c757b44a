"""Attributes an activation's output to the parts of its input by integrated gradients along a straight path.

Let a pre-activation z be a sum of parts. On the path o + t (z − o) from an origin o, a part a of z − o gets
a ∫₀¹ g′(o + t (z − o)) dt [Sundararajan et al. 2017]: the part times a slope. The shares add up to g(z) − g(o).
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]

NODES = 16
"""Number of Gauss–Legendre nodes on the path of a gated pair."""


def secant_slope(function: Elementwise, origin: Tensor, point: Tensor) -> Tensor:
    """Compute ∫₀¹ g′(o + t (z − o)) dt in closed form: (g(z) − g(o)) / (z − o).

    Args:
        function: g, elementwise.
        origin: o, broadcastable to ``point``.
        point: z, (...).

    Returns:
        (...); where o and z nearly coincide, g′ at their midpoint.

    Example:
        >>> secant_slope(torch.relu, torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 1., 1.])
    """
    step = point - origin
    near = step.abs() < _smallest_step(origin)
    quotient = (function(point) - function(origin)) / torch.where(near, torch.ones_like(step), step)
    return torch.where(near, derivative(function, origin + step / 2), quotient)


def gate_slopes(
    function: Elementwise, factor: Elementwise | None, origins: tuple[Tensor, Tensor], points: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute the slopes of a gated pair g(u) h(w) along the straight path from the origins of u and w to their values.

    Args:
        function: g.
        factor: h, or None for the identity.
        origins: of u and of w, broadcastable to the points.
        points: u and w, (...) each.

    Returns:
        c_u and c_w, (...) each, with c_u (u − u₀) + c_w (w − w₀) = g(u) h(w) − g(u₀) h(w₀). They are
        ∫₀¹ g′(u(t)) h(w(t)) dt and ∫₀¹ g(u(t)) h′(w(t)) dt by quadrature; its error is assigned to the slope with the
        longer step, so the sum holds regardless.
    """
    (gate_origin, other_origin), (gate, other) = origins, points
    step, other_step = gate - gate_origin, other - other_origin
    gate_slope, other_slope = torch.zeros_like(step), torch.zeros_like(step)
    for node, weight in zip(*_quadrature(NODES), strict=True):
        here, there = gate_origin + node * step, other_origin + node * other_step
        value, factored = function(here), there if factor is None else factor(there)
        gate_slope = gate_slope + weight * derivative(function, here) * factored
        other_slope = other_slope + weight * (value if factor is None else value * derivative(factor, there))
    change = _product(function, factor, gate, other) - _product(function, factor, gate_origin, other_origin)
    left = change - gate_slope * step - other_slope * other_step
    longer = step.abs() >= other_step.abs()
    longest = torch.where(longer, step, other_step)
    left = left / torch.where(longest == 0, torch.ones_like(longest), longest)
    return torch.where(longer, gate_slope + left, gate_slope), torch.where(longer, other_slope, other_slope + left)


def derivative(function: Elementwise, point: Tensor) -> Tensor:
    """Compute g′ elementwise, (...) -> (...)."""
    traced = torch.is_grad_enabled() and point.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        start = point if traced else point.detach().clone().requires_grad_()
        (slopes,) = torch.autograd.grad(function(start).sum(), start, create_graph=traced)
    return slopes


def _product(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Tensor:
    return function(gate) * (other if factor is None else factor(other))


def _smallest_step(origin: Tensor) -> Tensor:
    """Return the step below which the derivative at the midpoint is more accurate than the difference quotient."""
    return math.sqrt(torch.finfo(origin.dtype).eps) * (1 + origin.abs())


@lru_cache(maxsize=1)
def _quadrature(count: int) -> tuple[list[float], list[float]]:
    """Return nodes and weights of Gauss–Legendre quadrature on [0, 1] [Golub & Welsch 1969]."""
    with torch.inference_mode(False):
        index = torch.arange(1, count, dtype=torch.float64, device="cpu")
        beside = index / (4 * index**2 - 1).sqrt()
        nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
        return ((nodes + 1) / 2).tolist(), vectors[0].square().tolist()
