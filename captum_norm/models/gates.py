"""Folds the gate on attention's output into its weights and values."""

from dataclasses import replace

import torch
from torch import Tensor

from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.precision import accumulation_dtype

# Rounding errors, in units in the last place, of a gate's factors.
ROUNDINGS = 32


class Gate:
    """The numbers that multiply attention's output between the attention function and the output projection.

    A gate computed from the query (Qwen3-Next), or a norm's gain over its σ (BitNet), which is frozen as σ is
    everywhere. With them, attention's output is still a sum over keys: Σ_j α_ij c_i ⊙ v_j. If c_i is a number for each
    head times a vector that all queries share, the weights take the number and the values the vector. If not, every
    channel becomes a head of its own.

    Args:
        call: the attention call.
        context: attention's output, (B, Q, H·d).
        received: what the output projection received, (B, Q, H·d).

    Attributes:
        call: the call's shapes with the gate inside, of H or H·d heads; it cannot run.
    """

    def __init__(self, call: AttentionCall, context: Tensor, received: Tensor) -> None:
        values, precision = call.values_by_head, torch.finfo(received.dtype).eps
        dtype = accumulation_dtype(received.dtype)
        context, received = (t.to(dtype).unflatten(-1, (values.shape[1], -1)) for t in (context, received))
        # The model rounded the product once, so the quotient is its factor up to rounding. Where attention gives
        # exactly 0, so does every factor.
        silent = context == 0
        factors = (received / context.masked_fill(silent, 1)).masked_fill(silent, 0)  # (B, Q, H, d)
        shared = factors[0, 0]
        own = (factors * shared).sum(-1) / shared.square().sum(-1).clamp(min=torch.finfo(dtype).tiny)
        error = (factors - own.unsqueeze(-1) * shared).abs()
        query = call.query[..., :1]
        if bool((error <= ROUNDINGS * precision * factors.abs()).all()):
            self._factors = own.permute(0, 2, 1).unsqueeze(2)  # (B, H, 1, Q)
            values = values.to(dtype) * shared.unsqueeze(1)
        else:
            self._factors = factors.permute(0, 2, 3, 1)  # (B, H, d, Q)
            width = values.shape[-1]
            values = values.transpose(2, 3).flatten(1, 2).unsqueeze(-1)
            query = query.repeat_interleave(width, dim=1)
        self.call = replace(call, query=query, key=values, value=values, ungated=call)

    def weights(self, weights: Tensor, part: Part) -> Tensor:
        """Multiply attention weights of a part, (examples, H, rows, K), by the gate."""
        factors = self._factors[part.examples, ..., part.rows]
        return (weights.to(factors.dtype).unsqueeze(2) * factors.unsqueeze(-1)).flatten(1, 2)
