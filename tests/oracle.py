"""The direct way, in float64: every vector materialised, every formula written out as in the papers.

Shares no code with the library. Letters as in the design: B, H, Q, K, D, d.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DirectNorm:
    """LayerNorm (centered) or RMSNorm with its statistics taken from ``whole`` and applied to ``part``."""

    centered: bool
    gain: Tensor
    bias: Tensor
    eps: float

    def statistics(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        mean = whole.mean(-1) if self.centered else torch.zeros_like(whole[..., 0])
        sigma = (((whole - mean[..., None]) ** 2).sum(-1) / whole.shape[-1] + self.eps) ** 0.5
        return mean, sigma

    def part(self, part: Tensor, sigma: Tensor) -> Tensor:
        own_mean = part.mean(-1, keepdim=True) if self.centered else 0.0
        return self.gain * (part - own_mean) / sigma[..., None]

    def whole(self, whole: Tensor) -> Tensor:
        mean, sigma = self.statistics(whole)
        return self.gain * (whole - mean[..., None]) / sigma[..., None] + self.bias


def vectors_per_head(weights: Tensor, values: Tensor, projection: Tensor) -> Tensor:
    """α_ij f_h(x_j): (B, H, Q, K), (B, H, K, d), (H, d, D) -> (B, H, Q, K, D)."""
    transformed = torch.einsum("bhkd,hde->bhke", values, projection)
    return weights[..., None] * transformed[:, :, None]


def block_vectors(
    attention: Tensor,
    bias: Tensor,
    residual: Tensor,
    branch: DirectNorm | None,
    add_residual: bool,
    final: DirectNorm | None,
) -> tuple[Tensor, Tensor]:
    """(B, Q, K, D) vectors summed over heads, carried as far as asked; and what belongs to no key, (B, Q, D)."""
    vectors, constant = attention, bias.expand(attention.shape[0], attention.shape[1], -1)
    whole = vectors.sum(2) + constant
    if branch is not None:
        _, sigma = branch.statistics(whole)
        vectors = branch.part(vectors, sigma[:, :, None].expand(vectors.shape[:-1]))
        constant = branch.part(constant, sigma) + branch.bias
    if add_residual:
        own = torch.arange(vectors.shape[1])
        vectors = vectors.clone()
        vectors[:, own, own] += residual
    if final is not None:
        _, sigma = final.statistics(vectors.sum(2) + constant)
        vectors = final.part(vectors, sigma[:, :, None].expand(vectors.shape[:-1]))
        constant = final.part(constant, sigma) + final.bias
    return vectors, constant


def mixing_ratio(vectors: Tensor) -> Tensor:
    """(B, Q, K, D) -> (B, Q)."""
    own_index = torch.arange(vectors.shape[1])
    own = vectors[:, own_index, own_index]
    others = (vectors.sum(2) - own).norm(dim=-1)
    return others / (others + own.norm(dim=-1))
