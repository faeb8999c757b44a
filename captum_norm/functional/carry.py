"""How far through a layer the vectors of the attention output are carried, with every statistic frozen.

After its output projection, attention's output o_i = Σ_j Σ_h α_ij f_h(x_j) + b passes through at most

    branch norm  ->  + residual x_i  ->  final norm

(post-norm layers have only the final one, sandwich and norm-on-output layers only the branch norm, pre-norm layers
neither). Frozen at the statistics of their whole inputs the norms are linear, so each part of o_i goes through alone:

    part of o_i  ↦  part M_b M_f / (σ_b σ_f)        part of x_i  ↦  part M_f / σ_f

with M the linear part of a norm and 1/σ a number for each query.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale


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

    @property
    def norms(self) -> tuple[bool, bool]:
        """Which norms it goes through: what M_b M_f is made of."""
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
