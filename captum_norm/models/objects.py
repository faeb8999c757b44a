"""Finds the module to explain, and its tokenizer, in what people hold: a model, a pipeline, a SentenceTransformer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import nn

from captum_norm.errors import InvalidInputError
from captum_norm.models.offloading import input_device
from captum_norm.models.sentences import SENTENCE_TRANSFORMER, SentenceEncoder, is_instance
from captum_norm.models.wrappers import explained_module
from captum_norm.texts import quoted

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
    try:
        options = {"padding": len(listed) > 1, "truncation": False, "verbose": False}
        found: BatchEncoding = tokenizer(listed, return_tensors="pt", **options)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"{type(tokenizer).__name__} cannot tokenize the inputs: {reason[:300]}") from error
    return found.to(input_device(model))


def _is_text(value: object) -> bool:
    parts = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    return all(isinstance(part, str) for part in parts)
