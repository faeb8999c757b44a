"""Maps whose columns are segments: groups of keys, whose vectors are added before a norm or distance is taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.forward.record import Layer
from captum_norm.functional import length
from captum_norm.functional.segments import add_own, members, segment_vectors
from captum_norm.functional.vectors import SMALL, term_sizes


@dataclass(frozen=True, eq=False)
class Segments:
    """Groups of keys whose vectors are added before a norm is taken.

    Attributes:
        numbers: the segment of each key, (B, K); −1 for none.
        count: number of segments, G.
        together: whether the vectors of all queries are added, too.
        each: whether every key is a segment of its own; numbers and count are then known for a layer alone.
        per_head: whether vectors of different heads stay apart.
    """

    numbers: Tensor
    count: int
    together: bool
    each: bool = False
    per_head: bool = False

    def among(self, batch: int, keys: int, device: torch.device) -> "Segments":
        """Take them for as many keys.

        Raises:
            InvalidInputError: if they are of another number of keys.
        """
        if self.each:
            return replace(self, numbers=torch.arange(keys, device=device).expand(batch, -1), count=keys)
        if (positions := self.numbers.shape[1]) != keys:
            raise InvalidInputError(
                f"got segments of {positions} positions for a layer with {keys} keys; expected a number for each key, "
                "-1 for no segment; of a model with several stacks choose those with these keys: stacks=[...]"
            )
        return replace(self, numbers=self.numbers.to(device))

    def with_rest(self) -> "Segments":
        """Make a last segment of the keys that are in none."""
        if self.each:
            return self
        rest = self.numbers.masked_fill(self.numbers < 0, self.count)
        return replace(self, numbers=rest, count=self.count + 1)

    def added(self, rows: Tensor) -> Tensor:
        """Add queries, (B, Q, ...) -> (B, 1, ...), if they are explained together."""
        return rows.sum(1, keepdim=True) if self.together else rows

    def vectors(self, layer: Layer) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield what some rows receive from some segments, (B, rows, segments, D), residual connections included."""
        weights = self.added(layer.scaled_weights.transpose(1, 2)).transpose(1, 2)
        keys = None if self.each else members(self.numbers, self.count)
        most = layer.options.budget.piece_elements(weights)
        residual = layer.carry.residual and not layer.cross
        queries = layer.weights.shape[2]
        own = self.numbers[:, self.numbers.shape[1] - queries :] if residual else self.numbers
        for rows, columns, vectors in segment_vectors(weights, layer.values, layer.projection, keys, most):
            added = slice(0, queries) if self.together else rows
            whole = add_own(vectors, layer.stream[:, added], own[:, added], columns) if residual else vectors
            yield rows, columns, whole

    def measured(self, layer: Layer, measure: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Apply a function of rows and their vectors, (B, rows, segments, D), and collect its numbers, (B, rows, G)."""
        batch, _, queries, _ = layer.weights.shape
        made = layer.output.new_empty(batch, 1 if self.together else queries, self.count)
        for rows, columns, vectors in self.vectors(layer):
            made[:, rows, columns] = measure(rows, vectors)
        return made

    def norms(self, layer: Layer) -> Tensor:
        """Compute the norms of the segments' sums, (B, [H,] Q or 1, G)."""
        if self.per_head:
            return self._head_norms(layer)
        norms = self.measured(layer, lambda _, vectors: length(vectors))
        small = norms.detach() < SMALL * torch.finfo(norms.dtype).eps * self._sizes(layer)
        if not small.any():
            return norms
        exact = self.measured(layer.in_float64(), lambda _, vectors: length(vectors))
        return torch.where(small, exact.to(norms), norms)

    def _head_norms(self, layer: Layer) -> Tensor:
        """Compute the norms of each head's sums, (B, H, Q or 1, G), of vectors formed in float64."""
        exact, keys = layer.in_float64(), None if self.each else members(self.numbers, self.count)
        weights = self.added(exact.scaled_weights.transpose(1, 2)).transpose(1, 2)
        most, made = layer.options.budget.piece_elements(weights), list[Tensor]()
        for first in range(0, weights.shape[1], layer.channels):
            head = slice(first, first + layer.channels)
            made.append(weights.new_empty(len(weights), weights.shape[2], self.count))
            pieces = segment_vectors(weights[:, head], exact.values[:, head], exact.projection[head], keys, most)
            for rows, columns, vectors in pieces:
                made[-1][:, rows, columns] = length(vectors)
        return torch.stack(made, 1).to(layer.dtype)

    @torch.no_grad()
    def _sizes(self, layer: Layer) -> Tensor:
        """Compute the root of the sum of squares of a segment's terms, before means are subtracted, (B, Q or 1, G)."""
        terms, width = layer.carry.without_means(), layer.values.shape[-1]
        rows = terms.linear(layer.block.projection.weight(layer.dtype))
        sizes = term_sizes(layer.values.transpose(1, 2), length(rows).unflatten(0, (-1, width)))
        weights = self.added(layer.scaled_weights.transpose(1, 2)).unbind(2)  # by head
        squares = torch.zeros_like(weights[0])
        for alphas, size in zip(weights, sizes.unbind(1), strict=True):
            squares += (alphas * size.unsqueeze(1)).square_()
        if not self.each:
            places = self.numbers.masked_fill(self.numbers < 0, self.count).unsqueeze(1).expand(squares.shape)
            sums = squares.new_zeros(*squares.shape[:2], self.count + 1)
            squares = sums.scatter_add(-1, places, squares)[..., : self.count]
        if layer.carry.residual and not layer.cross:
            stream = replace(layer.scales, branch=None).divide(terms.linear_final(layer.tensors.residual))
            own = self.numbers[:, self.numbers.shape[1] - stream.shape[1] :]
            squares = add_own(squares.unsqueeze(-1), stream.square().sum(-1, keepdim=True), own, slice(0, self.count))
            squares = squares.squeeze(-1)
        return squares.sqrt()
