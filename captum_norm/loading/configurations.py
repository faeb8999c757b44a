"""Reads a model's configuration, and refuses one that no model has before anything is built."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_norm.loading.adapters import TASKS, Adapter
from captum_norm.loading.places import place_of, quiet, said_plainly
from captum_norm.text.lines import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Upper bounds for counts and widths in a configuration; a larger number is damage, and would take hours to build.
_PARTS = re.compile("layer|head|expert|label|block|depth|stage")
_MOST_PARTS = 2**16
_SIZES = re.compile("size|dim|embd|position|hidden|width|inner|channel|d_model|d_ff|d_kv|n_ctx")
_MOST_WIDE = 2**24
_LARGE = 2**31


def read_config(name_or_path: str) -> Any:
    """Read the configuration of a model.

    Raises:
        InvalidInputError: there is none, or no model has such numbers.
    """
    folder = place_of(name_or_path)
    import transformers

    with quiet(), said_plainly(f"cannot load the model {name_or_path}{_absence(folder)}"):
        content, _ = transformers.PretrainedConfig.get_config_dict(folder)
        _check_numbers(content)
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _check_numbers(content: Any) -> None:
    """Refuse a configuration with numbers that no model has, before anything is built."""
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__} in its configuration, expected names and values")
    for name, number in _numbers(content):
        most = _MOST_PARTS if _PARTS.search(name) else _MOST_WIDE if _SIZES.search(name) else number
        if number > most:
            raise ValueError(f"got {name} {number} in its configuration, expected at most {most}")


def _numbers(content: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and of nested ones, with their names."""
    parts = [content]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield str(name), number


def check_room(config: Any, kind: Any, folder: Path) -> None:
    """Refuse a configuration of a much larger model than the weights in its folder.

    Transformers would initialise the missing weights randomly, which may exceed the memory.
    """
    sizes = sorted((number for _, number in _numbers(config.to_dict())), reverse=True)[:2]
    if not folder.is_dir() or prod(sizes) < _LARGE:
        return
    stored = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    parameters = sum(parameter.numel() for parameter in empty_model(config, kind).parameters())
    if parameters > 8 * stored:  # less than a bit each
        found = f"its configuration describes {parameters:,} parameters"
        raise ValueError(f"{found}, and its files have {stored:,} bytes")


def empty_model(config: Any, kind: Any) -> "PreTrainedModel":
    """The model of a configuration, without memory for its weights."""
    import torch

    with torch.device("meta"):
        model: PreTrainedModel = getattr(kind, "from_config", kind)(config)  # AutoModel's
    return model


def _absence(place: str) -> str:
    return "" if Path(place).is_dir() else " (no folder of that name here)"


def class_of(config: Any, adapter: Adapter | None) -> Any:
    """The class of a model: the one that its adapter names, or its configuration; ``AutoModel`` if neither does.

    Raises:
        ValueError: it is no model.
    """
    import transformers

    names = config.architectures or []
    if adapter is not None and adapter.model_class is not None:
        if adapter.model_class in TASKS.values():
            return getattr(transformers, adapter.model_class)
        names = [adapter.model_class]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"got {quoted(names)} for the architectures in its configuration, expected their names")
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
        if found is not None:
            raise ValueError(f"its configuration names the architecture {name}, which is no model")
    return transformers.AutoModel
