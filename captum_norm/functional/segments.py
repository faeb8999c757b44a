"""Adds the vectors of groups of keys before a norm or distance is taken.

What query i receives from the keys of segment g is

    v_ig = Σ_{j in g} v_ij = Σ_h (Σ_{j in g} α_ij^h v_jh) W_h,

one context of each head, as attention computes it over these keys alone, through one output projection. Queries that
are added together, too, have the weights Σ_i α_ij^h / σ_i, with each query's own σ_i, and then cost one row.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from captum_norm.functional.vectors import CACHED_ELEMENTS, chunks


def members(numbers: Tensor, count: int) -> list[list[Tensor]]:
    """Return the keys of each of ``count`` segments of each example, from each key's segment, (B, K), or −1."""
    groups = []
    for row in numbers:
        sizes = torch.bincount(row + 1, minlength=count + 1).tolist()
        groups.append(list(row.argsort(stable=True).split(sizes))[1:])
    return groups


def segment_vectors(
    weights: Tensor,  # α, over σ where vectors are, (B, H, Q, K)
    values: Tensor,  # v, (B, H, K, d)
    projection: Tensor,  # W, (H, d, D)
    keys: Sequence[Sequence[Tensor]] | None,  # of each segment of each example; None if each key is a segment
    most: int = CACHED_ELEMENTS,  # of elements of an intermediate result; a single row may exceed it
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield some queries, some segments, and their vectors v_ig, (B, queries, segments, D)."""
    batch, heads, queries, _ = weights.shape
    matrix, width = projection.flatten(0, 1), max(heads * values.shape[-1], projection.shape[-1])
    count = weights.shape[3] if keys is None else len(keys[0])
    for rows in chunks(queries, batch * width, most):
        step = max(1, most // (batch * width * (rows.stop - rows.start)))
        for first in range(0, count, step):
            columns = slice(first, min(first + step, count))
            if keys is None:
                contexts = weights[:, :, rows, columns].unsqueeze(4) * values[:, :, columns].unsqueeze(2)
            else:
                contexts = torch.stack(
                    [
                        torch.stack([alphas[..., here] @ heard[:, here] for here in groups[columns]], 2)
                        for alphas, heard, groups in zip(weights[:, :, rows], values, keys, strict=True)
                    ]
                )  # (B, H, rows, columns, d)
            yield rows, columns, contexts.permute(0, 2, 3, 1, 4).flatten(3) @ matrix


def add_own(vectors: Tensor, stream: Tensor, numbers: Tensor, columns: slice) -> Tensor:
    """Add residual streams, (B, Q, D), to the vectors, (B, Q or 1, segments, D), of their queries' segments, (B, Q)."""
    inside = (numbers >= columns.start) & (numbers < columns.stop)
    example, query = inside.nonzero(as_tuple=True)
    row = query if vectors.shape[1] == stream.shape[1] else torch.zeros_like(query)
    places = (example, row, numbers[inside] - columns.start)
    return vectors.index_put(places, stream[example, query], accumulate=True)
