"""From one map a layer to one map of the whole model."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def normalize_rows(maps: Tensor) -> Tensor:
    """Each row divided by its sum; rows of zeros (padded queries) stay zeros. (..., Q, K) -> (..., Q, K)."""
    sums = maps.sum(-1, keepdim=True)
    return maps / torch.where(sums > 0, sums, torch.ones_like(sums))


def add_half_identity(maps: Tensor) -> Tensor:
    """(A + I) / 2 of row-normalised maps: a residual connection as strong as the attention [Abnar & Zuidema 2020].

    Rows of zeros (padded queries) stay zeros.
    """
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    live = (maps.sum(-1, keepdim=True) > 0).to(maps.dtype)
    return (maps + identity * live) / 2


def rollout(maps: Tensor) -> Tensor:
    """Product of the layers' row-normalised maps, A_L ··· A_1 [Abnar & Zuidema 2020].

    Args:
        maps: (B, L, Q, K) with Q = K, residual connection included, first layer first.

    Returns:
        (B, L, Q, K): entry l is the rollout of layers 1 to l+1; every row of a real query sums to 1.
    """
    first, *later = maps.unbind(1)
    steps = [normalize_rows(first)]
    for layer in later:
        steps.append(normalize_rows(layer) @ steps[-1])
    return torch.stack(steps, dim=1)


def _rollout_rows(maps: Tensor, rows: Tensor) -> Tensor:
    for layer in reversed(maps.unbind(1)):
        rows = rows @ normalize_rows(layer)
    return rows


def _mean_rows(maps: Tensor, rows: Tensor) -> Tensor:
    return rows @ maps.mean(1)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"rollout": _rollout_rows, "mean": _mean_rows}
)
"""How ``attribute`` makes one map of all layers: ``(maps (B, L, Q, K), rows (B, P, Q)) -> (B, P, K)``.

``rows`` are the weights of the positions to explain; only these rows are computed.
"""
