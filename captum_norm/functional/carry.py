"""How far through a layer the vectors of the attention output are carried, with every statistic frozen.

After its output projection, attention's output o_i = Σ_j Σ_h α_ij f_h(x_j) + b passes through at most

    branch norm  ->  + residual x_i  ->  final norm

(post-norm layers have only the final one, sandwich and norm-on-output layers only the branch norm, pre-norm layers
neither). Frozen at the statistics of their whole inputs the norms are linear, so each part of o_i goes through alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale


@dataclass(frozen=True)
class Carry:
    """The steps behind the output projection that a scope includes.

    Attributes:
        branch: the norm on the attention output before the residual is added, or None.
        residual: whether x_i is added.
        final: the norm behind the residual sum, or None.
    """

    branch: Normalization | None = None
    residual: bool = False
    final: Normalization | None = None

    def linear(self, part: Tensor) -> Tensor:
        """A part of the attention output carried to the end, before division by the queries' σ; (..., D) -> (..., D).

        This is a constant of the model, so it applies to the rows of the output projection as well.
        """
        for norm in (self.branch, self.final):
            if norm is not None:
                part = apply_linear(norm, part)
        return part

    def freeze(self, attention_output: Tensor, residual: Tensor) -> "FrozenCarry":
        """Fix the norms' statistics at what one forward pass computed.

        Args:
            attention_output: o, the output projection's whole output, bias included, (B, Q, D).
            residual: x, (B, Q, D).
        """
        branch_scale = attention_output.new_ones(1)
        whole = attention_output
        if self.branch is not None:
            branch_scale = inverse_scale(self.branch, whole)
            whole = apply_linear(self.branch, whole) * branch_scale
            if self.branch.bias is not None:
                whole = whole + self.branch.bias
        if self.residual:
            whole = whole + residual
        final_scale = whole.new_ones(1) if self.final is None else inverse_scale(self.final, whole)
        return FrozenCarry(self, branch_scale, final_scale)


@dataclass(frozen=True)
class FrozenCarry:
    """A :class:`Carry` with its 1/σ fixed: an affine map for each query position.

    Attributes:
        carry: the steps.
        branch_scale: 1/σ of the branch norm, broadcastable to (B, Q, 1).
        final_scale: 1/σ of the final norm, broadcastable to (B, Q, 1).
    """

    carry: Carry
    branch_scale: Tensor
    final_scale: Tensor

    @property
    def scale(self) -> Tensor:
        """What :meth:`Carry.linear` leaves out, broadcastable to (B, Q, 1)."""
        return self.branch_scale * self.final_scale

    def attention(self, part: Tensor) -> Tensor:
        """The share in the scope's output of a part of the attention output, (B, Q, D) -> (B, Q, D)."""
        return self.carry.linear(part) * self.scale

    def residual(self, part: Tensor) -> Tensor:
        """The share of a part of the residual stream, 0 where the scope adds none; (B, Q, D) -> (B, Q, D)."""
        if not self.carry.residual:
            return torch.zeros_like(part)
        return self._finish(part)

    def bias(self, projection_bias: Tensor | None) -> Tensor:
        """What belongs to no key: the projection's bias and the norms' β, carried along; broadcastable to (B, Q, D)."""
        total = self.scale.new_zeros(1)
        if projection_bias is not None:
            total = total + self.attention(projection_bias)
        branch, final = self.carry.branch, self.carry.final
        if branch is not None and branch.bias is not None:
            total = total + self._finish(branch.bias)
        if final is not None and final.bias is not None:
            total = total + final.bias
        return total

    def _finish(self, part: Tensor) -> Tensor:
        final = self.carry.final
        return part if final is None else apply_linear(final, part) * self.final_scale
