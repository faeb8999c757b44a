"""Computes what each token of an answer rests on, with any method."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.output import OutputAttribution
from captum_norm.models.outputs import Difference
from captum_norm.results.maps import SourceAndPrefix

# Rows of methods that run the model once a row, in one batch.
BATCH = 16


@dataclass(frozen=True, eq=False)
class Example:
    """Prompt and answer as inputs of the model.

    Attributes:
        inputs: the model's arguments for one example: the prompt and all tokens of the answer but its last.
        answer: the R token ids of the answer; the last R positions of the inputs (an encoder–decoder model's decoder
            inputs) predict them.
    """

    inputs: Mapping[str, Tensor]
    answer: Sequence[int]


@dataclass(frozen=True, eq=False)
class Rows:
    """What tokens of an answer rest on.

    Attributes:
        scores: of every input position for each token, (R, K); of an encoder–decoder model source, then target prefix.
        deltas: completeness error of each row, (R,); None for a method without one.
    """

    scores: Tensor
    deltas: Tensor | None

    @staticmethod
    def joined(parts: "Sequence[Rows]") -> "Rows":
        """Concatenate rows."""
        deltas = [part.deltas for part in parts if part.deltas is not None]
        return Rows(torch.cat([part.scores for part in parts]), torch.cat(deltas) if deltas else None)


def explains_output(method: Any) -> bool:
    """Whether a method explains a logit, not the state that it is computed from."""
    return not isinstance(method, AttentionMapAttribution) or method.target != "never"


def adds_vectors(method: Any) -> bool:
    """Whether a method scores a segment by the vectors of its tokens added up."""
    return not explains_output(method) and method.segmented and method.aggregation == "mean"


def answer_rows(
    method: Any, example: Example, rows: slice, contrast: int | None = None, *, together: bool = False
) -> Rows:
    """Compute the rows of some of an answer's tokens.

    Args:
        method: the method.
        example: prompt and answer.
        rows: which of its tokens.
        contrast: the token whose logit is subtracted; for one row.
        together: one row, of their sum: one backward pass of a method that has them, and the vectors of all rows added
            before norms or distances are taken by one that :func:`adds_vectors`.
    """
    found = _each(method, example, rows, contrast, together=together)
    if not together or len(found.scores) == 1:
        return found
    return Rows(found.scores.sum(0, keepdim=True), None if found.deltas is None else found.deltas.amax(0, keepdim=True))


def _each(method: Any, example: Example, rows: slice, contrast: int | None, *, together: bool) -> Rows:
    if together and adds_vectors(method):
        return _span(method, example, rows)
    if not explains_output(method):
        scores, deltas = method.scores_of_last(dict(example.inputs), len(example.answer))
        whole = _flat(scores)
        return Rows(whole[rows], None if deltas is None else deltas.expand(len(whole))[rows])
    # From the end, which virtual tokens of a prompt do not move.
    positions = list(range(-len(example.answer), 0))[rows]
    answer = list(example.answer[rows])
    if isinstance(method, OutputAttribution):
        tokens = torch.tensor([answer])
        target = tokens if contrast is None else Difference(tokens, contrast)
        parts = method.decompose(dict(example.inputs), target, position=[positions], together=together)
        return Rows(_flat(parts.scores), parts.convergence_delta.flatten())
    return Rows.joined(
        [_attributed(method, example.inputs, answer[some], contrast, positions[some]) for some in _batches(len(answer))]
    )


def _span(method: Any, example: Example, rows: slice) -> Rows:
    """Score inputs by the vectors that they give to the last tokens of an answer together, averaged over layers."""
    last = len(example.answer[rows])
    translated = "decoder_input_ids" in example.inputs
    parts = [
        method.maps(dict(example.inputs), stacks=stacks, last=last, together=True)
        for stacks in ([["cross"], ["decoder"]] if translated else [None])
    ]
    stacks = [parts[0].cross, parts[1].decoder] if translated else [parts[0].self_attention]
    deltas = [part.convergence_delta.amax(1) for part in parts if part.convergence_delta is not None]
    return Rows(torch.cat([stack.mean(1)[0] for stack in stacks], -1), torch.stack(deltas).amax(0) if deltas else None)


def _attributed(
    method: Any, inputs: Mapping[str, Tensor], answer: Sequence[int], contrast: int | None, positions: Sequence[int]
) -> Rows:
    """Explain several outputs of one example, each on a copy of it."""
    target: Any = answer if contrast is None else Difference(answer, [contrast] * len(answer))
    copies = {name: tensor.expand(len(positions), *tensor.shape[1:]) for name, tensor in inputs.items()}
    with_delta = method.has_convergence_delta()
    options: dict[str, Any] = {"position": positions} | ({"return_convergence_delta": True} if with_delta else {})
    found = method.attribute(copies, target, **options)
    scores, deltas = found if with_delta else (found, None)
    return Rows(_flat(scores), deltas)


def _batches(count: int) -> Iterator[slice]:
    for first in range(0, count, BATCH):
        yield slice(first, first + BATCH)


def _flat(scores: Any) -> Tensor:
    """Put the scores of an encoder–decoder model's two inputs side by side, those of one example's rows in (R, K)."""
    whole = torch.cat(list(scores), -1) if isinstance(scores, SourceAndPrefix) else scores
    found: Tensor = whole.squeeze(0) if whole.dim() == 3 else whole
    return found
