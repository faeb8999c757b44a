"""Names the values of a model's output to explain, one of each example or several, and reads them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError
from captum_norm.models.call import ModelCall
from captum_norm.models.heads import positions_of_examples
from captum_norm.models.outputs import (
    Difference,
    Readout,
    chosen_target,
    explained_number,
    output_scores,
    real_positions,
    rounded_size,
    scores_at,
)


@dataclass(frozen=True, eq=False)
class OutputValues:
    """P values of a model's output for each of B examples.

    Attributes:
        target: see :data:`captum_norm.models.outputs.Target`; of several values a list of B·P.
        position: where an example's values are read, if there are outputs at each position.
        rows: where each of them is, (B, P), in the order that the model received; None for ``position``.
        readout: the user's own; None for the logits.
        batch: B.
        count: P.
        several: whether targets or positions came with an axis P, which results then have.
    """

    target: Any
    position: Any
    rows: Tensor | None
    readout: Readout | None
    batch: int
    count: int = 1
    several: bool = False

    @classmethod
    def of(cls, call: ModelCall, target: Any, position: Any, readout: Readout | None) -> "OutputValues":
        """Take those that a user names: nested sequences, or tensors or arrays with two axes, name several.

        Raises:
            InvalidInputError: for a position outside the sequence or in its padding, or if there are not as many
                positions and targets for each example.
        """
        rows, nested = _several_positions(call, position), _first_row(target)
        if rows is None and nested is None:
            return cls(target, position, None, readout, call.batch)
        count = len(nested or ()) if rows is None else rows.shape[1]
        targets = _mapped(lambda choice: _spread(choice, call.batch, count), target)
        return cls(targets, position if rows is None else None, rows, readout, call.batch, count, several=True)

    def of_example(self, index: int) -> "OutputValues":
        """Select one example's.

        Raises:
            InvalidInputError: if targets or positions are neither one nor as many as the examples.
        """

        def part(value: Any, size: int, what: str) -> Any:
            value = _listed(value)
            if not isinstance(value, list) or len(value) == 1:
                return value
            if len(value) != self.batch * size:
                raise InvalidInputError(f"got {len(value)} {what} for {self.batch} examples")
            return value[index * size : (index + 1) * size]

        target = _mapped(lambda choice: part(choice, self.count, "targets"), self.target)
        rows = None if self.rows is None else self.rows[index : index + 1]
        position = part(self.position, 1, "positions")
        return OutputValues(target, position, rows, self.readout, 1, self.count, self.several)

    def read(self, call: ModelCall, output: Any) -> tuple[Tensor, Tensor]:
        """Read the values and the sizes of what was rounded in them, (N, P) each.

        Args:
            call: the examples' call, or one of copies of them, N in all, whose targets are those of the first.
            output: what the model returned for it.

        Raises:
            CaptumNormError: see :func:`captum_norm.models.outputs.output_scores` and
                :func:`captum_norm.models.outputs.chosen_target`.
        """
        if self.rows is None:
            scores = output_scores(call, output, self.position, self.readout)
            scores = scores.repeat_interleave(self.count, 0) if self.several else scores
        else:
            scores = scores_at(call, output, self.rows.repeat(call.batch // self.batch, 1), self.readout)
        values = self.batch * self.count
        chosen = chosen_target(self.target, scores[:values])
        if chosen is not None:
            chosen = chosen.repeat(len(scores) // values, *[1] * (chosen.dim() - 1))
        numbers, rounded = explained_number(scores, chosen), rounded_size(scores.detach(), chosen)
        return numbers.unflatten(0, (-1, self.count)), rounded.unflatten(0, (-1, self.count))


def _several_positions(call: ModelCall, position: Any) -> Tensor | None:
    """Resolve several positions of each example, (B, P), to indices in the sequence that the model received."""
    rows = _listed(position)
    if not _nested(rows):
        return None
    counts = {len(row) for row in rows}
    if len(rows) != call.batch or len(counts) != 1 or counts == {0}:
        raise InvalidInputError(
            f"got position={shown(rows)} for {call.batch} examples; expected as many positions for each example, (B, P)"
        )
    positions = call.output_positions
    real = positions.shift_back(real_positions(call), 1)
    found = torch.stack([positions_of_examples(list(column), real) for column in zip(*rows, strict=True)], 1)
    return found if positions.shift is None else found - positions.shift.to(found.device)[:, None]


def _spread(choice: Any, batch: int, count: int) -> Any:
    """Give each of P values of each example its class: from one for all, one for each example, or (B, P)."""
    choice = _listed(choice)
    if not isinstance(choice, list):
        return choice
    rows = choice if _nested(choice) else [[one] * count for one in choice]
    if not count or len(rows) != batch or {len(row) for row in rows} != {count}:
        raise InvalidInputError(
            f"got target={shown(choice)} for {count} values of each of {batch} examples; expected one for all, one for "
            "each example, or one for each value, (B, P)"
        )
    return [one for row in rows for one in row]


def _first_row(target: Any) -> list[Any] | None:
    """Return the first example's classes in a target with two axes, (B, P); None for one with fewer."""
    choices = [target.target, target.other] if isinstance(target, Difference) else [target]
    return next((list(rows[0]) for rows in map(_listed, choices) if _nested(rows)), None)


def _mapped(function: Callable[[Any], Any], target: Any) -> Any:
    if isinstance(target, Difference):
        return Difference(function(target.target), function(target.other))
    return function(target)


def _listed(value: Any) -> Any:
    """Turn tensors, arrays and tuples into lists."""
    if getattr(value, "is_meta", False):
        return value  # has no numbers, and is refused where they are read
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, (list, tuple)) for row in value)
