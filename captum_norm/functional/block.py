"""What a block's own tensors say of each query: its own vector, what comes from elsewhere, and whether all adds up."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from captum_norm.functional.carry import Carry, Scales
from captum_norm.functional.completeness import estimated_length, random_directions
from captum_norm.functional.lengths import length
from captum_norm.functional.norms import ratio


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
        return cls(own, others, length(own), length(others))

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
    bias: Tensor | None,
    sketch: Tensor,
    reference: Tensor,
) -> BlockRows:
    """Carry a block's own tensors to the end of a scope.

    Args:
        carry: the scope's steps.
        scales: 1/σ of its norms.
        attention: both parts of the attention output, carried alike.
        residual: x, (B, Q, D).
        bias: the output projection's bias b, (D,), or None.
        sketch: Σ_j Σ_h α_ij f_h(x_j) M_b M_f Ω, Ω the random directions, (B, Q, k).
        reference: what the model computed at the scope's end, (B, Q, D).
    """
    directions = random_directions(residual.shape[-1], residual)
    # The residual and its share belong to v_ii alone, so they are not among the others.
    own_norm, others_norm = attention.own_norm, attention.others_norm
    attention_error = sketch - attention.sketch
    attention_size = own_norm + others_norm
    total = sketch
    if bias is not None:
        carried_bias = carry.linear(bias)
        total, attention_size = sketch + carried_bias @ directions, attention_size + length(carried_bias)
    if scales.branch is not None:
        total = total * scales.branch
        own_norm, others_norm = own_norm * scales.branch.squeeze(-1), others_norm * scales.branch.squeeze(-1)
    if carry.branch is not None and carry.branch.bias is not None:
        total = total + carry.linear_final(carry.branch.bias) @ directions
    if carry.residual:
        stream = carry.linear_final(residual)
        own = attention.own + stream if scales.branch is None else torch.addcmul(stream, attention.own, scales.branch)
        own_norm = length(own)
        total = total + stream @ directions
    if scales.final is not None:
        own_norm, others_norm = own_norm * scales.final.squeeze(-1), others_norm * scales.final.squeeze(-1)
        total = total * scales.final
    final_bias = carry.final_bias(scales)
    if final_bias is not None:
        total = total + final_bias @ directions
    return BlockRows(
        own_norm=own_norm,
        mixing_ratio=ratio(others_norm, own_norm),
        error=estimated_length(total - reference @ directions),
        reference=length(reference),
        attention_error=estimated_length(attention_error),
        attention=attention_size,
    )
