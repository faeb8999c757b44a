"""Carries the vectors of attention's output through a layer, with the norms' statistics frozen.

After its output projection, attention's output o_i = Σ_j Σ_h α_ij f_h(x_j) + b passes through at most

    branch norm  ->  + residual x_i  ->  final norm

(post-norm layers have only the final norm, sandwich and norm-on-output layers only the branch norm, pre-norm layers
neither). With the statistics of their whole inputs frozen, the norms are linear, so each part passes separately:

    part of o_i  ↦  part M_b M_f / (σ_b σ_f)        part of x_i  ↦  part M_f / σ_f

with M the linear part of a norm and 1/σ one number per query. A gain alone (layer scale, a residual multiplier) is a
norm without statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from captum_norm.functional.vectors import SMALL, length, ratio


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


@dataclass(frozen=True)
class Scales:
    """1/σ of a carry's norms at each query, (B, Q, 1); None for an absent norm."""

    branch: Tensor | None
    final: Tensor | None
    second: Tensor | None = None

    def at(self, index: Tensor) -> "Scales":
        """Select some queries of scales (N, 1)."""
        return Scales(*(None if scale is None else scale[index] for scale in (self.branch, self.final, self.second)))

    def divide(self, part: Tensor) -> Tensor:
        """Divide ``part``, (B, Q, ...), by every σ, which :meth:`Carry.linear` leaves out."""
        for scale in (self.branch, self.final, self.second):
            if scale is not None:
                part = part * scale
        return part


@dataclass(frozen=True)
class Carry:
    """The steps after the output projection that a scope includes.

    Attributes:
        branch: norm, or gain alone, of the attention output before the residual is added, or None.
        residual: whether x_i is added.
        final: norm after the residual sum, or None.
        second: norm after that one, or None.
    """

    branch: Normalization | None = None
    residual: bool = False
    final: Normalization | None = None
    second: Normalization | None = None

    @cached_property
    def norms(self) -> tuple[bool, bool, bool]:
        """Whether it has a branch norm, a final norm and a second one."""
        return self.branch is not None, self.final is not None, self.second is not None

    def linear(self, part: Tensor) -> Tensor:
        """Multiply a part of the attention output, or the rows of its projection, by M_b M_f, (..., D) -> (..., D)."""
        return self.linear_final(part if self.branch is None else apply_linear(self.branch, part))

    def linear_final(self, part: Tensor) -> Tensor:
        """Multiply a part of the residual stream by M_f, (..., D) -> (..., D)."""
        for norm in (self.final, self.second):
            part = part if norm is None else apply_linear(norm, part)
        return part

    def without_means(self) -> "Carry":
        """Return the steps without subtraction of means: how large is what may cancel there."""
        norms = {name: getattr(self, name) for name in ("branch", "final", "second")}
        return replace(
            self, **{name: replace(norm, centered=False) for name, norm in norms.items() if norm is not None}
        )

    def transposed(self, directions: Tensor) -> Tensor:
        """Multiply directions (D, k) by (M_b M_f)ᵀ: parts times the result are their carried selves times these."""
        rows = directions.T
        for norm in (self.second, self.final, self.branch):
            rows = rows if norm is None else apply_transposed(norm, rows)
        return rows.T

    def final_bias(self, scales: Scales) -> Tensor | None:
        """Return what the norms after the residual sum add, (D,), or (B, Q, D) if there are two, or None."""
        bias = None if self.final is None else self.final.bias
        if self.second is None or scales.second is None:
            return bias
        if bias is None:
            return self.second.bias
        bias = apply_linear(self.second, bias) * scales.second
        return bias if self.second.bias is None else bias + self.second.bias

    def vector(self, part: Tensor, stream: Tensor | None, scales: Scales) -> Tensor:
        """Carry parts (..., D) of the attention output and, if the carry adds it, of the residual stream."""
        if self.branch is not None and scales.branch is not None:
            part = apply_linear(self.branch, part) * scales.branch
        if self.residual and stream is not None:
            part = part + stream
        return replace(scales, branch=None).divide(self.linear_final(part))

    def constant(self, part: Tensor, stream: Tensor | None, scales: Scales) -> Tensor:
        """Carry what belongs to no key; unlike :meth:`vector`, add the norms' β."""
        if self.branch is not None and scales.branch is not None:
            part = apply_linear(self.branch, part) * scales.branch
            part = part if self.branch.bias is None else part + self.branch.bias
        part, bias = replace(self, branch=None).vector(part, stream, scales), self.final_bias(scales)
        return part if bias is None else part + bias

    def scales(self, attention_output: Tensor, total: Tensor, end: Tensor | None = None) -> Scales:
        """Freeze the norms' statistics at their inputs: o, bias included; its sum with the residual; and the end."""
        inputs = zip((self.branch, self.final, self.second), (attention_output, total, end), strict=True)
        return Scales(
            *(None if norm is None or whole is None else inverse_scale(norm, whole) for norm, whole in inputs)
        )


@torch.no_grad()
def lose_digits(ends: Sequence[Carry], rows: Tensor, factors: Tensor, vectors: Tensor) -> bool:
    """Return whether some vectors (n, D) = factors (n, N) @ rows (N, D) are at some end small beside their terms."""
    # The terms as they are before means are subtracted.
    least, norm = SMALL * torch.finfo(vectors.dtype).eps, torch.linalg.vector_norm
    for end in ends:
        terms = norm(factors * norm(end.without_means().linear(rows), dim=-1), dim=-1)
        if (norm(end.linear(vectors), dim=-1) < least * terms).any():
            return True
    return False


def measure_end(
    carry: Carry,  # the scope's steps
    scales: Scales,
    own: Tensor,  # Σ_h α_ii f_h(x_i) M_b M_f, (B, Q, D)
    others: Tensor,  # ‖Σ_{j≠i} Σ_h α_ij f_h(x_j) M_b M_f‖, (B, Q)
    sketch: Tensor,  # attention's output o M_b M_f Ω, (B, Q, k)
    residual: Tensor,  # x, (B, Q, D)
    reference: Tensor,  # what the model computed at the scope's end, (B, Q, D)
    directions: Tensor,  # Ω, (D, k)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ‖v_ii‖, ‖Σ_{j≠i} v_ij‖ and mixing ratio, (B, Q), and on Ω what all parts lack of the end, and it."""
    behind = replace(scales, branch=None)
    if scales.branch is not None:
        own, sketch = own * scales.branch, sketch * scales.branch
        others = others * scales.branch.squeeze(-1)
    if carry.branch is not None and carry.branch.bias is not None:
        sketch = sketch + carry.linear_final(carry.branch.bias).to(directions) @ directions
    if carry.residual:
        stream = carry.linear_final(residual)
        own, sketch = own + stream, sketch + stream @ directions
    sketch, bias, whole = behind.divide(sketch), carry.final_bias(scales), reference @ directions
    sketch = sketch if bias is None else sketch + bias.to(directions) @ directions
    # The residual belongs to v_ii alone.
    scale = behind.divide(torch.ones_like(sketch[..., :1])).squeeze(-1)
    own_norm, others = length(own) * scale, others * scale
    return own_norm, others, ratio(others, own_norm), sketch - whole, whole
