"""Computes distances between vectors: L1 for ALTI, cosine for value zeroing."""

import torch
from torch import Tensor

from captum_norm.functional.lengths import unit
from captum_norm.functional.norms import CACHED_ELEMENTS


def l1_distances(
    whole: Tensor, weights: Tensor, values: Tensor, projection: Tensor, most: int = CACHED_ELEMENTS
) -> Tensor:
    """Compute ‖y_i − Σ_h a_ij^h v_j^h W_h‖₁ for every pair (i, j), in chunks of keys and queries.

    An L1 distance does not factor over heads, so the vectors are formed by matrix products and reduced immediately.

    Args:
        whole: y, (Q, D).
        weights: a, (H, Q, K).
        values: v, (H, K, d).
        projection: W, (H, d, D).
        most: maximum number of elements of intermediate (keys, queries, D) and (keys, H, D) tensors, or one vector.

    Returns:
        (Q, K).

    Example:
        >>> weights, values = torch.ones(1, 1, 2), torch.tensor([[[1.0, 1.0], [4.0, -2.0]]])
        >>> l1_distances(torch.tensor([[3.0, 1.0]]), weights, values, torch.eye(2)[None])
        tensor([[2., 4.]])
    """
    (queries, width), (heads, keys, _) = whole.shape, values.shape
    by_key = weights.permute(2, 0, 1).contiguous().transpose(1, 2)
    query_step = min(queries, max(1, most // width))
    key_step = max(1, most // (query_step * width))
    block_step = key_step * max(1, most // (heads * width * key_step))
    distances = weights.new_empty(queries, keys)
    for block in range(0, keys, block_step):
        transformed = (values[:, block : block + block_step] @ projection).transpose(0, 1)
        for start in range(0, len(transformed), key_step):
            columns = slice(block + start, min(block + start + key_step, block + len(transformed)))
            for first in range(0, queries, query_step):
                rows = slice(first, first + query_step)
                vectors = torch.bmm(by_key[columns, rows], transformed[start : start + key_step])
                distances[rows, columns] = vectors.sub_(whole[rows]).abs_().sum(-1).T
    return distances


def nearness(distances: Tensor, length: Tensor) -> Tensor:
    """Compute max(0, ‖y_i‖₁ − ‖y_i − v_ij‖₁) [Ferrando et al. 2022]: (..., Q, K), ‖y_i‖₁ (..., Q) -> (..., Q, K)."""
    return (length.unsqueeze(-1) - distances).clamp(min=0)


def cosine_distance(vectors: Tensor, others: Tensor) -> Tensor:
    """Compute 1 − cos(a, b) as ½ ‖a/‖a‖ − b/‖b‖‖², which is accurate for nearly parallel vectors, too.

    Args:
        vectors: a, (..., D).
        others: b, broadcastable to ``vectors``.

    Returns:
        (...), between 0 and 2.

    Example:
        >>> cosine_distance(torch.tensor([[2.0, 0.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0]))
        tensor([0., 1.])
    """
    difference = unit(vectors) - unit(others)
    return difference.square().sum(-1) / 2
