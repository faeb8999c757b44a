"""Loads a model and its tokenizer: from a fairseq checkpoint and its data folder, or one of captum-norm-models."""

import ast
import importlib.resources
import os
import re
from pathlib import Path
from typing import Any, Literal, cast

from safetensors import safe_open

from alignment.fairseq.checkpoint import Checkpoint, read_checkpoint
from alignment.fairseq.conversion import TranslationModel, build_model, weight
from alignment.fairseq.tokenizer import (
    Codes,
    Dictionary,
    FairseqTokenizer,
    Segmenter,
    StrPath,
    find_dictionary,
    find_segmenter,
    read_dictionary,
)
from alignment.normalization import Language, NormalizedWords
from captum_norm import InvalidInputError
from captum_norm.checks import did_you_mean, quoted

_LANGUAGE = re.compile(r"[\w.@+-]{1,64}")


def load_fairseq_checkpoint(
    path: StrPath, data: StrPath, *, codes: Codes = None
) -> tuple[TranslationModel, FairseqTokenizer]:
    """Load a fairseq translation model, without fairseq, as a transformers model with the same logits.

    No code in the file is run. A post-norm Transformer becomes a ``MarianMTModel``, a pre-norm one a
    ``PegasusForConditionalGeneration``, in float32 and in ``eval()`` mode. Pad its inputs on the right, and start the
    decoder's with ``</s>``, id 2.

    Args:
        path: a ``.pt`` file that ``fairseq-train`` or ``fairseq-hydra-train`` wrote, 0.9 to 0.12.
        data: the folder that ``fairseq-preprocess`` wrote, with ``dict.LANGUAGE.txt`` and, unless ``codes`` is given,
            the file that splits words into pieces: a SentencePiece model (``*.model``) or codes of subword-nmt or
            fastBPE (``codes``, ``bpecodes``, ``NAME.codes``), one for both languages or one for each, with the
            language in its name. If the checkpoint does not name its languages, they are taken from the names of the
            data, ``*.SOURCE-TARGET.*``, as in fairseq.
        codes: the file that splits words, or one each for source and target; False if your words are already pieces.

    Raises:
        InvalidInputError: a file is missing, damaged or could run code; the model has no equivalent; or the
            dictionaries belong to another model.
    """
    folder = Path(data)
    if not os.path.isdir(folder):  # noqa: PTH112  # Path's raises an error for long names
        raise InvalidInputError(f"there is no folder {folder}; give data=FOLDER, the one that fairseq-preprocess wrote")
    return assemble(read_checkpoint(Path(path)), folder, codes)


def assemble(checkpoint: Checkpoint, data: Path, codes: Codes = None) -> tuple[TranslationModel, FairseqTokenizer]:
    """Build a checkpoint's model, and its tokenizer from the files in a folder."""
    source_codes, target_codes = codes if isinstance(codes, tuple) else (codes, codes)
    source_language, target_language = _languages(checkpoint, data)
    source = _side(checkpoint, source_language, "encoder", data, source_codes)
    target = _side(checkpoint, target_language, "decoder", data, target_codes)
    return build_model(checkpoint.settings, checkpoint.weights), FairseqTokenizer(source, target)


def _languages(checkpoint: Checkpoint, data: Path) -> tuple[str, str]:
    """Source and target language, from the settings or, as in fairseq, from the names of the data."""
    match [checkpoint.settings.get(setting) for setting in ("source_lang", "target_lang")]:
        case [str() as source, str() as target]:
            for language in (source, target):
                if not _LANGUAGE.fullmatch(language):
                    raise InvalidInputError(
                        f"the checkpoint names the language {quoted(language)}; expected one such as fr"
                    )
            return source, target
    named = (path.name.split(".") for path in data.iterdir())
    pairs = {tuple(parts[1].split("-")) for parts in named if len(parts) >= 3}
    match [pair for pair in pairs if len(pair) == 2]:
        case [(source, target)]:
            return source, target
        case others:
            pair = ", ".join(sorted(map("-".join, others))) or "none"
            raise InvalidInputError(
                f"the checkpoint does not name its languages, so they are taken from names of data such as "
                f"train.fr-en.fr.bin: expected one pair in {data}, found {pair}"
            )


def _side(
    checkpoint: Checkpoint, language: str, part: str, data: Path, codes: StrPath | Literal[False] | None
) -> tuple[str, Dictionary, Segmenter]:
    rows = len(weight(checkpoint.weights, f"{part}.embed_tokens.weight", 2))
    dictionary = read_dictionary(find_dictionary(data, language), rows)
    return language, dictionary, find_segmenter(data, language, dictionary, codes)


_SHIPPED = ["en-fr", "fr-en"]
_TIED = "tied."


def shipped_models() -> list[str]:
    """The names of the translation models of the package ``captum-norm-models``, which the extra ``demo`` brings.

    >>> "fr-en" in shipped_models()
    True
    """
    return [*_SHIPPED]


def load_shipped_model(name: str = "fr-en") -> tuple[TranslationModel, NormalizedWords]:
    """Load a translation model of the package ``captum-norm-models``, which the extra ``demo`` brings.

    The models read and write words in normal form (:func:`alignment.normalization.normalize_word`): lower case, no
    elisions, hyphens separated. The tokenizer normalises its input.

    Args:
        name: its translation direction, one of :func:`shipped_models`.

    Returns:
        The model, in float32 and in ``eval()`` mode, and its tokenizer.

    Raises:
        InvalidInputError: the model is unknown, or the package is not installed.

    >>> model, tokenizer = load_shipped_model("fr-en")
    >>> tokenizer.encode_source([["l'", "heure"]])[0].word_ids
    [0, 1, None]
    """
    if name not in _SHIPPED:
        raise InvalidInputError(
            f"got the model {name!r}, expected one of {', '.join(_SHIPPED)}{did_you_mean(name, _SHIPPED)}"
        )
    try:
        folder = Path(str(importlib.resources.files("captum_norm_models")))
    except ModuleNotFoundError as error:
        install = "pip install captum-norm-models, or name another model"
        raise InvalidInputError(f"the translation model {name} is not installed: {install}") from error
    with safe_open(folder / name / "model.safetensors", framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    ties = {key.removeprefix(_TIED): origin for key, origin in metadata.items() if key.startswith(_TIED)}
    weights |= {key: weights[origin] for key, origin in ties.items()}
    settings = {key: _parsed(text) for key, text in metadata.items()}
    model, tokenizer = assemble(Checkpoint(settings, weights), folder)
    source, target = (cast(Language, code) for code in (tokenizer.source_language, tokenizer.target_language))
    return model, NormalizedWords(tokenizer, source, target)


def _parsed(text: str) -> Any:
    """A number, True, False or None from its text; other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
