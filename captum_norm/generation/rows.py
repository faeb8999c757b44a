"""Computes what each token of an answer rests on, with any method, and hands importance on to the prompt."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.output import OutputAttribution
from captum_norm.models.outputs import Difference
from captum_norm.results.maps import SourceAndPrefix

# Rows of methods that run the model once a row, in one batch.
BATCH = 16

Rows = tuple[Tensor, Tensor | None]
"""The scores of every input position for each token, (R, K), of an encoder–decoder model the source's before the target
prefix's; and the completeness error of each row, (R,), or None for a method without one."""

Inputs = Mapping[str, Tensor]
"""The model's arguments for one example, the prompt and all tokens of the answer but its last: the last R positions, of
an encoder–decoder model those of the decoder, predict the answer."""


def explains_output(method: Any) -> bool:
    """Whether a method explains a logit, not the state that it is computed from."""
    return not isinstance(method, AttentionMapAttribution) or method.target != "never"


def adds_vectors(method: Any) -> bool:
    """Whether a method scores a segment by the vectors of its tokens added up."""
    return not explains_output(method) and method.segmented and method.aggregation == "mean"


def answer_rows(
    method: Any,
    inputs: Inputs,
    answer: Sequence[int],
    rows: slice,
    contrast: int | None = None,
    *,
    together: bool = False,
) -> Rows:
    """Compute the rows of some of an answer's tokens.

    Args:
        method: the method.
        inputs: prompt and answer.
        answer: the token ids of the answer.
        rows: which of its tokens.
        contrast: the token whose logit is subtracted; for one row.
        together: one row, of their sum: one backward pass of a method that has them, and the vectors of all rows added
            before norms or distances are taken by one that :func:`adds_vectors`.
    """
    if together and adds_vectors(method):
        scores, deltas = _span(method, inputs, len(answer[rows]))
    elif not explains_output(method):
        of_inputs, delta = method.scores_of_last(dict(inputs), len(answer))
        every = _flat(of_inputs)
        scores, deltas = every[rows], None if delta is None else delta.expand(len(every))[rows]
    else:
        scores, deltas = _outputs(method, inputs, answer, rows, contrast, together=together)
    if not together or len(scores) == 1:
        return scores, deltas
    return scores.sum(0, keepdim=True), None if deltas is None else deltas.amax(0, keepdim=True)


def _outputs(
    method: Any, inputs: Inputs, answer: Sequence[int], rows: slice, contrast: int | None, *, together: bool
) -> Rows:
    """Explain the logits of tokens."""
    # From the end, which virtual tokens of a prompt do not move.
    positions = list(range(-len(answer), 0))[rows]
    chosen = list(answer[rows])
    if isinstance(method, OutputAttribution):
        tokens = torch.tensor([chosen])
        target = tokens if contrast is None else Difference(tokens, contrast)
        parts = method.decompose(dict(inputs), target, position=[positions], together=together)
        return _flat(parts.scores), parts.convergence_delta.flatten()
    batches = [_attributed(method, inputs, chosen[part], contrast, positions[part]) for part in _batches(len(chosen))]
    deltas = [delta for _, delta in batches if delta is not None]
    return torch.cat([scores for scores, _ in batches]), torch.cat(deltas) if deltas else None


def _span(method: Any, inputs: Inputs, last: int) -> Rows:
    """Score inputs by the vectors that they give to the last tokens of an answer together, averaged over layers."""
    translated = "decoder_input_ids" in inputs
    parts = [
        method.maps(dict(inputs), stacks=stacks, last=last, together=True)
        for stacks in ([["cross"], ["decoder"]] if translated else [None])
    ]
    stacks = [parts[0].cross, parts[1].decoder] if translated else [parts[0].self_attention]
    deltas = [part.convergence_delta.amax(1) for part in parts if part.convergence_delta is not None]
    return torch.cat([stack.mean(1)[0] for stack in stacks], -1), torch.stack(deltas).amax(0) if deltas else None


def segment_norms(method: Any, inputs: Inputs, numbers: Sequence[int], last: int) -> Tensor:
    """Score segments by the norms of their vectors' sum for the last outputs, averaged over layers, (G,)."""
    ids = inputs["input_ids"]
    segments = torch.tensor([[*numbers, *[-1] * (ids.shape[1] - len(numbers))]], device=ids.device)
    translated = "decoder_input_ids" in inputs
    stacks = ["cross"] if translated else None
    maps = method.maps(dict(inputs), stacks=stacks, last=last, segments=segments, together=True)
    stack: Tensor = maps.cross if translated else maps.self_attention
    return stack[0, :, 0].mean(0).cpu()


def _attributed(
    method: Any, inputs: Inputs, answer: Sequence[int], contrast: int | None, positions: Sequence[int]
) -> Rows:
    """Explain several outputs of one example, each on a copy of it."""
    target: Any = answer if contrast is None else Difference(answer, [contrast] * len(answer))
    copies = {name: tensor.expand(len(positions), *tensor.shape[1:]) for name, tensor in inputs.items()}
    with_delta = method.has_convergence_delta()
    options: dict[str, Any] = {"position": positions} | ({"return_convergence_delta": True} if with_delta else {})
    found = method.attribute(copies, target, **options)
    scores, deltas = found if with_delta else (found, None)
    return _flat(scores), deltas


def _batches(count: int) -> Iterator[slice]:
    for first in range(0, count, BATCH):
        yield slice(first, first + BATCH)


def _flat(scores: Any) -> Tensor:
    """Put the scores of an encoder–decoder model's two inputs side by side, those of one example's rows in (R, K)."""
    whole = torch.cat(list(scores), -1) if isinstance(scores, SourceAndPrefix) else scores
    found: Tensor = whole.squeeze(0) if whole.dim() == 3 else whole
    return found


def handed_on(importance: Tensor, rows: Tensor, first: int, hops: int) -> Tensor:
    """Replace the importance of intermediate tokens by the importance of what these rest on [Pan et al. 2026].

    In each hop every intermediate token, such as one of a chain of thought, gives what it has to the positions before
    it, in proportion to its own row: p ← p outside + Σ_t p_t r_t / Σ_j r_tj. What still rests on intermediate tokens
    after the last hop stays there, so the sum does not change. A token whose row is 0 keeps what it has.

    Args:
        importance: of every input position for the outputs explained, (K,), not negative.
        rows: those of the T intermediate tokens, (T, K), not negative, each 0 from its own position on.
        first: position of the first intermediate token, those of the others follow.
        hops: how often.

    Returns:
        (K,).

    Example:
        >>> rows = torch.tensor([[1.0, 3.0, 0.0]])
        >>> handed_on(torch.tensor([0.2, 0.0, 0.8]), rows, first=2, hops=1)
        tensor([0.4000, 0.6000, 0.0000])
    """
    sums = rows.sum(1, keepdim=True)
    shares = rows / torch.where(sums > 0, sums, torch.ones_like(sums))
    between = slice(first, first + len(rows))
    kept = (sums.squeeze(1) == 0).to(importance)
    for _ in range(hops):
        given = importance[between]
        importance = importance + given @ shares
        importance[between] -= given * (1 - kept)
    return importance
