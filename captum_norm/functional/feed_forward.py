"""Linearises feed-forward networks by freezing the slopes of their activations, so that parts pass separately.

A network computes g(x W_in + b) W_out or, if gated, (g(x W_gate + b) ⊙ h(x W_up + c)) W_out. With the slopes s_i at
query i (:mod:`captum_norm.functional.activation`) it becomes x ↦ x W_in diag(s_i) W_out plus a constant. For n parts
this takes two products of n × D × F; for large n it is cheaper to form W_in diag(s_i) W_out once, then n × D × D. In a
mixture of experts, each query's experts and the coefficients of their inputs or outputs are constants.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from captum_norm.functional.activation import Elementwise, gate_slopes, secant_slope

Baseline = Literal["zero", "bias"]
"""Start of the integrated-gradients path: at zero pre-activations, where biases get a share like any part, or at the
biases' pre-activations, where the parts share what they add to the biases' output."""


@dataclass(frozen=True)
class Affine:
    """x ↦ x W + b.

    Attributes:
        weight: W, (inputs, outputs), in the model's dtype.
        bias: b, (outputs,), or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    def linear(self, part: Tensor) -> Tensor:
        """Return x W in the dtype of x, (..., inputs) -> (..., outputs)."""
        return part @ self.weight.to(part.dtype)

    def whole(self, inputs: Tensor) -> Tensor:
        """Return x W + b, (..., inputs) -> (..., outputs)."""
        output = self.linear(inputs)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def neuron_outputs(points: Sequence[Tensor], activation: Elementwise, factor: Elementwise | None = None) -> Tensor:
    """Compute the neurons' outputs from their pre-activations: g(u), or g(u) ⊙ h(w) if gated, (..., F)."""
    hidden = activation(points[0])
    for other in points[1:]:
        hidden = hidden * (other if factor is None else factor(other))
    return hidden


@dataclass(frozen=True)
class Network:
    """One feed-forward network, or one expert.

    Attributes:
        inner: the map into the F neurons; if gated, those of the gate and of the other factor.
        outer: the map out of the neurons.
        activation: g.
        factor: h, on the other factor of a gated network; None for the identity.
    """

    inner: tuple[Affine, ...]
    outer: Affine
    activation: Elementwise
    factor: Elementwise | None = None

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
        gate, other = points
        return gate_slopes(self.activation, self.factor, (origins[0], origins[1]), (gate, other))


class Use(NamedTuple):
    """A network and the queries it acts on.

    Attributes:
        network: the network.
        queries: indices of its n queries; None for all, in order.
        coefficient: factor of its output, (n, 1), or None.
        scale: factor of its input, (n, 1), or None.
    """

    network: Network
    queries: Tensor | None = None
    coefficient: Tensor | None = None
    scale: Tensor | None = None

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


class _FrozenUse(NamedTuple):
    """A network linearised at its n queries.

    Attributes:
        network: the network.
        slopes: for each inner map, coefficient and scale included, (n, F).
        rows: each of the N queries' row in the slopes, −1 if it has none; None if n = N.
    """

    network: Network
    slopes: tuple[Tensor, ...]
    rows: Tensor | None

    def through(self, parts: Tensor, rows: Tensor) -> Tensor:
        """Carry parts (m, D) of the queries in these rows, (m,), through all neurons."""
        hidden: Tensor | None = None
        for affine, slopes in zip(self.network.inner, self.slopes, strict=True):
            points, factors = affine.linear(parts), slopes.index_select(0, rows)
            if torch.is_grad_enabled():
                hidden = points * factors if hidden is None else hidden + points * factors
            else:
                hidden = points.mul_(factors) if hidden is None else hidden.addcmul_(points, factors)
        return self.network.outer.linear(cast(Tensor, hidden))  # a network has an inner map


