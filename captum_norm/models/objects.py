"""Finds the module to explain, and its tokenizer, in what people hold: a model, a pipeline, a SentenceTransformer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from captum_norm.errors import InvalidInputError
from captum_norm.models.offloading import input_device
from captum_norm.models.sentences import SENTENCE_TRANSFORMER, SentenceEncoder, is_instance
from captum_norm.models.wrappers import config_of, explained_module
from captum_norm.text.lines import quoted

if TYPE_CHECKING:
    from transformers import BatchEncoding

Texts = str | list[str] | list[tuple[str, str]]
"""A text, or several, or pairs of texts, for a model whose tokenizer is known."""


class ModelHolder(Protocol):
    """What holds a model and its tokenizer, such as a pipeline of transformers."""

    @property
    def model(self) -> Any:
        """The model."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        ...


_HOLDERS = {"Pipeline": "transformers.", "CrossEncoder": "sentence_transformers."}

Explainable = nn.Module | ModelHolder
"""What methods accept as a model."""


def opened(model: Explainable, tokenizer: Any = None) -> tuple[nn.Module, Any]:
    """Return the module to explain and its tokenizer, ``tokenizer`` if one is given; None if none is known.

    Args:
        model: a module, a pipeline of transformers, a SentenceTransformer or a CrossEncoder.
        tokenizer: the tokenizer.

    Raises:
        InvalidInputError: it is something else.
        UnsupportedModelError: it has no layers that can be observed, or is a SentenceTransformer that does not begin
            with a Transformer.
    """
    held: Any = model if is_instance(model, _HOLDERS) else explained_module(model)
    if is_instance(held, SENTENCE_TRANSFORMER):
        held = SentenceEncoder(held)
    found = explained_module(held.model) if is_instance(held, _HOLDERS) else held
    if tokenizer is None and (found is not held or isinstance(held, SentenceEncoder)):
        tokenizer = held.tokenizer
    return found, tokenizer


def are_texts(inputs: object) -> TypeGuard[Texts]:
    """Whether inputs are a text, or a list of texts or of pairs of texts."""
    listed = [inputs] if isinstance(inputs, str) else inputs
    return isinstance(listed, list) and bool(listed) and all(map(_is_text, listed))


def tokenized(model: nn.Module, texts: Texts, tokenizer: Any) -> Mapping[str, Any]:
    """Turn texts into the arguments of a model, on its device; none is truncated, but by a SentenceTransformer's limit.

    Raises:
        InvalidInputError: there is no tokenizer, or it cannot tokenize them.
    """
    listed = [texts] if isinstance(texts, str) else texts
    if tokenizer is None:
        raise InvalidInputError(
            f"got the text {quoted(listed[0])} and no tokenizer; create the method with tokenizer=, or pass what the "
            'tokenizer returns: tokenizer(texts, return_tensors="pt")'
        )
    if isinstance(model, SentenceEncoder) and tokenizer is model.tokenizer:
        return model.features(listed)
    options = {"truncation": False, "verbose": False}
    try:
        # The tokenizers of many causal models have no padding token; which one it is does not matter.
        if len(listed) > 1 and getattr(tokenizer, "pad_token_id", 0) is None:
            return _padded([tokenizer(text, return_attention_mask=True, **options) for text in listed], model)
        found: BatchEncoding = tokenizer(listed, return_tensors="pt", padding=len(listed) > 1, **options)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"{type(tokenizer).__name__} cannot tokenize the inputs: {reason[:300]}") from error
    return found.to(input_device(model))


def _padded(encoded: Sequence[Mapping[str, list[int]]], model: nn.Module) -> dict[str, Tensor]:
    """Pad to one batch, (B, S) each."""
    padding = {"input_ids": getattr(config_of(model), "pad_token_id", None) or 0}
    columns = {name: [torch.tensor(one[name]) for one in encoded] for name in encoded[0]}
    return {
        name: pad_sequence(rows, batch_first=True, padding_value=padding.get(name, 0)).to(input_device(model))
        for name, rows in columns.items()
    }


def _is_text(value: object) -> bool:
    parts = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    return all(isinstance(part, str) for part in parts)
