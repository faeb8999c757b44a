"""How near vectors are to each other: what ALTI and value zeroing compare."""

import torch
from torch import Tensor

from captum_norm.functional.norms import CACHED_ELEMENTS


def l1_distances(whole: Tensor, weights: Tensor, transformed: Tensor, most: int = CACHED_ELEMENTS) -> Tensor:
    """‖y_i − Σ_h a_ij^h f_h(x_j)‖₁ for every pair, a few keys and queries at a time.

    An L1 distance does not factor over heads, so the vectors are formed, as matrix products, and reduced at once.

    Args:
        whole: y, (Q, D).
        weights: a, (H, Q, K).
        transformed: f, (K, H, D).
        most: how many numbers of (keys, queries, D) there may be at a time; at least one vector is.

    Returns:
        (Q, K).

    Example:
        >>> l1_distances(torch.tensor([[3.0, 1.0]]), torch.ones(1, 1, 2), torch.tensor([[[1.0, 1.0]], [[4.0, -2.0]]]))
        tensor([[2., 4.]])
    """
    (queries, width), keys = whole.shape, len(transformed)
    by_key = weights.permute(2, 0, 1).contiguous().transpose(1, 2)
    query_step = min(queries, max(1, most // width))
    key_step = max(1, most // (query_step * width))
    distances = weights.new_empty(queries, keys)
    for first in range(0, queries, query_step):
        rows = slice(first, first + query_step)
        for start in range(0, keys, key_step):
            columns = slice(start, start + key_step)
            gaps = torch.bmm(by_key[columns, rows], transformed[columns]).sub_(whole[rows])
            distances[rows, columns] = gaps.abs_().sum(-1).T
    return distances


def nearness(distances: Tensor, length: Tensor) -> Tensor:
    """max(0, ‖y_i‖₁ − ‖y_i − v_ij‖₁) [Ferrando et al. 2022]: (..., Q, K), ‖y_i‖₁ (..., Q) -> (..., Q, K)."""
    return (length.unsqueeze(-1) - distances).clamp(min=0)


def cosine_distance(vectors: Tensor, others: Tensor) -> Tensor:
    """1 − cos(a, b) as ½ ‖a/‖a‖ − b/‖b‖‖², which keeps its digits where both are nearly the same.

    Args:
        vectors: a, (..., D).
        others: b, broadcastable to ``vectors``.

    Returns:
        (...), between 0 and 2.

    Example:
        >>> cosine_distance(torch.tensor([[2.0, 0.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0]))
        tensor([0., 1.])
    """
    difference = torch.nn.functional.normalize(vectors, dim=-1) - torch.nn.functional.normalize(others, dim=-1)
    return difference.square().sum(-1) / 2
