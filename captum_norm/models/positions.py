"""Positions of an input sequence: which are real; shifts left-padded examples to position 0 and their results back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

TokenTexts = Sequence[Sequence[str]] | None
"""The texts of each example's tokens, if they are known."""


@dataclass(frozen=True)
class Positions:
    """Positions of one input sequence, the encoder's or the decoder's.

    Attributes:
        length: number of positions; None if it is unknown or the input is no sequence (an image).
        real: True at real positions, (B, S); None without padding.
        shift: how far each example was shifted left to begin at position 0, (B,); None if none was.
        before: number of positions before the inputs', which no shift moves.
        texts: those of each example's tokens, if the inputs contain them, or the tokenizer is known.
    """

    length: int | None = None
    real: Tensor | None = None
    shift: Tensor | None = None
    before: int = 0
    texts: TokenTexts = None

    @property
    def several(self) -> bool:
        """Whether any example has more than one real position."""
        if self.length is None or self.real is None:
            return self.length != 1
        return int(self.real.sum(1).max()) > 1

    def last(self, scores: Tensor) -> Tensor:
        """Drop scores, (B, [R,] K), of what comes before these positions: virtual tokens or cached positions."""
        return scores if self.length is None else scores[..., max(0, scores.shape[-1] - self.length) :]

    def shift_left(self, value: Any) -> Any:
        """Shift an argument that has one entry per position as the examples were; return any other unchanged."""
        if self.shift is None or not isinstance(value, Tensor) or value.dim() < 2:
            return value
        return self._rolled(value, self.shift, 1) if value.shape[:2] == (len(self.shift), self.length) else value

    def after(self, count: int, real: Tensor | None = None) -> "Positions":
        """Return these positions after ``count`` others, all of them real unless ``real`` tells, (B, count)."""
        if count == 0 or self.length is None:
            return self
        both = None
        if self.real is not None or real is not None:
            some = self.real if real is None else real
            batch, device = len(cast(Tensor, some)), cast(Tensor, some).device
            parts = ((real, count), (self.real, self.length))
            both = torch.cat(
                [
                    torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
                    for mask, length in parts
                ],
                dim=1,
            )
        return Positions(self.length + count, both, self.shift, self.before + count)

    def shift_back(self, rows: Tensor, axis: int) -> Tensor:
        """Shift results back to their positions in the user's inputs, along an axis of length S."""
        return rows if self.shift is None else self._rolled(rows, -self.shift, axis)

    def _rolled(self, tensor: Tensor, shift: Tensor, axis: int) -> Tensor:
        """Roll each example's entries along an axis to the left, but for those before the inputs'."""
        first = tensor.narrow(axis, 0, self.before)
        behind = rolled(tensor.narrow(axis, self.before, tensor.shape[axis] - self.before), shift, axis)
        return torch.cat([first, behind], dim=axis) if self.before else behind

    def restore(self, rows: Tensor, axis: int) -> Tensor:
        """Set results at padding to 0 and shift them back, along an axis of length S."""
        if self.real is not None:
            rows = rows.where(_along(axis, self.real, rows), 0)
        return self.shift_back(rows, axis)

    def cut(self, value: Any, batch: int, length: int) -> Any:
        """Crop an argument to the first example's first positions, a mask over queries and keys along both axes."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if self.length != batch and value.shape == (self.length, self.length):
            return value[:length, :length]
        if self.length != batch and value.shape[:2] == (self.length, batch):
            return value[:length, :1]
        if value.shape[0] != batch:
            return value
        sequence = self.length is not None and value.dim() >= 2 and value.shape[1] == self.length
        return value[:1, :length] if sequence else value[:1]


def rolled(tensor: Tensor, shift: Tensor, axis: int) -> Tensor:
    """Roll each example's entries along an axis to the left."""
    length = tensor.shape[axis]
    source = (torch.arange(length, device=shift.device) + shift[:, None]) % length
    return tensor.gather(axis, _along(axis, source, tensor).expand_as(tensor))


def _along(axis: int, values: Tensor, tensor: Tensor) -> Tensor:
    """Reshape values (B, S) to broadcast against the batch and an axis of a tensor, on its device."""
    shape = [1] * tensor.dim()
    shape[0], shape[axis] = values.shape
    return values.to(tensor.device).reshape(shape)
