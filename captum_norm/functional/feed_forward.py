"""Linearises feed-forward networks by freezing the slopes of their activations, so that parts pass separately.

Let a pre-activation z be a sum of parts. On the path o + t (z − o) from an origin o, a part a of z − o gets
a ∫₀¹ g′(o + t (z − o)) dt [Sundararajan et al. 2017]: the part times a slope. The shares add up to g(z) − g(o).

A network computes g(x W_in + b) W_out or, if gated, (g(x W_gate + b) ⊙ h(x W_up + c)) W_out. With the slopes s_i at
query i it becomes x ↦ x W_in diag(s_i) W_out plus a constant. For n parts this takes two products of n × D × F; for
large n it is cheaper to form W_in diag(s_i) W_out once, then n × D × D. In a mixture of experts, each query's experts
and the coefficients of their inputs or outputs are constants.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]

Baseline = Literal["zero", "bias"]
"""Start of the integrated-gradients path: at zero pre-activations, where biases get a share like any part, or at the
biases' pre-activations, where the parts share what they add to the biases' output."""

NODES = 16
"""Number of Gauss–Legendre nodes on the path of a gated pair."""


def secant_slope(function: Elementwise, origin: Tensor, point: Tensor) -> Tensor:
    """Compute ∫₀¹ g′(o + t (z − o)) dt = (g(z) − g(o)) / (z − o); where o and z nearly coincide, g′ at the midpoint."""
    step = point - origin
    # Below this step the derivative at the midpoint is more accurate than the difference quotient.
    near = step.abs() < math.sqrt(torch.finfo(origin.dtype).eps) * (1 + origin.abs())
    quotient = (function(point) - function(origin)) / step.masked_fill(near, 1)
    return quotient.masked_scatter(near, derivative(function, (origin + step / 2)[near]))


def gate_slopes(
    function: Elementwise, factor: Elementwise | None, origins: tuple[Tensor, Tensor], points: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute c_u and c_w with c_u (u − u₀) + c_w (w − w₀) = g(u) h(w) − g(u₀) h(w₀), of a gated pair, (...) each."""
    # ∫₀¹ g′(u(t)) h(w(t)) dt and ∫₀¹ g(u(t)) h′(w(t)) dt along the straight path, by quadrature; its error goes to
    # the slope with the longer step, so the sum holds regardless.
    (gate_origin, other_origin), (gate, other) = origins, points
    step, other_step = gate - gate_origin, other - other_origin
    gate_slope, other_slope = torch.zeros_like(step), torch.zeros_like(step)
    for node, weight in zip(*_quadrature(NODES), strict=True):
        here, there = gate_origin + node * step, other_origin + node * other_step
        value, factored = function(here), there if factor is None else factor(there)
        gate_slope = gate_slope + weight * derivative(function, here) * factored
        other_slope = other_slope + weight * (value if factor is None else value * derivative(factor, there))
    change = neuron_outputs(points, function, factor) - neuron_outputs(origins, function, factor)
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


@lru_cache(maxsize=1)
def _quadrature(count: int) -> tuple[list[float], list[float]]:
    """Return nodes and weights of Gauss–Legendre quadrature on [0, 1] [Golub & Welsch 1969]."""
    with torch.inference_mode(False):
        index = torch.arange(1, count, dtype=torch.float64, device="cpu")
        beside = index / (4 * index**2 - 1).sqrt()
        nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
        return ((nodes + 1) / 2).tolist(), vectors[0].square().tolist()


def neuron_outputs(points: Sequence[Tensor], activation: Elementwise, factor: Elementwise | None = None) -> Tensor:
    """Compute the neurons' outputs from their pre-activations: g(u), or g(u) ⊙ h(w) if gated, (..., F)."""
    hidden = activation(points[0])
    for other in points[1:]:
        hidden = hidden * (other if factor is None else factor(other))
    return hidden


@dataclass(frozen=True)
class Affine:
    """x ↦ x W + b."""

    weight: Tensor  # (inputs, outputs), in the model's dtype
    bias: Tensor | None = None  # (outputs,)

    def linear(self, part: Tensor) -> Tensor:
        """Return x W in the dtype of x, (..., inputs) -> (..., outputs)."""
        return part @ self.weight.to(part.dtype)

    def whole(self, inputs: Tensor) -> Tensor:
        """Return x W + b, (..., inputs) -> (..., outputs)."""
        output = self.linear(inputs)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@dataclass(frozen=True)
