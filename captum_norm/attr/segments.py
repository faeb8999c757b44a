"""Maps whose columns are segments: groups of keys, whose vectors are added before a norm or distance is taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Segments
from captum_norm.functional import length, segment_vectors
from captum_norm.functional.segments import add_own, members


@dataclass(frozen=True, eq=False)
class LayerSegments:
    """The segments of one layer's keys.

    Attributes:
        numbers: the segment of each key, (B, K); −1 for none.
        count: number of segments, G.
        each: whether every key is a segment of its own.
        together: whether the vectors of all queries are added, too.
    """

    numbers: Tensor
    count: int
    each: bool
    together: bool

    @classmethod
    def of(cls, segments: Segments, batch: int, keys: int, device: torch.device) -> "LayerSegments":
        """Take those requested, for as many keys.

        Raises:
            InvalidInputError: if they are of another number of keys.
        """
        if segments.numbers is None:
            return cls(torch.arange(keys, device=device).expand(batch, -1), keys, True, segments.together)
        if (positions := segments.numbers.shape[1]) != keys:
            raise InvalidInputError(
                f"got segments of {positions} positions for a layer with {keys} keys; expected a number for each key, "
                "-1 for no segment; of a model with several stacks choose those with these keys: stacks=[...]"
            )
        return cls(segments.numbers.to(device), segments.count, False, segments.together)

    def with_rest(self) -> "LayerSegments":
        """Make a last segment of the keys that are in none."""
        if self.each:
            return self
        rest = self.numbers.masked_fill(self.numbers < 0, self.count)
        return LayerSegments(rest, self.count + 1, False, self.together)

    def added(self, rows: Tensor) -> Tensor:
        """Add queries, (B, Q, ...) -> (B, 1, ...), if they are explained together."""
        return rows.sum(1, keepdim=True) if self.together else rows

    def vectors(self, layer: Layer) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield what some rows receive from some segments, (B, rows, segments, D), residual connections included."""
        weights = self.added(layer.scaled_weights.transpose(1, 2)).transpose(1, 2)
        keys, most = (
            None if self.each else members(self.numbers, self.count),
            layer.options.budget.piece_elements(weights),
        )
        residual = layer.carry.residual and not layer.cross
        queries = layer.weights.shape[2]
        own = self.numbers[:, self.numbers.shape[1] - queries :] if residual else self.numbers
        for rows, columns, vectors in segment_vectors(weights, layer.values, layer.projection, keys, most):
            added = slice(0, queries) if self.together else rows
            yield (
                rows,
                columns,
                add_own(vectors, layer.stream[:, added], own[:, added], columns) if residual else vectors,
            )

    def measured(self, layer: Layer, measure: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Apply a function of rows and their vectors, (B, rows, segments, D), and collect its numbers, (B, rows, G)."""
        batch, _, queries, _ = layer.weights.shape
        made = layer.output.new_empty(batch, 1 if self.together else queries, self.count)
        for rows, columns, vectors in self.vectors(layer):
            made[:, rows, columns] = measure(rows, vectors)
        return made


def segment_norms(layer: Layer, segments: LayerSegments) -> Tensor:
    """Compute ‖Σ_{j in g} v_ij‖, or ‖Σ_i Σ_{j in g} v_ij‖ of queries together: (B, Q or 1, G)."""
    return segments.measured(layer, lambda _, vectors: length(vectors))


def summed_columns(maps: Tensor, segments: Segments) -> Tensor:
    """Add the columns of each segment, and rows of queries together: (B, L, [H,] Q, K) -> (B, L, [H,] Q or 1, G)."""
    asked = LayerSegments.of(segments, len(maps), maps.shape[-1], maps.device)
    if asked.each:
        summed = maps
    else:
        places = asked.numbers.masked_fill(asked.numbers < 0, asked.count)
        places = places.reshape(len(maps), *[1] * (maps.dim() - 2), -1).expand(maps.shape)
        whole = maps.new_zeros(*maps.shape[:-1], asked.count + 1)
        summed = whole.scatter_add(-1, places, maps)[..., : asked.count]
    return summed.sum(-2, keepdim=True) if asked.together else summed
