"""Linearises layer normalisation by freezing its statistics, so that it acts on each part of a sum.

A gain alone (layer scale, a residual multiplier) is a normalisation without statistics.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalization:
    """Parameters of a LayerNorm or RMSNorm, or a gain alone.

    Attributes:
        centered: True for LayerNorm (the mean is subtracted), False for RMSNorm.
        gain: γ, (D,) or a scalar; None for one.
        bias: β, (D,), or None.
        eps: ε, added to the mean square under the root.
        statistics: False for a gain alone, which divides by nothing.
    """

    centered: bool
    gain: Tensor | None
    bias: Tensor | None
    eps: float
    statistics: bool = True


def scaled(norm: Normalization | None, factor: Tensor) -> Normalization:
    """Multiply a normalisation by a factor, (D,) or a scalar; for None, return the factor as a gain."""
    if norm is None:
        return Normalization(centered=False, gain=factor, bias=None, eps=0.0, statistics=False)
    gain = factor if norm.gain is None else norm.gain * factor
    return replace(norm, gain=gain, bias=None if norm.bias is None else norm.bias * factor)


def inverse_scale(norm: Normalization, whole: Tensor) -> Tensor:
    """Compute 1/σ of a normalisation's whole input, (..., D) -> (..., 1); of a gain alone it is 1.

    σ is sqrt(variance + ε) for LayerNorm (biased variance), sqrt(mean square + ε) for RMSNorm.
    """
    if not norm.statistics:
        return torch.ones_like(whole[..., :1])
    if norm.centered:
        whole = whole - whole.mean(dim=-1, keepdim=True)
    spread = whole.square().mean(dim=-1, keepdim=True)
    return torch.rsqrt(spread + norm.eps)


def apply_linear(norm: Normalization, part: Tensor) -> Tensor:
    """Apply the linear part of a normalisation, without 1/σ and β.

    Multiplied by :func:`inverse_scale` of the whole input, this is the share of ``part`` in the normalised output:
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


def apply_transposed(norm: Normalization, direction: Tensor) -> Tensor:
    """Apply the transpose of :func:`apply_linear`, (..., D): ⟨direction, apply_linear(part)⟩ = ⟨result, part⟩."""
    direction = direction if norm.gain is None else direction * norm.gain
    return direction - direction.mean(dim=-1, keepdim=True) if norm.centered else direction


def normalize(norm: Normalization, whole: Tensor) -> Tensor:
    """Normalise as the model does, (..., D) -> (..., D)."""
    output = apply_linear(norm, whole) * inverse_scale(norm, whole)
    return output if norm.bias is None else output + norm.bias
