"""Declares the options that name a translation model, and loads it."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from alignment.formats import split_words
from alignment.pipeline.blocks import Splits
from alignment.tokenization import IdentifiedTokenizer
from captum_norm import InvalidInputError
from captum_norm.commands.options import add_quantization

if TYPE_CHECKING:
    from torch import nn

    from alignment.fairseq import Codes
    from alignment.normalization import Language

Loaded = tuple["nn.Module", IdentifiedTokenizer]

DEFAULT_MODEL = "fr-en"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that :func:`load` reads."""
    group = parser.add_argument_group("the translation model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
        help="fr-en or en-fr, which are shipped with this package; a .pt file of fairseq; or a Hugging Face folder or "
        "name, of a model or a PEFT adapter (default: %(default)s)",
    )
    group.add_argument(
        "--data",
        metavar="DIR",
        help="for a .pt file: the folder that fairseq-preprocess wrote, with the dictionaries and the codes or model "
        "that split words into pieces",
    )
    group.add_argument(
        "--codes",
        action="append",
        metavar="FILE",
        help="for a .pt file: the SentencePiece model or BPE codes that split words into pieces, if not in --data; "
        "give it twice for source and target, or none if the words are already pieces",
    )
    group.add_argument(
        "--source-language", metavar="CODE", help="for a multilingual Hugging Face model, such as deu_Latn"
    )
    group.add_argument("--target-language", metavar="CODE", help="as --source-language")
    group.add_argument(
        "--source-prefix",
        metavar="TEXT",
        help="text in front of each source sentence of a Hugging Face model, such as '>>fra<<'",
    )
    add_quantization(group)
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the type of the weights; norms are summed in float32 (default: as loaded)",
    )
    group.add_argument("--device", default="cpu", help="such as cuda or cuda:1 (default: %(default)s)")


def load(options: argparse.Namespace, device: str | None = None) -> Loaded:
    """Load the model, on a device (that of ``--device`` by default) and in ``eval()`` mode, and its tokenizer.

    Raises:
        InvalidInputError: the model does not exist or is not a translation model, an option does not apply to it, or
            the device does not exist.
    """
    from captum_norm.loading import on_device

    kind = next(kind for kind in _KINDS if kind.recognises(options.model))
    for other in _KINDS:
        for name in other.options:
            if name not in kind.options and getattr(options, name) is not None:
                message = f"{_flag(name)} is for {other.title}; {options.model} is {kind.title}"
                raise InvalidInputError(message)
    dtype = getattr(options, "dtype", None)
    if dtype is not None and options.quantize is not None:
        raise InvalidInputError(f"got --dtype {dtype} and --quantize {options.quantize}; give one of them")
    model, tokenizer = kind.load(options)
    if dtype is not None:
        import torch

        model.to(getattr(torch, dtype))
    return on_device(model, device or options.device), tokenizer


def splits(options: argparse.Namespace) -> Splits:
    """The functions that split source and target sentences into words.

    Raises:
        InvalidInputError: there is ``--tokenize``, and the model is not a shipped one.
    """
    if not options.tokenize:
        return split_words, split_words
    from alignment.fairseq.loading import shipped_models
    from alignment.normalization import tokenize

    if options.model not in shipped_models():
        raise InvalidInputError("--tokenize is for the shipped models; give text tokenised as in the model's training")
    source, target = (cast("Language", code) for code in options.model.split("-"))
    return partial(tokenize, language=source), partial(tokenize, language=target)


def identity(
    options: argparse.Namespace, model: "nn.Module", tokenizer: IdentifiedTokenizer, device: str
) -> dict[str, str | None]:
    """What must not change when a run is resumed: hashes of model and tokenizer, their options, the device type."""
    from captum_norm.identity import configuration_digest, weights_digest

    names = sorted({name for kind in _KINDS for name in kind.options})
    given = {name: getattr(options, name) for name in names}
    texts = {name: " ".join(value) if isinstance(value, list) else value for name, value in given.items()}
    return {
        "model": f"{options.model} ({weights_digest(model)})",
        "configuration": configuration_digest(model),
        "tokenizer": tokenizer.digest(),
        **texts,
        "device": device.partition(":")[0],
    }


def _load_shipped(options: argparse.Namespace) -> Loaded:
    from alignment.fairseq.loading import load_shipped_model

    return load_shipped_model(options.model)


def _load_fairseq(options: argparse.Namespace) -> Loaded:
    from alignment.fairseq import load_fairseq_checkpoint

    if options.data is None:
        raise InvalidInputError(f"got no --data for {options.model}; give the folder that fairseq-preprocess wrote")
    codes: Codes
    match options.codes:
        case None:
            codes = None
        case ["none"]:
            codes = False
        case [file]:
            codes = file
        case [source, target]:
            codes = source, target
        case given:
            raise InvalidInputError(f"got --codes {len(given)} times, expected once or twice, for source and target")
    return load_fairseq_checkpoint(options.model, options.data, codes=codes)


def _load_huggingface(options: argparse.Namespace) -> Loaded:
    from alignment.huggingface import HuggingFaceTokenizer
    from captum_norm.loading import load

    model, tokenizer = load(options.model, options.quantize)
    if not model.config.is_encoder_decoder:
        expected = "an encoder–decoder translation model"
        raise InvalidInputError(f"got {options.model}, a {type(model).__name__}; expected {expected}")
    return model, HuggingFaceTokenizer(
        tokenizer,
        source_language=options.source_language,
        target_language=options.target_language,
        source_prefix=options.source_prefix or "",
    )


def _is_shipped(name: str) -> bool:
    from alignment.fairseq.loading import shipped_models

    return name in shipped_models()


@dataclass(frozen=True)
class _Kind:
    """A kind of model, loaded in one way.

    Attributes:
        title: its name in messages.
        recognises: whether a name or path refers to one.
        load: loads one.
        options: the options that apply to this kind only.
    """

    title: str
    recognises: Callable[[str], bool]
    load: Callable[[argparse.Namespace], Loaded]
    options: tuple[str, ...] = ()


_KINDS = (
    _Kind("a shipped model", _is_shipped, _load_shipped),
    _Kind("a fairseq checkpoint", lambda name: Path(name).suffix == ".pt", _load_fairseq, ("data", "codes")),
    _Kind(
        "a Hugging Face model",
        lambda _: True,
        _load_huggingface,
        ("source_language", "target_language", "source_prefix", "quantize"),
    ),
)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
