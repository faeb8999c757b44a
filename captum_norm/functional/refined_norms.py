"""The norms of weighted, transformed vectors whose squares leave the range of the dtype, once more in float64.

Squares go down to 1e-38 in float32, so norms below 1e-15 lose digits and those below 1e-22 vanish: where values are
small, or a key has next to no weight. These few are computed from the vectors of their keys instead.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from captum_norm.functional.lengths import in_range, length, out_of_range
from captum_norm.functional.norms import CACHED_ELEMENTS, chunks, root


def refined_summed_norms(norms: Tensor, weights: Tensor, values: Tensor, projection: Callable[[], Tensor]) -> Tensor:
    """‖Σ_h α_ij f_h(x_j)‖ of :func:`captum_norm.functional.summed_norms`, those out of range anew.

    Args:
        norms: (B, Q, K).
        weights: α, (B, H, Q, K).
        values: (B, K, H, d).
        projection: gives the rows of the (carried) output projection by head in float64, (H, d, D).

    Returns:
        (B, Q, K), the very same tensor where none is out of range.
    """
    if in_range(norms):
        return norms
    # Where no head has weight, as behind a causal mask, zero is right.
    seen = norms.detach().masked_fill((weights.detach().amax(1) > 0).logical_not(), 1)
    if in_range(seen):
        return norms
    index = out_of_range(seen).nonzero()
    example, query, key = index.unbind(1)
    keys, heads = values.shape[1:3]
    chosen, place = (example * keys + key).unique(return_inverse=True)
    matrices = projection()
    grams = torch.cat(
        [
            vectors @ vectors.mT
            for rows in chunks(len(chosen), heads * matrices.shape[-1], CACHED_ELEMENTS)
            for vectors in [_transformed(values.flatten(0, 1)[chosen[rows]], matrices)]
        ]
    )
    alphas = weights.transpose(1, 2)[example, query, :, key].double()
    squares = torch.cat(
        [
            (alphas[rows].unsqueeze(1) @ grams[place[rows]] @ alphas[rows].unsqueeze(2)).flatten()
            for rows in chunks(len(index), heads * heads)
        ]
    )
    return norms.index_put((example, query, key), root(squares).to(norms))


def refined_head_norms(norms: Tensor, values: Tensor, projection: Callable[[], Tensor]) -> Tensor:
    """‖f_h(x_j)‖ of :func:`captum_norm.functional.transformed_norms`, those out of range anew.

    Args:
        norms: (B, H, K).
        values: (B, K, H, d).
        projection: gives the rows of the (carried) output projection by head in float64, (H, d, D).

    Returns:
        (B, H, K), the very same tensor where none is out of range.
    """
    if in_range(norms):
        return norms
    again = out_of_range(norms).transpose(1, 2) & (values.detach() != 0).any(-1)
    if not again.any():
        return norms
    matrices, refined = projection(), norms.transpose(1, 2)
    for head, matrix in enumerate(matrices):
        here = again[..., head]
        lengths = length(values[..., head, :][here].double() @ matrix).to(norms)
        example, key = here.nonzero().unbind(1)
        refined = refined.index_put((example, key, torch.full_like(key, head)), lengths)
    return refined.transpose(1, 2)


def _transformed(values: Tensor, matrices: Tensor) -> Tensor:
    """Values (n, H, d) in float64 through each head's matrix, (n, H, D)."""
    return (values.double().transpose(0, 1) @ matrices).transpose(0, 1)
