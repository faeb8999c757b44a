"""Loads the translation models shipped with this package."""

import ast
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open

from alignment.fairseq import TranslationModel
from alignment.fairseq.checkpoint import Checkpoint
from alignment.fairseq.loading import assemble
from alignment.normalization import Language, NormalizedWords
from captum_norm import InvalidInputError

_MODELS = Path(__file__).parent / "models"
_TIED = "tied."


def shipped_models() -> list[str]:
    """The names of the translation models shipped with this package.

    >>> "fr-en" in shipped_models()
    True
    """
    return sorted(path.parent.name for path in _MODELS.glob("*/model.safetensors"))


def load_shipped_model(name: str = "fr-en") -> tuple[TranslationModel, NormalizedWords]:
    """Load a translation model shipped with this package.

    The models read and write words in normal form (:func:`alignment.normalization.normalize_word`): lower case, no
    elisions, hyphens separated. The tokenizer normalises its input.

    Args:
        name: its translation direction, one of :func:`shipped_models`.

    Returns:
        The model, in float32 and in ``eval()`` mode, and its tokenizer.

    Raises:
        InvalidInputError: the model is unknown.

    >>> import torch
    >>> model, tokenizer = load_shipped_model("fr-en")
    >>> [sentence] = tokenizer.encode_source([["le", "débat", "est", "clos", "."]])
    >>> with torch.no_grad():
    ...     ids = model.generate(torch.tensor([sentence.ids]))[0].tolist()
    >>> tokenizer.decode_target(ids)
    ['the', 'debate', 'is', 'closed', '.']
    """
    if name not in shipped_models():
        raise InvalidInputError(f"got the model {name!r}, expected one of {', '.join(shipped_models())}")
    with safe_open(_MODELS / name / "model.safetensors", framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    ties = {key.removeprefix(_TIED): origin for key, origin in metadata.items() if key.startswith(_TIED)}
    weights |= {key: weights[origin] for key, origin in ties.items()}
    settings = {key: _parsed(text) for key, text in metadata.items()}
    model, tokenizer = assemble(Checkpoint(settings, weights), _MODELS)
    source, target = (cast(Language, code) for code in (tokenizer.source_language, tokenizer.target_language))
    return model, NormalizedWords(tokenizer, source, target)


def _parsed(text: str) -> Any:
    """A number, True, False or None from its text; other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
