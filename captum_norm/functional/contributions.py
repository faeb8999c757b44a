"""Measures how much parts contribute to their sum, and how alike rankings are.

L1 distances are ALTI's and those of information flow routes, cosine distances those of value zeroing; a bias is shared
among the parts that it is added to as in DecompX [Modarressi et al. 2023].
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_norm.functional.vectors import CACHED_ELEMENTS, balanced, in_range, length, unit


def l1_distances(
    whole: Tensor,  # y, (Q, D)
    weights: Tensor,  # a, (H, Q, K)
    values: Tensor,  # v, (H, K, d)
    projection: Tensor,  # W, (H, d, D)
    most: int = CACHED_ELEMENTS,  # of elements of intermediate (keys, queries, D) and (keys, H, D) tensors
) -> Tensor:
    """Compute ‖y_i − Σ_h a_ij^h v_j^h W_h‖₁ for every pair (i, j), (Q, K), in chunks of keys and queries."""
    # An L1 distance does not factor over heads, so the vectors are formed by matrix products and reduced immediately.
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


def head_nearness(
    whole: Tensor,  # y, (Q, D)
    weights: Tensor,  # a, (H, Q, K); entries of 0 give exactly 0
    values: Tensor,  # v, (H, K, d)
    projection: Tensor,  # W, (H, d, D)
    most: int = CACHED_ELEMENTS,  # of elements of an intermediate (queries, keys, D) tensor
    *,
    channels: int = 1,  # how many consecutive heads' vectors add up to one, as channels with gates of their own do
) -> Tensor:
    """Compute max(0, ‖y_i‖₁ − ‖y_i − a_ij^h v_j^h W_h‖₁) for every head and pair, (H / channels, Q, K)."""
    # Vectors are formed in chunks, and reduced immediately. Differences are taken entry by entry, before the sum: most
    # vectors are far smaller than y.
    (queries, width), (count, keys, _) = whole.shape, values.shape
    size, negative, live = whole.abs(), -whole, weights.unflatten(0, (-1, channels)).ne(0).any(1)
    key_step = min(keys, max(1, math.isqrt(max(1, most // width))))
    query_step = max(1, most // (key_step * width))
    near = weights.new_zeros(count // channels, queries, keys)
    for head in range(len(near)):
        here = slice(head * channels, (head + 1) * channels)
        for first_key in range(0, keys, key_step):
            columns = slice(first_key, min(first_key + key_step, keys))
            # Behind a causal mask the first queries attend to none of these keys.
            attending = live[head, :, columns].any(1).nonzero()
            if not len(attending):
                continue
            start, end = int(attending[0]), int(attending[-1]) + 1
            transformed = values[here, columns] @ projection[here]
            for first in range(start, end, query_step):
                rows = slice(first, min(first + query_step, end))
                if channels == 1:
                    vectors = weights[here, rows, columns].squeeze(0).unsqueeze(-1) * transformed.squeeze(0)
                else:
                    vectors = torch.einsum("cqk,cke->qke", weights[here, rows, columns], transformed)
                left = negative[rows, None] + vectors
                near[head, rows, columns] = (size[rows, None] - left.abs_()).sum(-1).clamp(min=0)
    return near.where(live, 0)


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


BIAS_SHARES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "absdot": lambda parts, bias: torch.linalg.vecdot(parts, bias).abs(),
        "abssim": lambda parts, bias: cosine_similarity(balanced(parts)[0], balanced(bias)[0], dim=-1).abs(),
        "norm": lambda parts, _: length(parts),
        "equal": lambda parts, _: parts.any(-1).to(parts),
        "cls": lambda parts, _: torch.eye(len(parts), 1).to(parts).expand(parts.shape[:-1]),
    }
)
"""Each part's share of a bias, before normalisation to a sum of 1: parts (K, R, D), bias (D,) or (R, D) -> (K, R)."""


def add_bias(parts: Tensor, bias: Tensor, sharing: str) -> Tensor:
    """Add to each of K parts at R positions, (K, R, D), its share of a bias, (D,) or (R, D), by :data:`BIAS_SHARES`."""
    weights = BIAS_SHARES[sharing](parts, bias)
    if not in_range(weights.sum(0)):
        # Scaling all parts of a position by one power of two changes no share.
        _, powers = balanced(parts.transpose(0, 1).flatten(1))
        weights = BIAS_SHARES[sharing](parts / powers, balanced(bias)[0])
    # Where all shares are 0, nonzero parts share equally, or all parts if all are zero.
    for instead in (parts.any(-1).to(parts), torch.ones_like(weights)):
        weights = weights.where(weights.sum(0) > 0, instead)
    return parts + (weights / weights.sum(0)).unsqueeze(-1) * bias


def centred_ranks(values: Tensor) -> Tensor:
    """Compute twice the difference of each rank from the mean rank, (n,) -> (n,): integers, in float64.

    Ties get their mean rank.

    Example:
        >>> centred_ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
        [1.0, -2.0, 1.0]
    """
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = 2 * counts.cumsum(0) - (counts.double() - 1) - (len(values) + 1)
    return ranks[places]


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Compute Spearman's rank correlation of two lists of n values, (n,) each -> scalar; NaN if either is constant.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([10.0, 30.0, 20.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    one, other = centred_ranks(first), centred_ranks(second)
    correlation: Tensor = one @ other / (one.square().sum() * other.square().sum()).sqrt()
    return correlation
