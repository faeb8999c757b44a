"""Tells which library a model is built with."""

from torch import nn

from captum_norm.models.libraries.fairseq import FAIRSEQ
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.libraries.library import Library
from captum_norm.models.libraries.torch_nn import TORCH_NN

LIBRARIES = (TORCH_NN, FAIRSEQ, HUGGING_FACE)
"""In order: a model belongs to the first library that fits; the last one fits all models."""


def library_of(model: nn.Module) -> Library:
    """Return the library that a model is built with."""
    return next(library for library in LIBRARIES if library.fits(model))


def no_attention(model: nn.Module) -> str:
    """Return the message for a model in which no attention call was intercepted."""
    expected = ", or ".join(library.models for library in reversed(LIBRARIES))
    return f"no attention was seen in {type(model).__name__}. Expected {expected}"
