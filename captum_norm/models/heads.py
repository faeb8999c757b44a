"""Finds the output position that a model's head reads: the default position to explain."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from captum_norm.checks import as_index, as_indices
from captum_norm.errors import InvalidInputError
from captum_norm.models.sentences import SentenceEncoder
from captum_norm.models.wrappers import class_of, config_of, unwrapped

ReadPosition = Literal["first", "last", "mean"]

Position = int | ReadPosition | Sequence[int] | Tensor | None
"""Output positions to explain, in the forms that users may pass."""

HeadPosition = ReadPosition | Literal["patches", "first and patches", "weighted mean"]
"""Image heads may read the mean of all patches, without the tokens before them, alone or with the first token.

Sentence encoders may weight each real position by its number, from 1."""

# They have logits at every position.
TAGGERS = ("ForMaskedLM", "ForTokenClassification")
# These have other outputs at every position: hidden states, or scores of where an answer begins.
_OF_EVERY_POSITION = (*TAGGERS, "Model", "ForPreTraining", "ForQuestionAnswering")
CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForNextSentencePrediction")
LABELLED = (*CLASSIFIERS, "ForTokenClassification")
# Image heads that do not read the first token alone; the first two may, by their configuration.
_IMAGES: Mapping[str, HeadPosition] = MappingProxyType(
    {
        "BeitForImageClassification": "patches",
        "Data2VecVisionForImageClassification": "patches",
        "CLIPForImageClassification": "patches",
        "MetaClip2ForImageClassification": "patches",
        "Dinov2ForImageClassification": "first and patches",
        "Dinov2WithRegistersForImageClassification": "first and patches",
        "IJepaForImageClassification": "mean",
        "SiglipForImageClassification": "mean",
        "Siglip2ForImageClassification": "mean",
    }
)

# What the poolings of a SentenceTransformer read; all others read no one position.
POOLINGS: Mapping[str, HeadPosition] = MappingProxyType(
    {
        "cls": "first",
        "lasttoken": "last",
        "mean": "mean",
        "mean_sqrt_len_tokens": "mean",
        "weightedmean": "weighted mean",
    }
)


def has_labels(model: nn.Module) -> bool:
    """Whether the model's outputs are labelled classes, not tokens of a vocabulary."""
    return class_of(model).__name__.endswith(LABELLED)


def has_sigmoids(model: nn.Module) -> bool:
    """Whether each class has a probability of its own (multi-label classification)."""
    return getattr(config_of(model), "problem_type", None) == "multi_label_classification"


def read_position(model: nn.Module, *, causal: bool) -> HeadPosition | None:
    """Look up the position that a model's head reads, by the model's class.

    Args:
        model: the model, with or without a head, in torch's wrappers or not.
        causal: whether its attention is causal.

    Returns:
        ``"last"`` for causal models (next word, or their classifiers), ``"first"`` for bidirectional classifiers
        unless they pool several positions, ``"mean"`` of the real tokens for models with an output at every position.
        None for classes outside transformers, and for those whose heads differ.
    """
    if isinstance(model, SentenceEncoder):
        return POOLINGS.get(model.pooling or "")
    model, kind = unwrapped(model), class_of(model)
    name, config = kind.__name__, config_of(model)
    if not kind.__module__.startswith("transformers."):
        return None
    if causal:
        return "last"
    if name.endswith(_OF_EVERY_POSITION):
        return "mean"
    if not name.endswith(CLASSIFIERS) or getattr(model, "main_input_name", None) not in ("input_ids", "pixel_values"):
        return None
    if getattr(config, "classifier_pooling", None) in ("mean", "late"):
        return "mean"
    return _IMAGES.get(name, "first") if getattr(config, "use_mean_pooling", True) else "first"


def pooled_rows(position: str, real: Tensor, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Weight of each position if the head reads several, (B, S); None if it reads one.

    Args:
        position: what the head reads.
        real: True at real positions, (B, S).
        model: the model; its configuration has the number of tokens before the patches.
        dtype: the dtype of the weights.
    """
    if position == "mean":
        return _shares(real, dtype)
    if position == "weighted mean":
        return _shares(real.cumsum(1) * real, dtype)
    if position not in ("patches", "first and patches"):
        return None
    before = 1 + getattr(config_of(model), "num_register_tokens", 0)
    patches = real & (torch.arange(real.shape[1], device=real.device) >= before)
    rows = _shares(patches, dtype)
    if position == "first and patches":
        rows = rows / 2
        rows[:, 0] = 0.5
    return rows


def _shares(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = numbers.to(dtype)
    return numbers / numbers.sum(1, keepdim=True)


def positions_of_examples(position: int | str | Sequence[int] | Tensor | None, real: Tensor) -> Tensor:
    """Resolve the user's position to an index per example.

    Args:
        position: an index (negative from the end), one per example, or ``"first"`` or ``"last"`` real position.
        real: True at real positions, (B, S).

    Returns:
        indices (B,), from 0.

    Raises:
        InvalidInputError: if a position is no integer, is outside the sequence or padding, or if their number does
            not match the batch size.
    """
    batch, length = real.shape
    if isinstance(position, str):
        if position not in ("first", "last"):
            raise InvalidInputError(f'got the position "{position}"; expected an index, "first", "last" or "mean"')
        ends = real.long() if position == "first" else real.long().cumsum(1)
        return ends.argmax(1)
    single = not isinstance(position, Iterable) or (isinstance(position, Tensor) and position.dim() == 0)
    places = [as_index("position", position)] if single else as_indices("position", position)
    if len(places) not in (1, batch):
        raise InvalidInputError(f"got {len(places)} positions for {batch} examples")
    index = torch.tensor(places, device="cpu").expand(batch)
    for example, place in enumerate(index.tolist()):
        if not -length <= place < length:
            raise InvalidInputError(f"got position {place}; the sequence has {length} positions, 0 to {length - 1}")
        if not real[example, place]:
            raise InvalidInputError(f"got position {place}, which is padding in example {example}")
    return (index % length).to(real.device)


def position_rows(
    position: Position, head: HeadPosition | None, real: Tensor, like: Tensor, model: nn.Module
) -> Tensor:
    """Weight of each query's row, (B, Q).

    Args:
        position: see :meth:`captum_norm.AttentionMapAttribution.attribute`.
        head: what the head reads, used if no position is given.
        real: True at real positions, (B, Q).
        like: a tensor of the result's dtype and device.
        model: the model; its configuration has the number of tokens before the patches.

    Raises:
        InvalidInputError: if a position is outside the sequence or padding.
    """
    chosen = head if position is None else position
    # Users may name only one pooled position: the mean.
    if isinstance(chosen, str) and (position is None or chosen == "mean"):
        pooled = pooled_rows(chosen, real, model, like.dtype)
        if pooled is not None:
            return pooled.to(like)
    rows = torch.zeros_like(real, dtype=like.dtype, device=like.device)
    rows[torch.arange(len(real), device=like.device), positions_of_examples(chosen, real)] = 1
    return rows
