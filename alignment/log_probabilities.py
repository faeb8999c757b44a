"""Computes the log-probabilities that a translation model gives to the pieces of given targets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alignment.teacher_forcing import NO_LABEL, OnError, TeacherForcedBatch, teacher_forced_batches
from alignment.tokenization import EncodedSentence, TranslationTokenizer
from captum_norm import InvalidInputError, UnsupportedModelError
from captum_norm.models import evaluating, explained_module


def target_log_probabilities(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    *,
    max_tokens: int = 4096,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Compute log p(y_t | y_<t, x) of each target's pieces and end of sentence, in no particular order of the pairs.

    Special tokens before the first word, such as a language code, and those behind the end of sentence are left out.

    Args:
        model: a sequence-to-sequence model with its language-modelling head; left unchanged.
        tokenizer: its tokenizer.
        pairs: the source words and the target words of each pair.
        max_tokens: the largest batch, padding included.
        on_error: called for each unusable pair, which is then left out; None raises the error instead.

    Yields:
        The pair's index and its log-probabilities in nats.

    Raises:
        InvalidInputError: see :func:`alignment.teacher_forcing.teacher_forced_batches`.
        UnsupportedModelError: the model has no language-modelling head.

    >>> from alignment import load_shipped_model
    >>> pair = ["le", "débat", "est", "clos", "."], ["the", "debate", "is", "closed", "."]
    >>> [(_, found)] = target_log_probabilities(*load_shipped_model("fr-en"), [pair])
    >>> found.round(1).tolist()
    [-0.4, -0.1, -0.2, -0.2, -0.2, -0.1]
    """
    module = explained_module(model)
    for batch in teacher_forced_batches(model, tokenizer, pairs, max_tokens=max_tokens, on_error=on_error):
        with torch.no_grad(), evaluating(module), recorded_logits(model, batch) as logits:
            model(**batch.inputs)
        yield from zip(batch.indices, batch_log_probabilities(logits(), batch), strict=True)


def emitted_steps(target: EncodedSentence) -> slice:
    """The decoder steps that emit the first word's first piece up to the end of sentence.

    >>> emitted_steps(EncodedSentence([9, 5, 6, 2, 9], [None, 0, 1, None, None]))
    slice(1, 4, None)
    """
    words = [step for step, index in enumerate(target.word_ids) if index is not None]
    return slice(words[0], words[-1] + 2)


def batch_log_probabilities(logits: Tensor, batch: TeacherForcedBatch) -> list[NDArray[np.float64]]:
    """The log-probabilities of each pair's :func:`emitted_steps`, from logits (B, T, V)."""
    # One pair at a time: vocabularies are large.
    rows = [
        log_probabilities(row, labels)[0].double().cpu().numpy()
        for row, labels in zip(logits.split(1), batch.labels.split(1), strict=True)
    ]
    return [row[: len(target.ids)][emitted_steps(target)] for row, target in zip(rows, batch.target, strict=True)]


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (N, T, V), labels (N, t) of the last t positions -> log p(y_t) (N, t), 0 where there is no label."""
    labels = labels.to(logits.device)
    vocabulary = logits.shape[-1]
    there = labels != NO_LABEL
    unknown = labels[there & ((labels < 0) | (labels >= vocabulary))]
    if len(unknown):
        raise InvalidInputError(
            f"got the label {int(unknown[0])}, expected {NO_LABEL} or one of the model's {vocabulary} pieces"
        )
    logits = logits[:, -labels.shape[1] :].to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * there


@contextmanager
def recorded_logits(model: nn.Module, batch: TeacherForcedBatch) -> Iterator[Callable[[], Tensor]]:
    """Record the logits of the model's forward passes; the function yielded returns the last ones, (B, T, V).

    Raises:
        UnsupportedModelError: by that function, if these are not logits of the batch.
    """
    seen: list[Any] = []

    def keep(_module: nn.Module, _args: object, output: Any) -> None:
        seen[:] = [output]

    def logits() -> Tensor:
        output = seen[0]
        found = getattr(output, "logits", output[0] if isinstance(output, tuple) else None)
        if not isinstance(found, Tensor) or found.shape[:-1] != batch.labels.shape:
            raise UnsupportedModelError(
                f"got a {type(explained_module(model)).__name__}, expected a model with a language-modelling head"
            )
        return found

    with forward_hook(model, keep):
        yield logits


@contextmanager
def forward_hook(module: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Register a forward hook for this thread only."""
    thread = get_ident()
    handle = module.register_forward_hook(lambda *seen: hook(*seen) if get_ident() == thread else None)
    try:
        yield
    finally:
        handle.remove()
