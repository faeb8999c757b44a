"""Translates sentences by beam search, and computes the log-probabilities of given translations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alignment.teacher_forcing import NO_LABEL, OnError, TeacherForcedBatch, teacher_forced_batches
from alignment.tokenization import EncodedSentence, TranslationTokenizer, check_words
from captum_norm import InvalidInputError, UnsupportedModelError
from captum_norm.models import check_sequence, evaluating, explained_module

_ANY_WORD = "a"


def translate(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    sentences: Sequence[Sequence[str]],
    *,
    beam: int = 5,
    max_length: int = 200,
    max_tokens: int = 4096,
    on_error: OnError | None = None,
) -> list[list[str]]:
    """Translate sentences by beam search; return the best hypothesis of each.

    Sentences of similar length are translated together. The rest of the model's generation configuration (length
    penalty, forbidden words and so on) applies unchanged.

    Args:
        model: a Hugging Face sequence-to-sequence model, or one from :func:`alignment.load_fairseq_checkpoint`, in
            ``eval()`` mode.
        tokenizer: its tokenizer.
        sentences: the words of each source sentence.
        beam: the number of hypotheses; 1 is greedy search.
        max_length: the most pieces of a translation, end of sentence included; at most the model's positions.
        max_tokens: the largest batch, in source pieces times ``beam``, padding included.
        on_error: called for each unusable sentence, whose translation is then empty; None raises the error instead.

    Returns:
        The words of each translation, in the order of the sentences; none for a sentence without words.

    Raises:
        InvalidInputError: a sentence is too long for the model or cannot be encoded; the model cannot generate or is
            in training mode; or a number is less than 1.

    >>> from alignment import load_shipped_model
    >>> translate(*load_shipped_model("fr-en"), [["le", "débat", "est", "clos", "."], []])
    [['the', 'debate', 'is', 'closed', '.'], []]
    """
    if min(beam, max_length, max_tokens) < 1:
        message = f"got beam={beam}, max_length={max_length} and max_tokens={max_tokens}"
        raise InvalidInputError(f"{message}, expected at least 1 of each")
    model = explained_module(model)
    if not hasattr(model, "generate"):
        expected = "a Hugging Face sequence-to-sequence model, or one from load_fairseq_checkpoint"
        raise InvalidInputError(f"got a {type(model).__name__}, which has no generate(); expected {expected}")
    if model.training:
        raise InvalidInputError("got a model in training mode, whose translations are random; call model.eval()")
    check_words(sentences)
    translations: list[list[str]] = [[] for _ in sentences]
    full = [index for index, words in enumerate(sentences) if words]

    def refuse(place: int, error: InvalidInputError) -> None:
        if on_error is None:
            raise InvalidInputError(f"sentence {full[place]}: {error}") from error
        on_error(full[place], error)

    # With a dummy target, sources are encoded, checked and batched as for alignment, and the decoder's start is known.
    pairs = [(sentences[index], [_ANY_WORD]) for index in full]
    size = max(1, max_tokens // beam)
    for batch in teacher_forced_batches(model, tokenizer, pairs, max_tokens=size, on_error=refuse):
        for place, ids in zip(batch.indices, _generated(model, batch, beam, max_length), strict=True):
            translations[full[place]] = tokenizer.decode_target(ids)
    return translations


def _generated(model: Any, batch: TeacherForcedBatch, beam: int, max_length: int) -> list[list[int]]:
    """The ids after the decoder's start in the best hypothesis of each sentence, padding included."""
    # Out-of-range ids come from a tokenizer of another model.
    for read in (batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]):
        check_sequence(model, model.get_input_embeddings(), read)
    # Start token and language code.
    first = next(step for step, index in enumerate(batch.target[0].word_ids) if index is not None)
    start: Tensor = batch.inputs["decoder_input_ids"][:, : first + 1]
    length = start.shape[1] + max_length
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        length = min(length, positions)
    generated = model.generate(
        input_ids=batch.inputs["input_ids"],  # PeftModel takes names alone
        attention_mask=batch.inputs["attention_mask"],
        decoder_input_ids=start,
        decoder_start_token_id=int(start[0, 0]),
        num_beams=beam,
        num_return_sequences=1,
        do_sample=False,
        max_length=length,
        max_new_tokens=None,
        use_cache=True,  # without a cache, FSMT's generation looks ahead
    )
    ids: list[list[int]] = generated[:, start.shape[1] :].tolist()
    return ids


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
        UnsupportedModelError: the model has no language-modelling head.

    >>> from alignment import load_shipped_model
    >>> pair = ["le", "débat", "est", "clos", "."], ["the", "debate", "is", "closed", "."]
    >>> [(_, scores)] = target_log_probabilities(*load_shipped_model("fr-en"), [pair])
    >>> scores.round(1).tolist()
    [-0.4, -0.1, -0.2, -0.2, -0.2, -0.1]
    """
    module = explained_module(model)
    for batch in teacher_forced_batches(model, tokenizer, pairs, max_tokens=max_tokens, on_error=on_error):
        with torch.no_grad(), evaluating(module), recorded_logits(model, batch) as logits:
            model(**batch.inputs)
        yield from zip(batch.indices, batch_log_probabilities(logits(), batch), strict=True)


def emitted_steps(target: EncodedSentence) -> slice:
    """The decoder steps that emit the first word's first piece up to the end of sentence."""
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
    """Record the logits of the model's forward passes; the function yielded returns the last ones, (B, T, V)."""
    seen: list[Any] = []

    def keep(_module: nn.Module, _args: object, output: Any) -> None:
        seen[:] = [output]

    def logits() -> Tensor:
        output = seen[0]
        recorded = getattr(output, "logits", output[0] if isinstance(output, tuple) else None)
        if not isinstance(recorded, Tensor) or recorded.shape[:-1] != batch.labels.shape:
            raise UnsupportedModelError(
                f"got a {type(explained_module(model)).__name__}, expected a model with a language-modelling head"
            )
        return recorded

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
