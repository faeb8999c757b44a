"""Which output position a model's head reads: the position one usually wants explained."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError
from captum_norm.models.inputs import as_index

ReadPosition = Literal["first", "last", "mean"]

# Their logits are about every position.
TAGGERS = ("ForMaskedLM", "ForTokenClassification")
CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice", "ForNextSentencePrediction")


def read_position(model: nn.Module, *, causal: bool) -> ReadPosition:
    """Where a model's head reads.

    Args:
        model: the model, with or without a head.
        causal: whether its attention looks back only.

    Returns:
        ``"last"`` for causal models (next word, or their classifiers), ``"first"`` for classifiers of bidirectional
        models unless they are configured to pool by the mean, ``"mean"`` of the real tokens otherwise.
    """
    if causal:
        return "last"
    if not type(model).__name__.endswith(CLASSIFIERS):
        return "mean"
    return "mean" if getattr(getattr(model, "config", None), "classifier_pooling", None) == "mean" else "first"


def positions_of_examples(position: int | str | Sequence[int] | Tensor, real: Tensor) -> Tensor:
    """The position of each example that the user names.

    Args:
        position: an index (negative from the end), one for each example, or ``"first"`` or ``"last"`` real position.
        real: True at real positions, (B, S).

    Returns:
        (B,), from 0.

    Raises:
        InvalidInputError: for anything but integers, a position outside the sequence or in its padding, or another
            number of positions than of examples.
    """
    batch, length = real.shape
    if isinstance(position, str):
        if position not in ("first", "last"):
            raise InvalidInputError(f'got the position "{position}"; expected an index, "first", "last" or "mean"')
        ends = real.long() if position == "first" else real.long().cumsum(1)
        return ends.argmax(1)
    entries: Any = position.tolist() if isinstance(position, Tensor) else position
    places = [as_index("position", entry) for entry in (entries if isinstance(entries, (list, tuple)) else [entries])]
    if len(places) not in (1, batch):
        raise InvalidInputError(f"got {len(places)} positions for {batch} examples")
    index = torch.tensor(places).expand(batch)
    for example, place in enumerate(index.tolist()):
        if not -length <= place < length:
            raise InvalidInputError(f"got position {place}; the sequence has {length} positions, 0 to {length - 1}")
        if not real[example, place]:
            raise InvalidInputError(f"got position {place}, which is padding in example {example}")
    return (index % length).to(real.device)
