"""Splits the examples of a comparison into batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_norm.models.call import ModelCall
from captum_norm.models.outputs import Choice, Difference, Position, Target, read_mask, real_positions


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the examples; positions are those of the model.

    Attributes:
        index: their indices among all examples, (N,).
        call: the call of the model, without padding that is common to all of them.
        target: their targets; None if the output is one number, or no target is chosen yet.
        position: where the output is read, (N,); None for the default.
    """

    index: Tensor
    call: ModelCall
    target: Target
    position: Tensor | None

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The inputs for every method."""
        return self.call.arguments

    def first(self) -> "Batch":
        """Return only the first example."""
        index = self.index.new_zeros(1)
        position = None if self.position is None else self.position[:1]
        return Batch(self.index[:1], self.call.example(0), of_examples(self.target, index, len(self.index)), position)


class Examples:
    """All examples of a comparison: a call of the model, and the user's target and position.

    Attributes:
        real: True at real positions of the model, (B, S).
    """

    def __init__(self, call: ModelCall, target: Target, position: Position) -> None:
        self.call = call
        self.real = real_positions(call)
        self._target = target
        read = read_mask(call, position)
        self._position = None if read is None else read.long().argmax(1)

    def __len__(self) -> int:
        return len(self.real)

    def batches(self, size: int) -> Iterator[Batch]:
        """Batch examples of similar lengths, which need little padding."""
        for index in self.real.sum(1).argsort(stable=True).split(size):
            yield self.batch(index)

    def batch(self, index: Tensor) -> Batch:
        """Return some examples as a batch."""
        call = self.call.examples(index, int(self.real[index].sum(1).max()))
        position = None if self._position is None else self._position[index]
        return Batch(index, call, of_examples(self._target, index, len(self)), position)

    def shown(self, rows: Tensor) -> Tensor:
        """Rearrange numbers of all positions, (B, S), to the positions of the user's inputs; 0 at padding."""
        return self.call.positions.restore(rows, 1)


def of_examples(target: Target, index: Tensor, batch: int) -> Target:
    """Return the targets of some of B examples."""
    if isinstance(target, Difference):
        return Difference(_chosen(target.target, index, batch), _chosen(target.other, index, batch))
    return None if target is None else _chosen(target, index, batch)


def gathered(parts: Sequence[Tensor], order: Tensor, width: int | None = None) -> Tensor:
    """Concatenate rows of batches in the order of all examples, padded with zeros to (B, width) if given."""
    if width is not None:
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    rows = torch.cat(list(parts))
    return rows[order.argsort().to(rows.device)]


def _chosen(choice: Choice, index: Tensor, batch: int) -> Choice:
    # Invalid choices are refused where they are used.
    if not isinstance(choice, (Sequence, Tensor)) or (isinstance(choice, Tensor) and not choice.dim()):
        return choice
    if len(choice) != batch:
        return choice
    return torch.as_tensor(choice)[index.cpu()]
