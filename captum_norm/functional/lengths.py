"""Euclidean norms of vectors so small, or so large, that their squares leave the range of the dtype."""

import math

import torch
from torch import Tensor


def least_exact(dtype: torch.dtype) -> float:
    """What norms must exceed, so that underflow takes nothing that counts from their squares."""
    limits = torch.finfo(dtype)
    return 4 * math.sqrt(limits.tiny / limits.eps)


def in_range(norms: Tensor) -> bool:
    """Whether no norm lost digits in its square: none is zero or next to it, infinite or NaN."""
    if not norms.numel():
        return True
    low, high = norms.detach().aminmax()
    return least_exact(norms.dtype) < low.item() and high.item() < math.inf


def out_of_range(norms: Tensor) -> Tensor:
    """True where norms may have lost digits: see :func:`in_range`."""
    norms = norms.detach()
    return ((norms > least_exact(norms.dtype)) & (norms < math.inf)).logical_not()


def balanced(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors divided by powers of two, so that the largest entry of each is between 1 and 2: no digit changes.

    Args:
        vectors: (..., D).

    Returns:
        (..., D) and the powers of two, (..., 1); vectors that are zero, or not finite, are divided by one.

    Example:
        >>> balanced(torch.tensor([[3e-30, 0.0], [0.0, 0.0]]))[0]
        tensor([[1.9015, 0.0000],
                [0.0000, 0.0000]])
    """
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1
    power = torch.ldexp(torch.ones_like(largest), exponent)
    power = torch.where((largest > 0) & (largest < torch.inf), power, torch.ones_like(power))
    return vectors / power, power


def length(vectors: Tensor) -> Tensor:
    """‖x‖, (..., D) -> (...).

    Where squares leave the range of the dtype the vector is divided by a power of two first; elsewhere it is torch's
    own norm, bit for bit.

    Example:
        >>> length(torch.tensor([3e-30, 4e-30])), length(torch.tensor([3e30, 4e30]))
        (tensor(5.0000e-30), tensor(5.0000e+30))
    """
    if vectors.is_cuda:
        return _balanced_length(vectors)  # to ask first would be to wait for the device
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    if in_range(norms):
        return norms
    again = out_of_range(norms)
    return norms.masked_scatter(again, _balanced_length(vectors[again]))


def _balanced_length(vectors: Tensor) -> Tensor:
    rows, power = balanced(vectors)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1) * power.squeeze(-1)
    return lengths


def unit(vectors: Tensor) -> Tensor:
    """The vectors divided by their lengths, (..., D) -> (..., D); 0 for 0."""
    norms = length(vectors).unsqueeze(-1)
    return vectors / torch.where(norms > 0, norms, torch.ones_like(norms))
