"""Tells which library a model is built with."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from captum_norm.models.attention import AttentionFunction
from captum_norm.models.hooks import evaluating
from captum_norm.models.libraries.fairseq import FAIRSEQ
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.libraries.library import Library
from captum_norm.models.libraries.torch_nn import TORCH_NN

LIBRARIES = (TORCH_NN, FAIRSEQ, HUGGING_FACE)
"""The first one that fits is a model's; the last one fits all."""


def library_of(model: nn.Module) -> Library:
    """The library that a model is built with."""
    return next(library for library in LIBRARIES if library.fits(model))


@contextmanager
def attention_through(model: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """While open, a model is in ``eval()`` and every attention call of it runs ``function``; it is left as it was."""
    with library_of(model).attention_through(model, function), evaluating(model):
        yield


def no_attention(model: nn.Module) -> str:
    """The message for a model none of whose attention went through its library's seam."""
    expected = ", or ".join(library.models for library in reversed(LIBRARIES))
    return f"no attention was seen in {type(model).__name__}. Expected {expected}"
