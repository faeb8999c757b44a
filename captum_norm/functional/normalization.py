"""Layer normalisation with its statistics frozen: linear, so it can act on each part of a sum.

Letters in shape comments: B batch, H heads, Q query positions, K key positions, D model width, d head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalization:
    """The numbers of one LayerNorm or RMSNorm.

    Attributes:
        centered: True for LayerNorm (the mean is subtracted), False for RMSNorm.
        gain: γ, shape (D,), or None for a gain of one.
        bias: β, shape (D,), or None.
        eps: ε, added to the mean square under the root.
    """

    centered: bool
    gain: Tensor | None
    bias: Tensor | None
    eps: float


def inverse_scale(norm: Normalization, whole: Tensor) -> Tensor:
    """1/σ of the input that the model normalised.

    Args:
        norm: the normalisation.
        whole: its whole input, (..., D).

    Returns:
        (..., 1): 1/sqrt(variance + ε) for LayerNorm (biased variance), 1/sqrt(mean square + ε) for RMSNorm.
    """
    if norm.centered:
        whole = whole - whole.mean(dim=-1, keepdim=True)
    spread = whole.square().mean(dim=-1, keepdim=True)
    return torch.rsqrt(spread + norm.eps)


def apply_linear(norm: Normalization, part: Tensor) -> Tensor:
    """The linear part of the normalisation, without 1/σ and without β.

    Multiplied by :func:`inverse_scale` of the whole input this is the share of ``part`` in the normalised output:
    γ ⊙ (part − mean(part)) / σ [Kobayashi et al. 2021].

    Args:
        norm: the normalisation.
        part: (..., D).

    Returns:
        γ ⊙ (part − mean(part)), or γ ⊙ part for RMSNorm; (..., D).
    """
    if norm.centered:
        part = part - part.mean(dim=-1, keepdim=True)
    return part if norm.gain is None else part * norm.gain


def normalize(norm: Normalization, whole: Tensor) -> Tensor:
    """The normalisation as the model computes it, (..., D) -> (..., D)."""
    output = apply_linear(norm, whole) * inverse_scale(norm, whole)
    return output if norm.bias is None else output + norm.bias
