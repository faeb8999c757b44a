"""Carries the vectors of attention's output through a layer, with every statistic frozen.

After its output projection, attention's output o_i = Σ_j Σ_h α_ij f_h(x_j) + b passes through at most

    branch norm  ->  + residual x_i  ->  final norm

(post-norm layers have only the final one, sandwich and norm-on-output layers only the branch norm, pre-norm layers
neither). Frozen at the statistics of their whole inputs the norms are linear, so each part of o_i goes through alone:

    part of o_i  ↦  part M_b M_f / (σ_b σ_f)        part of x_i  ↦  part M_f / σ_f

with M the linear part of a norm and 1/σ a number for each query.

What a block's own tensors say of each query then: its own vector, what comes from elsewhere, and whether all adds up.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from captum_norm.functional.lengths import lengths, random_directions
from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale
from captum_norm.functional.norms import ratio


@dataclass(frozen=True)
class Scales:
    """1/σ of the branch norm and of the final norm at each query, (B, Q, 1); None where there is no such norm."""

    branch: Tensor | None
    final: Tensor | None

    def at(self, index: Tensor) -> "Scales":
        """Those of some queries, where the scales are (N, 1) each."""
        return Scales(*(None if scale is None else scale[index] for scale in (self.branch, self.final)))

    def divide(self, part: Tensor) -> Tensor:
        """``part``, (B, Q, ...), divided by both σ: what :meth:`Carry.linear` leaves out."""
        for scale in (self.branch, self.final):
            if scale is not None:
                part = part * scale
        return part


@dataclass(frozen=True)
class Carry:
    """The steps behind the output projection that a scope includes.

    Attributes:
        branch: the norm on the attention output before the residual is added, or a mere gain there, or None.
        residual: whether x_i is added.
        final: the norm behind the residual sum, or None.
    """

    branch: Normalization | None = None
    residual: bool = False
    final: Normalization | None = None

    @cached_property
    def norms(self) -> tuple[bool, bool]:
        """Whether it goes through a branch norm, and through a final norm."""
        return self.branch is not None, self.final is not None

    def linear(self, part: Tensor) -> Tensor:
        """A part of the attention output times M_b M_f, (..., D) -> (..., D).

        M_b M_f is a constant of the model, so it applies to the rows of the output projection as well.
        """
        return self.linear_final(part if self.branch is None else apply_linear(self.branch, part))

    def linear_final(self, part: Tensor) -> Tensor:
        """A part of the residual stream times M_f, (..., D) -> (..., D)."""
        return part if self.final is None else apply_linear(self.final, part)

    def final_bias(self, scales: Scales) -> Tensor | None:  # noqa: ARG002 - of a further norm behind it, it depends on σ
        """What the final norm adds to every vector, (D,) or (B, Q, D), or None."""
        return None if self.final is None else self.final.bias

    def vector(self, part: Tensor, stream: Tensor | None, scales: Scales) -> Tensor:
        """A part of the output and one of the residual stream, carried together.

        Args:
            part: (..., D).
            stream: what joins it if the carry adds the residual stream, (..., D), or None where nothing does.
            scales: 1/σ at the part's query, (..., 1) each.

        Returns:
            (..., D).
        """
        if self.branch is not None and scales.branch is not None:
            part = apply_linear(self.branch, part) * scales.branch
        if self.residual and stream is not None:
            part = part + stream
        return part if self.final is None or scales.final is None else apply_linear(self.final, part) * scales.final

    def constant(self, part: Tensor, stream: Tensor | None, scales: Scales) -> Tensor:
        """The same of what belongs to no key: the norms add their β."""
        if self.branch is not None and scales.branch is not None:
            part = apply_linear(self.branch, part) * scales.branch
            part = part if self.branch.bias is None else part + self.branch.bias
        part = replace(self, branch=None).vector(part, stream, scales)
        return part if self.final is None or self.final.bias is None else part + self.final.bias

    def scales(self, attention_output: Tensor, total: Tensor) -> Scales:
        """Freeze the norms at what one forward pass computed.

        Args:
            attention_output: o, the output projection's whole output, bias included, (B, Q, D).
            total: the sum of the (normalised) attention output and the residual, (B, Q, D).
        """
        branch = None if self.branch is None else inverse_scale(self.branch, attention_output)
        return Scales(branch, None if self.final is None else inverse_scale(self.final, total))


@dataclass(frozen=True)
class CarriedAttention:
    """The attention output of each query in two parts, times M_b M_f, not yet divided by σ.

    Attributes:
        own: Σ_h α_ii f_h(x_i), (B, Q, D).
        others: Σ_{j≠i} Σ_h α_ij f_h(x_j), (B, Q, D).
        own_norm: ‖own‖, (B, Q).
        others_norm: ‖others‖, (B, Q).
    """

    own: Tensor
    others: Tensor
    own_norm: Tensor
    others_norm: Tensor

    @classmethod
    def of(cls, carry: Carry, own: Tensor, others: Tensor) -> "CarriedAttention":
        """Carry both parts, (B, Q, D) each."""
        own, others = carry.linear(own), carry.linear(others)
        return cls(own, others, *lengths(own, others))

    @cached_property
    def sketch(self) -> Tensor:
        """Both parts together on the random directions, (B, Q, k)."""
        return (self.own + self.others) @ random_directions(self.own.shape[-1], self.own)


class BlockRows(NamedTuple):
    """Results for some query positions, each (B, Q).

    Attributes:
        own_norm: ‖v_ii‖, residual included if the carry adds it.
        mixing_ratio: ‖Σ_{j≠i} v_ij‖ / (‖Σ_{j≠i} v_ij‖ + ‖v_ii‖).
        error: estimate of ‖Σ_j v_ij + bias − reference‖.
        reference: ‖reference‖.
        attention_error: the same for the attention output alone, where no residual can hide an error; times M_b M_f,
            not divided by σ.
        attention: the size of what the model computed there, alike: ‖own‖ + ‖others‖ + ‖bias‖.
    """

    own_norm: Tensor
    mixing_ratio: Tensor
    error: Tensor
    reference: Tensor
    attention_error: Tensor
    attention: Tensor


def block_rows(
    carry: Carry,
    scales: Scales,
    attention: CarriedAttention,
    residual: Tensor,
    bias: tuple[Tensor, Tensor] | None,
    sketch: Tensor,
    reference: Tensor,
) -> BlockRows:
    """Carry a block's own tensors to the end of a scope.

    Args:
        carry: the scope's steps.
        scales: 1/σ of its norms.
        attention: both parts of the attention output, carried alike.
        residual: x, (B, Q, D).
        bias: the output projection's bias b on the random directions, b M_b M_f Ω, (k,), and ‖b M_b M_f‖, or None.
        sketch: Σ_j Σ_h α_ij f_h(x_j) M_b M_f Ω, Ω the random directions, (B, Q, k).
        reference: what the model computed at the scope's end, (B, Q, D).
    """
    directions = random_directions(residual.shape[-1], residual)
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
    if scales.final is not None:
        total = total * scales.final
    final_bias = carry.final_bias(scales)
    if final_bias is not None:
        total = total + final_bias @ directions
    own_norm, reference_norm, error, attention_error = lengths(
        own, reference, total - reference @ directions, sketch - attention.sketch
    )
    # The residual and its share belong to v_ii alone, so they are not among the others.
    others_norm = scales.divide(attention.others_norm.unsqueeze(-1)).squeeze(-1)
    joined = Scales(None if carry.residual else scales.branch, scales.final)
    own_norm = joined.divide(own_norm.unsqueeze(-1)).squeeze(-1)
    return BlockRows(
        own_norm=own_norm,
        mixing_ratio=ratio(others_norm, own_norm),
        error=error / math.sqrt(directions.shape[-1]),
        reference=reference_norm,
        attention_error=attention_error / math.sqrt(directions.shape[-1]),
        attention=attention_size,
    )
