"""Loads sentence encoders, and the names of their poolings."""

import json
from pathlib import Path
from typing import Any

from captum_norm.errors import InvalidInputError
from captum_norm.loading.places import DEFAULT_MODEL, file_at, place_of, quiet, said_plainly
from captum_norm.loading.quantization import Quantization, quantized

_MODULES = "modules.json"
# How older versions of sentence-transformers write them.
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def load_sentence_transformer(name_or_path: str = DEFAULT_MODEL, quantization: Quantization | None = None) -> Any:
    """Load a SentenceTransformer on the CPU, in ``eval()`` mode; None if it is another model.

    Args:
        name_or_path: see :func:`load`.
        quantization: see :func:`load`.

    Raises:
        InvalidInputError: it cannot be loaded, or sentence-transformers is not installed.
    """
    place = place_of(name_or_path)
    with quiet(), said_plainly(f"cannot load the sentence encoder {name_or_path}"):
        if file_at(place, _MODULES) is None:
            return None
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                f"{name_or_path} is a sentence encoder, which needs sentence-transformers: pip install "
                "sentence-transformers"
            ) from error
        options = {} if quantization is None else {"quantization_config": quantized(quantization)}
        model: Any = SentenceTransformer(place, device="cpu", trust_remote_code=False, model_kwargs=options)
    return model.eval()


def load_poolings(name_or_path: str = DEFAULT_MODEL) -> list[str]:
    """Load the names of a SentenceTransformer's poolings, such as ``mean``; none if it is another model.

    Raises:
        InvalidInputError: its files are damaged.
    """
    place = place_of(name_or_path)
    with quiet(), said_plainly(f"cannot load the sentence encoder {name_or_path}"):
        listed = file_at(place, _MODULES)
        modules = [] if listed is None else json.loads(Path(listed).read_bytes())
        found: list[str] = []
        for folder in (module["path"] for module in modules if module["type"].endswith(".Pooling")):
            file = file_at(place, f"{folder}/config.json")
            config = {} if file is None else json.loads(Path(file).read_bytes())
            modes = config.get("pooling_mode") or [_OLD_POOLINGS[name] for name in _OLD_POOLINGS if config.get(name)]
            found += [modes] if isinstance(modes, str) else modes
    return found
