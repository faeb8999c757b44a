"""What a block's own tensors say of each query: its own vector, what comes from elsewhere, and whether all adds up."""

from typing import NamedTuple

import torch
from torch import Tensor

from captum_norm.functional.carry import Carry
from captum_norm.functional.completeness import random_directions, squared_length
from captum_norm.functional.norms import ratio


class BlockRows(NamedTuple):
    """Results for some query positions, each (B, Q).

    Attributes:
        scale: 1/σ of the norms gone through, by which norms of the attention vectors are multiplied.
        own_norm: ‖v_ii‖, residual included if the carry adds it.
        mixing_ratio: ‖Σ_{j≠i} v_ij‖ / (‖Σ_{j≠i} v_ij‖ + ‖v_ii‖).
        squared_error: estimate of ‖Σ_j v_ij + bias − reference‖².
        squared_reference: ‖reference‖².
    """

    scale: Tensor
    own_norm: Tensor
    mixing_ratio: Tensor
    squared_error: Tensor
    squared_reference: Tensor


def block_rows(
    carry: Carry,
    projected: Tensor,
    residual: Tensor,
    own_attention: Tensor,
    bias: Tensor | None,
    sketch: Tensor,
    reference: Tensor,
) -> BlockRows:
    """Carry a block's own tensors to the end of a scope.

    Args:
        carry: the scope's steps.
        projected: the output projection's output as the model computed it, (B, Q, D).
        residual: x, (B, Q, D).
        own_attention: Σ_h α_ii f_h(x_i), (B, Q, D).
        bias: the output projection's bias, (D,), or None.
        sketch: Σ_j Σ_h α_ij f_h(x_j) M Ω, M the carry's linear part and Ω the random directions, (B, Q, k).
        reference: what the model computed at the scope's end, (B, Q, D).
    """
    frozen = carry.freeze(projected, residual)
    stream = frozen.residual(residual)
    own_norm = torch.linalg.vector_norm(frozen.attention(own_attention) + stream, dim=-1)
    # The residual and its share belong to v_ii alone, so they drop out of the sum over the others.
    others = projected - own_attention if bias is None else projected - own_attention - bias
    others_norm = torch.linalg.vector_norm(frozen.attention(others), dim=-1)
    rest = stream + frozen.bias(bias) - reference
    error = sketch * frozen.scale + rest @ random_directions(rest.shape[-1], rest)
    return BlockRows(
        scale=frozen.scale.expand(*projected.shape[:-1], 1).squeeze(-1),
        own_norm=own_norm,
        mixing_ratio=ratio(others_norm, own_norm),
        squared_error=squared_length(error),
        squared_reference=reference.square().sum(-1),
    )
