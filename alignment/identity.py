"""Hashes models and tokenizers, so that a run is resumed only with the same ones."""

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
"""Settings with the origin of a file."""

_CALL_STATE = ("truncation", "padding")
"""Settings in which a fast tokenizer stores its latest call."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def weights_digest(model: "nn.Module") -> str:
    """Hash the names, types, shapes and values of a model's parameters and persistent buffers, adapters included.

    This takes about a second per gigabyte.
    """
    import torch

    from captum_norm.models import loaded

    digest = hashlib.blake2b(digest_size=16)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, stored in model.state_dict().items():
        path, _, attribute = name.rpartition(".")
        module, tensor = modules.get(path), stored
        if module is not None and attribute in module._parameters:
            with loaded(module):
                tensor = module._parameters[attribute]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def configuration_digest(model: "nn.Module") -> str:
    """Hash what determines how a model computes: structure, configurations, declared layouts; not how it generates."""
    from captum_norm.models import registered_layouts

    classes = {type(module).__name__ for module in model.modules()}
    facts = {
        "structure": _ADDRESS.sub("", repr(model)),
        "configuration": _settings(getattr(model, "config", None)),
        "adapters": {name: _settings(adapter) for name, adapter in (getattr(model, "peft_config", None) or {}).items()},
        "layouts": {name: repr(layout) for name, layout in registered_layouts().items() if name in classes},
        "feed_forwards": {},  # of earlier versions, whose hashes stay the same
    }
    return _digest(facts)


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash the files that a tokenizer saves: vocabulary, rules and settings, but no chat template."""
    files = {}
    with TemporaryDirectory(prefix="captum-norm-") as folder:
        try:
            tokenizer.save_pretrained(folder)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"cannot hash this {type(tokenizer).__name__}, which cannot be saved: {error}"
            ) from error
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
    """A configuration of transformers or peft as plain values, without settings that do not change results."""
    settings = config.to_dict() if hasattr(config, "to_dict") else None
    return None if settings is None else {name: settings[name] for name in settings if name not in _PLACES}


def _digest(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """What JSON has no form for: sets, and torch's types."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else _ADDRESS.sub("", str(value))
