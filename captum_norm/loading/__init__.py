"""Loads a model and its tokenizer: from a folder, the Hugging Face hub, the demo or this package."""

from captum_norm.loading.models import Precision, load, load_model, load_tokenizer, on_device
from captum_norm.loading.places import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.loading.quantization import Quantization
from captum_norm.loading.sentences import load_poolings, load_sentence_transformer

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