class Network:
    """One feed-forward network, or one expert."""

    inner: tuple[Affine, ...]  # the map into the F neurons; if gated, those of the gate and of the other factor
    outer: Affine
    activation: Elementwise  # g
    factor: Elementwise | None = None  # h, on the other factor of a gated network; None for the identity

    def hidden(self, points: Sequence[Tensor]) -> Tensor:
        """Compute the neurons' outputs from their pre-activations, (..., F)."""
        return neuron_outputs(points, self.activation, self.factor)

    def whole(self, inputs: Tensor) -> Tensor:
        """Compute the network's output as the model does, (..., D) -> (..., D)."""
        return self.outer.whole(self.hidden([affine.whole(inputs) for affine in self.inner]))

    def slopes(self, origins: Sequence[Tensor], points: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the slopes for each inner map's pre-activations, (..., F) each."""
        if len(self.inner) == 1:
            return (secant_slope(self.activation, origins[0], points[0]),)
        return gate_slopes(self.activation, self.factor, (origins[0], origins[1]), (points[0], points[1]))


class Use(NamedTuple):
    """A network and the queries it acts on."""

    network: Network
    queries: Tensor | None = None  # indices of its n queries; None for all, in order
    coefficient: Tensor | None = None  # factor of its output, (n, 1)
    scale: Tensor | None = None  # factor of its input, (n, 1)
    expert: int = 0  # its number among the experts of a mixture

    def reads(self, inputs: Tensor) -> Tensor:
        """Select and scale its inputs from those of all queries, (N, D) -> (n, D)."""
        here = inputs if self.queries is None else inputs[self.queries]
        return here if self.scale is None else here * self.scale


def written_by(uses: Iterable[Use], inputs: Tensor) -> Tensor:
    """Sum the networks' outputs as the model does, (N, D) -> (N, D)."""
    total = torch.zeros_like(inputs)
    for use in uses:
        output = use.network.whole(use.reads(inputs))
        output = output if use.coefficient is None else output * use.coefficient
        total = total + output if use.queries is None else total.index_add(0, use.queries, output)
    return total


_Share = tuple[Network, tuple[Tensor, ...], Tensor | None]
"""A network; its slopes for each inner map, coefficient and scale included, (n, F); and each query's row in them."""


class FrozenFeedForward:
    """A sum of feed-forward networks, linearised at N inputs, (N, D), whose ``constant`` part belongs to no key."""

    def __init__(self, uses: Iterable[Use], inputs: Tensor, constant: Tensor, baseline: Baseline) -> None:
        total, self._shares = torch.zeros_like(inputs), list[_Share]()
        for use in uses:
            points = [affine.whole(use.reads(inputs)) for affine in use.network.inner]
            biases = [affine.whole(use.reads(constant)) for affine in use.network.inner]
            origins = biases if baseline == "bias" else [torch.zeros_like(point) for point in points]
            slopes = use.network.slopes(origins, points)
            hidden = use.network.hidden(origins)
            if baseline == "zero":
                hidden = hidden + sum(slope * bias for slope, bias in zip(slopes, biases, strict=True))
            output = use.network.outer.whole(hidden)
            if use.coefficient is not None:
                slopes = tuple(slope * use.coefficient for slope in slopes)
                output = output * use.coefficient
            if use.scale is not None:
                slopes = tuple(slope * use.scale for slope in slopes)
            rows = None
            if use.queries is None:
                total = total + output
            else:
                total = total.index_add(0, use.queries, output)
                rows = torch.full((len(inputs),), -1, device=inputs.device)  # −1: the network does not act on it
                rows[use.queries] = torch.arange(len(use.queries), device=inputs.device)
            self._shares.append((use.network, slopes, rows))
        self.constant = total  # the output of no part, (N, D): the biases' share, and the output at the path's start

    @property
    def numbers_per_part(self) -> int:
        """Number of temporary elements that :meth:`through` holds per part, besides its result."""
        neurons = [sum(slope.shape[-1] for slope in slopes) for _, slopes, _ in self._shares]
        return self.constant.shape[-1] + 2 * max(neurons, default=0)

    def through(self, parts: Tensor, queries: Tensor, numbers: int) -> Tensor:
        """Carry parts of the inputs, (n, D), grouped by query, (n,), to the output; a query's matrix within a limit."""
        here, counts = torch.unique_consecutive(queries, return_counts=True)
        output, singly, start = None, torch.ones_like(queries, dtype=torch.bool), 0
        for query, count in zip(here.tolist(), counts.tolist(), strict=True):
            together = slice(start, start + count)
            matrix, start = self._matrix(query, count, numbers), start + count
            if matrix is not None:
                output = torch.empty_like(parts) if output is None else output
                output[together] = parts[together] @ matrix
                singly[together] = False
        if output is None:
            return self._through_neurons(parts, queries)
        if singly.any():
            output[singly] = self._through_neurons(parts[singly], queries[singly])
        return output

    def _through_neurons(self, parts: Tensor, queries: Tensor) -> Tensor:
        written = []
        for network, slopes, rows in self._shares:
            if rows is None:
                written.append(_linearised(network, slopes, parts, queries))
                continue
            chosen = (rows[queries] >= 0).nonzero().squeeze(1)
            if len(chosen):
                some = _linearised(network, slopes, parts[chosen], rows[queries][chosen])
                written.append(torch.zeros_like(parts).index_add(0, chosen, some))
        return sum(written[1:], written[0]) if written else torch.zeros_like(parts)

    def _matrix(self, query: int, count: int, numbers: int) -> Tensor | None:
        """Return the linear map of a query, (D, D), if it is cheaper than the neurons for so many parts."""
        width, dtype = self.constant.shape[-1], self.constant.dtype
        if count < width // 16:  # too few parts to be worth counting the live neurons
            return None
        active, singly, together, held = [], 0, count * width, 0
        for network, slopes, rows in self._shares:
            row = query if rows is None else int(rows[query])
            if row < 0:
                continue
            here = [slope[row] for slope in slopes]
            live = torch.stack([slope != 0 for slope in here]).any(0)
            active.append((network, here, live))
            singly += count * len(live) * (len(here) + 1)
            together += width * int(live.sum())
            held = max(held, width * (len(live) * (len(here) + 2) + 2 * width))
        if together >= singly or held > numbers:
            return None
        matrix = self.constant.new_zeros(width, width)
        for network, here, live in active:
            inner, outer, factors = [affine.weight for affine in network.inner], network.outer.weight, here
            if not live.all():
                chosen = live.nonzero().squeeze(1)
                inner, outer = [_selected(weight, 1, chosen) for weight in inner], _selected(outer, 0, chosen)
                factors = [slope[chosen] for slope in here]
            scaled = inner[0].to(dtype) * factors[0]
            for weight, factor in zip(inner[1:], factors[1:], strict=True):
                scaled = scaled + weight.to(dtype) * factor
            matrix = matrix + scaled @ outer.to(dtype)
        return matrix


def _linearised(network: Network, slopes: tuple[Tensor, ...], parts: Tensor, rows: Tensor) -> Tensor:
    """Carry parts (m, D) of the queries in these rows of the slopes, (m,), through all neurons."""
    hidden: Tensor | None = None
    for affine, slope in zip(network.inner, slopes, strict=True):
        points, factors = affine.linear(parts), slope.index_select(0, rows)
        if torch.is_grad_enabled():
            hidden = points * factors if hidden is None else hidden + points * factors
        else:
            hidden = points.mul_(factors) if hidden is None else hidden.addcmul_(points, factors)
    return network.outer.linear(cast(Tensor, hidden))  # a network has an inner map


def _selected(matrix: Tensor, axis: int, index: Tensor) -> Tensor:
    """Select rows or columns; of a column-major matrix via its transpose, which is several times faster."""
    if matrix.stride(0) < matrix.stride(1):
        return matrix.mT.index_select(1 - axis, index).mT
    return matrix.index_select(axis, index)
