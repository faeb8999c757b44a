"""Sharing an activation's output among the parts of its input: integrated gradients along a straight path.

For a pre-activation z that is a sum of parts, on the path o + t (z − o) from an origin o, the part a of z − o gets
a ∫₀¹ g′(o + t (z − o)) dt [Sundararajan et al. 2017]. That is a slope times the part, and the slopes' shares add up to
g(z) − g(o).
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]

NODES = 16
"""Points of the Gauss–Legendre quadrature along the path of a gated pair."""


def secant_slope(function: Elementwise, origin: Tensor, point: Tensor) -> Tensor:
    """∫₀¹ g′(o + t (z − o)) dt in closed form: (g(z) − g(o)) / (z − o).

    Args:
        function: g, applied to each entry for itself.
        origin: o, broadcastable to ``point``.
        point: z, (...).

    Returns:
        (...), g′ halfway between o and z where they are too near for their difference to be taken.

    Example:
        >>> secant_slope(torch.relu, torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 1., 1.])
    """
    step = point - origin
    near = step.abs() < _nearest(origin)
    quotient = (function(point) - function(origin)) / torch.where(near, torch.ones_like(step), step)
    return torch.where(near, derivative(function, origin + step / 2), quotient)


def gate_slopes(
    function: Elementwise, factor: Elementwise | None, origins: tuple[Tensor, Tensor], points: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The slopes of a gated pair g(u) h(w), u and w going straight and together from their origins to their values.

    Args:
        function: g.
        factor: h, or None for the identity.
        origins: of u and of w, broadcastable to the points.
        points: u and w, (...) each.

    Returns:
        c_u and c_w, (...) each, with c_u (u − u₀) + c_w (w − w₀) = g(u) h(w) − g(u₀) h(w₀). c_w is
        ∫₀¹ g(u(t)) h′(w(t)) dt by quadrature and c_u what remains, so that the sum holds whatever the error of that.
    """
    (gate_origin, other_origin), (gate, other) = origins, points
    step, other_step = gate - gate_origin, other - other_origin
    near = step.abs() < _nearest(gate_origin)
    gate_slope, other_slope = torch.zeros_like(step), torch.zeros_like(step)
    nodes, weights = _quadrature(NODES)
    for node, weight in zip(nodes, weights, strict=True):
        gate_here, other_here = gate_origin + node * step, other_origin + node * other_step
        value = function(gate_here)
        other_slope = other_slope + weight * (value if factor is None else value * derivative(factor, other_here))
        if near.any():
            there = other_here if factor is None else factor(other_here)
            gate_slope = gate_slope + weight * derivative(function, gate_here) * there
    change = _product(function, factor, gate, other) - _product(function, factor, gate_origin, other_origin)
    remainder = (change - other_slope * other_step) / torch.where(near, torch.ones_like(step), step)
    return torch.where(near, gate_slope, remainder), other_slope


def derivative(function: Elementwise, point: Tensor) -> Tensor:
    """g′ of each entry, (...) -> (...)."""
    traced = torch.is_grad_enabled() and point.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        start = point if traced else point.detach().clone().requires_grad_()
        values = function(start)
        if not values.requires_grad:  # a constant function
            return torch.zeros_like(point)
        slope: Tensor = torch.autograd.grad(values.sum(), start, create_graph=traced)[0]
        return slope


def _product(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Tensor:
    return function(gate) * (other if factor is None else factor(other))


def _nearest(origin: Tensor) -> Tensor:
    """The step below which a difference quotient says less than the derivative halfway."""
    return torch.finfo(origin.dtype).eps ** 0.5 * (1 + origin.abs())


@lru_cache(maxsize=1)
def _quadrature(count: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss–Legendre quadrature on [0, 1] [Golub & Welsch 1969]."""
    with torch.inference_mode(False):
        index = torch.arange(1, count, dtype=torch.float64)
        beside = index / (4 * index**2 - 1).sqrt()
        nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
        return ((nodes + 1) / 2).tolist(), vectors[0].square().tolist()
