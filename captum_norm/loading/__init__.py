"""Loads a model and its tokenizer: from a folder, the Hugging Face hub, the demo or this package."""

from captum_norm.loading.files import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.loading.models import (
    Precision,
    Quantization,
    load,
    load_model,
    load_poolings,
    load_sentence_transformer,
    load_tokenizer,
    on_device,
)

__all__ = [
    "DEFAULT_MODEL",
    "LANGUAGE_MODEL",
    "Precision",
    "Quantization",
    "load",
    "load_model",
    "load_poolings",
    "load_sentence_transformer",
    "load_tokenizer",
    "on_device",
]
