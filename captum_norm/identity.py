"""Hashes what numbers depend on besides the text, so that a run goes on only with what it was begun with."""

import hashlib
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from captum_norm.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_PLACES = ("_name_or_path", "name_or_path", "is_local", "local_files_only", "tokenizer_file", "vocab_file", "cache_dir")
"""Settings that say where something was read from."""

_CALL_STATE = ("truncation", "padding")
"""What a fast tokenizer keeps of its latest call."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def weights_digest(model: "nn.Module") -> str:
    """A hash of the names, types, shapes and values of a model's parameters and persistent buffers, adapters included.

    All values are read: it takes about a second for each gigabyte.
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def configuration_digest(model: "nn.Module") -> str:
    """A hash of what decides how a model computes with its weights.

    That is the structure that it prints, its configuration and those of its adapters if it has them, and the layouts
    that are declared for its layers; not how it generates, nor where it was loaded from.
    """
    from captum_norm.models import registered_feed_forwards, registered_layouts

    classes = {type(module).__name__ for module in model.modules()}
    told = {
        "structure": _ADDRESS.sub("", repr(model)),
        "configuration": _settings(getattr(model, "config", None)),
        "adapters": {name: _settings(adapter) for name, adapter in (getattr(model, "peft_config", None) or {}).items()},
        "layouts": {name: repr(layout) for name, layout in registered_layouts().items() if name in classes},
        "feed_forwards": {name: repr(found) for name, found in registered_feed_forwards().items() if name in classes},
    }
    return _digest(told)


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of what a tokenizer saves of itself: vocabulary, rules and settings, but no template of a chat.

    Raises:
        InvalidInputError: it cannot be saved.
    """
    files = {}
    with TemporaryDirectory(prefix="captum-norm-") as folder:
        try:
            tokenizer.save_pretrained(folder)
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"cannot tell this {type(tokenizer).__name__} by its files: {error}") from error
        for path in Path(folder).rglob("*"):
            if path.is_file() and "chat_template" not in str(path.relative_to(folder)):
                content = path.read_bytes()
                files[str(path.relative_to(folder))] = (
                    _tokenizer_settings(content) if path.suffix == ".json" else hashlib.blake2b(content).hexdigest()
                )
    return _digest({"class": type(tokenizer).__name__, "files": files})


def _tokenizer_settings(content: bytes) -> Any:
    settings = json.loads(content)
    if isinstance(settings, dict):
        for name in (*_PLACES, *_CALL_STATE, "chat_template"):
            settings.pop(name, None)
    return settings


def _settings(config: Any) -> Any:
    """A configuration of transformers or peft as plain values, without what does not change numbers."""
    told = config.to_dict() if hasattr(config, "to_dict") else None
    return None if told is None else {name: value for name, value in told.items() if name not in _PLACES}


def _digest(told: Any) -> str:
    # Keys may be numbers, and values sets or types of torch.
    text = json.dumps(_plain(told), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, str | int | float | bool) else _ADDRESS.sub("", str(value))
