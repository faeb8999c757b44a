"""Carries the vectors of attention's output through a layer, with the norms' statistics frozen.

After its output projection, attention's output o_i = Σ_j Σ_h α_ij f_h(x_j) + b passes through at most

    branch norm  ->  + residual x_i  ->  final norm

(post-norm layers have only the final norm, sandwich and norm-on-output layers only the branch norm, pre-norm layers
neither). With the statistics of their whole inputs frozen, the norms are linear, so each part passes separately:

    part of o_i  ↦  part M_b M_f / (σ_b σ_f)        part of x_i  ↦  part M_f / σ_f

with M the linear part of a norm and 1/σ one number per query. :func:`block_rows` measures each query's own vector, its
mixing ratio and its completeness error.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale
from captum_norm.functional.vectors import lengths, ratio


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


@dataclass(frozen=True)
class CarriedAttention:
    """Each query's attention output, split into its own part and that of others, times M_b M_f, not divided by σ."""

    own: Tensor  # Σ_h α_ii f_h(x_i), (B, Q, D); others is Σ_{j≠i} Σ_h α_ij f_h(x_j)
    own_norm: Tensor  # ‖own‖, (B, Q)
    others_norm: Tensor  # ‖others‖, (B, Q)
    sketch: Tensor  # projection of their sum on the random directions, (B, Q, k)

    @classmethod
    def of(cls, carry: Carry, own: Tensor, others: Tensor, directions: Tensor) -> "CarriedAttention":
        """Carry both parts, (B, Q, D) each, and project their sum on the random directions, (D, k)."""
        own, others = carry.linear(own), carry.linear(others)
        own_norm, others_norm = lengths(own, others)
        return cls(own, own_norm, others_norm, (own + others) @ directions)


class BlockRows(NamedTuple):
    """Results for some query positions, each (B, Q)."""

    own_norm: Tensor  # ‖v_ii‖, residual included if the carry adds it
    mixing_ratio: Tensor  # ‖Σ_{j≠i} v_ij‖ / (‖Σ_{j≠i} v_ij‖ + ‖v_ii‖)
    error: Tensor  # estimate of ‖Σ_j v_ij + bias − reference‖
    reference: Tensor  # ‖reference‖
    attention_error: Tensor  # the error of attention's output alone, where no residual can hide it, not divided by σ
    attention: Tensor  # its scale, ‖own‖ + ‖others‖ + ‖bias‖, likewise


def block_rows(
    carry: Carry,  # the scope's steps
    scales: Scales,
    attention: CarriedAttention,  # carried by the same norms
    bias: tuple[Tensor, Tensor] | None,  # b M_b M_f Ω, (k,), and ‖b M_b M_f‖, with b the output projection's bias
    sketch: Tensor,  # Σ_j Σ_h α_ij f_h(x_j) M_b M_f Ω, (B, Q, k)
    directions: Tensor,  # Ω, (D, k)
    residual: Tensor,  # x, (B, Q, D)
    reference: Tensor,  # what the model computed at the scope's end, (B, Q, D)
) -> BlockRows:
    """Carry a block's tensors to the end of a scope and measure them there."""
    total, attention_size = sketch, attention.own_norm + attention.others_norm
    if bias is not None:
        total, attention_size = total + bias[0], attention_size + bias[1]
    if scales.branch is not None:
        total = total * scales.branch
    if carry.branch is not None and carry.branch.bias is not None:
        total = total + carry.linear_final(carry.branch.bias) @ directions
    own = attention.own
    if carry.residual:
        stream = carry.linear_final(residual)
        total = total + stream @ directions
        own = own + stream if scales.branch is None else torch.addcmul(stream, own, scales.branch)
    total = replace(scales, branch=None).divide(total)
    final_bias = carry.final_bias(scales)
    if final_bias is not None:
        total = total + final_bias @ directions
    own_norm, reference_norm, error, attention_error = lengths(
        own, reference, total - reference @ directions, sketch - attention.sketch
    )
    # The residual belongs to v_ii alone.
    others_norm = scales.divide(attention.others_norm.unsqueeze(-1)).squeeze(-1)
    joined = replace(scales, branch=None) if carry.residual else scales
    own_norm = joined.divide(own_norm.unsqueeze(-1)).squeeze(-1)
    return BlockRows(
        own_norm=own_norm,
        mixing_ratio=ratio(others_norm, own_norm),
        error=error / math.sqrt(directions.shape[-1]),
        reference=reference_norm,
        attention_error=attention_error / math.sqrt(directions.shape[-1]),
        attention=attention_size,
    )