class FrozenFeedForward:
    """A feed-forward network, or a sum of several, linearised at each of N queries.

    Args:
        uses: the networks to sum.
        inputs: the whole input of each query, (N, D).
        constant: the part of it that belongs to no key, from biases of norms and projections, (N, D).
        baseline: start of the path.

    Attributes:
        constant: the output that belongs to no part, (N, D): the biases' share, and the output at the path's start.
    """

    def __init__(self, uses: Iterable[Use], inputs: Tensor, constant: Tensor, baseline: Baseline) -> None:
        total, shares = torch.zeros_like(inputs), []
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
                rows = torch.full((len(inputs),), -1, device=inputs.device)
                rows[use.queries] = torch.arange(len(use.queries), device=inputs.device)
            shares.append(_FrozenUse(use.network, slopes, rows))
        self.constant, self._shares = total, shares

    @property
    def numbers_per_part(self) -> int:
        """Number of temporary elements that :meth:`through` holds per part, besides its result."""
        width = self.constant.shape[-1]
        neurons = [sum(slope.shape[-1] for slope in share.slopes) for share in self._shares]
        return width + 2 * max(neurons, default=0)

    def through(self, parts: Tensor, queries: Tensor, numbers: int) -> Tensor:
        """Carry parts of the input to the output.

        Args:
            parts: (n, D), grouped by query.
            queries: the query of each part, (n,).
            numbers: maximum number of elements for one query's matrix and its intermediates; parts of queries that
                need more go through the neurons one by one.

        Returns:
            (n, D).
        """
        here, counts = torch.unique_consecutive(queries, return_counts=True)
        ends = counts.cumsum(0)
        together = [
            (query, slice(end - count, end))
            for query, count, end in zip(here.tolist(), counts.tolist(), ends.tolist(), strict=True)
            if self._matrix_is_cheaper(query, count, numbers)
        ]
        if not together:
            return self._through_neurons(parts, queries)
        output, singly = torch.empty_like(parts), torch.ones_like(queries, dtype=torch.bool)
        for query, chosen in together:
            output[chosen] = parts[chosen] @ self._matrix(query)
            singly[chosen] = False
        if singly.any():
            output[singly] = self._through_neurons(parts[singly], queries[singly])
        return output

    def _through_neurons(self, parts: Tensor, queries: Tensor) -> Tensor:
        written = []
        for share in self._shares:
            if share.rows is None:
                written.append(share.through(parts, queries))
                continue
            rows = share.rows[queries]
            chosen = (rows >= 0).nonzero().squeeze(1)
            if len(chosen):
                some = share.through(parts[chosen], rows[chosen])
                written.append(torch.zeros_like(parts).index_add(0, chosen, some))
        return sum(written[1:], written[0]) if written else torch.zeros_like(parts)

    def _active(self, query: int) -> "list[tuple[_FrozenUse, int, Tensor]]":
        """Return the networks acting on a query, its row in each, and a mask of neurons with nonzero slope."""
        active = []
        for share in self._shares:
            row = query if share.rows is None else int(share.rows[query])
            if row >= 0:
                live = torch.stack([slope[row] != 0 for slope in share.slopes]).any(0)
                active.append((share, row, live))
        return active

    def _matrix_is_cheaper(self, query: int, count: int, numbers: int) -> bool:
        width = self.constant.shape[-1]
        if count < width // 16:  # too few parts to be worth counting the live neurons
            return False
        singly, together, held = 0, count * width, 0
        for share, _, live in self._active(query):
            singly += count * len(live) * (len(share.slopes) + 1)
            together += width * int(live.sum())
            held = max(held, width * (len(live) * (len(share.slopes) + 2) + 2 * width))
        return together < singly and held <= numbers

    def _matrix(self, query: int) -> Tensor:
        matrix = None
        for share, row, live in self._active(query):
            slopes, inner = [slope[row] for slope in share.slopes], [affine.weight for affine in share.network.inner]
            outer = share.network.outer.weight
            if not live.all():
                chosen = live.nonzero().squeeze(1)
                slopes = [slope[chosen] for slope in slopes]
                inner = [_selected(weight, 1, chosen) for weight in inner]
                outer = _selected(outer, 0, chosen)
            inner = [weight.to(self.constant.dtype) for weight in inner]
            scaled = sum((w * s for w, s in zip(inner[1:], slopes[1:], strict=True)), inner[0] * slopes[0])
            product = scaled @ outer.to(self.constant.dtype)
            matrix = product if matrix is None else matrix + product
        return self.constant.new_zeros(self.constant.shape[-1:] * 2) if matrix is None else matrix


def _selected(matrix: Tensor, axis: int, index: Tensor) -> Tensor:
    """Select rows or columns; of a column-major matrix via its transpose, which is several times faster."""
    if matrix.stride(0) < matrix.stride(1):
        return matrix.mT.index_select(1 - axis, index).mT
    return matrix.index_select(axis, index)
