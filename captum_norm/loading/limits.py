"""Refuses files of models that would run for hours, run code, or take memory far beyond their own size."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_norm.checks import quoted, quoted_name

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST_BYTES = 1 << 28  # the largest file of settings or words
_MOST_SECONDS = 10  # how long an adapter's regular expressions may take
_READ = re.compile(r"(?!train).*\.(json|txt|model|spm|vocab)")
# Largest numbers in a configuration, by the ends of their names; the first are loops that build modules.
_MOST = (
    (re.compile(r"(layers?|depths?|blocks|stages)$"), 1024),
    (re.compile(r"experts$"), 4096),
    (re.compile(r"num_labels$"), 1 << 20),
)
_MOST_EXPERTS = 1 << 17
# Weights are stored in a bit or more; a pooler, of which there need not be any, has less than these.
_VALUES_PER_BYTE, _SPARE_VALUES = 16, 1 << 27
_MOST_BUFFER_BYTES = 1 << 32

_UNBOUNDED = re.compile(r"[*+?{|(]")
# As PEFT matches them: whole, behind a prefix, before or behind a layer's number, or anywhere.
_MATCHING = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for form in ("{}", r"(.*\.)?({})$", r"(^|.*\.){}($|\..*)", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."):
    for pattern in patterns:
        try:
            expression = re.compile(form.replace("{}", pattern))
        except re.error:
            continue
        for name in names:
            expression.match(name)
            expression.fullmatch(name)
"""
# Largest numbers in an adapter's configuration: what it repeats, builds, draws or scales with, and other sizes.
_MOST_OF_ADAPTER = (
    (re.compile(r"iter|(terms|depth|tasks|ranks)$"), 100),
    (re.compile(r"layers$"), 1024),
    (re.compile(r"alpha|seed|key|lambda|step|interval|warmup|tinit|tfinal|delta|length|frequency"), 1 << 31),
    (re.compile(""), 1 << 16),
)
_NITER = re.compile(r"pissa_niter_(\d{3,})")


def check_files(folder: Path) -> None:
    """Refuse a model's folder with pipes, devices, or files of settings or words that are too large to read."""
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            check_file(path)


def check_file(path: Path) -> None:
    """Refuse a pipe or a device, and a file of settings or words that is too large to read."""
    if not path.is_file():
        raise ValueError(f"its {quoted_name(path.name)} is no regular file")
    if _READ.fullmatch(path.name) and path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"its {quoted_name(path.name)} has more than {_MOST_BYTES >> 20} MiB")


def read_json(path: str) -> Any:
    """Read a file of settings."""
    check_file(Path(path))
    return json.loads(Path(path).read_bytes())


def check_config(content: Any) -> None:
    """Refuse a model's configuration that would build too many modules, before any is built."""
    numbers = _numbers(content)
    _check_numbers(numbers, _MOST)
    layers, experts = (max((n for name, n in numbers if pattern.search(name)), default=0) for pattern, _ in _MOST[:2])
    if layers * experts > _MOST_EXPERTS:
        raise ValueError(f"got {layers} layers of {experts} experts in its settings; expected {_MOST_EXPERTS:,} in all")


def check_size(empty: "nn.Module", stored: int) -> None:
    """Refuse a model, which has no memory yet, if it is much larger than its ``stored`` bytes of weights."""
    values = sum(parameter.numel() for parameter in empty.parameters())
    if values > stored * _VALUES_PER_BYTE + _SPARE_VALUES:
        raise ValueError(f"its settings have {values:,} weights, but its files {stored:,} bytes")
    tables = sum(buffer.nbytes for buffer in empty.buffers())
    if tables > _MOST_BUFFER_BYTES + stored:
        raise ValueError(f"its settings have tables of {tables:,} bytes, but its files {stored:,}")


def check_adapter(content: Mapping[str, Any], model: "nn.Module", weights: "Mapping[str, Tensor]") -> None:
    """Refuse the settings of a PEFT adapter that import other code, do not fit its tensors, or would not end."""
    if content.get("megatron_config") is not None:
        raise ValueError("its megatron_config imports Megatron, with which nothing is explained")
    if niter := _NITER.match(str(content.get("init_lora_weights"))):
        raise ValueError(f"got {niter[1][:9]} iterations of PiSSA; expected at most 99")
    # Lists are of tokens and layers by their numbers.
    numbers = _numbers({name: value for name, value in content.items() if not isinstance(value, list)})
    copied = sum(int(end) - int(start) for start, end in content.get("layer_replication") or [])
    _check_numbers([*numbers, ("layer_replication layers", copied)], _MOST_OF_ADAPTER)
    sizes = ["num_virtual_tokens", "token_dim", "num_transformer_submodules"]
    if content.get("peft_type") in ("PREFIX_TUNING", "CARTRIDGE"):
        sizes.append("num_layers")
    values = prod(content[name] for name in sizes if content.get(name))
    if content.get("num_virtual_tokens") and values > 4 * sum(tensor.numel() for tensor in weights.values()):
        raise ValueError(f"its virtual tokens have {values:,} values, but its files fewer")
    _check_patterns(content, [name for name, _ in model.named_modules()])


def _check_numbers(numbers: Sequence[tuple[str, int]], limits: Sequence[tuple[re.Pattern[str], int]]) -> None:
    """Refuse numbers beyond the limit of the first pattern in their name."""
    for name, number in numbers:
        most = next((most for pattern, most in limits if pattern.search(name)), number)
        if number > most:
            raise ValueError(f"got {quoted_name(name)}={quoted(number)} in its settings; expected at most {most:,}")


def _check_patterns(content: Mapping[str, Any], names: list[str]) -> None:
    """Match an adapter's regular expressions with the modules' names in a process of their own, which can be ended."""
    fields = {name: value for name, value in content.items() if re.search("modules|pattern|parameters", name)}
    patterns = [text for _, text in _values(fields) if isinstance(text, str) and _UNBOUNDED.search(text)]
    if not patterns:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHING],
            input=json.dumps([patterns, names]).encode(),
            timeout=_MOST_SECONDS,
            check=False,
            capture_output=True,
        )
    except subprocess.TimeoutExpired as error:
        longest = quoted(max(patterns, key=len))
        raise ValueError(f"its regular expressions take more than {_MOST_SECONDS} s, {longest} for one") from error


def _values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values in a configuration with the names of their fields, which are values, too."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield "", str(key)
            yield from _values(value, str(key))
    elif isinstance(content, list):
        for value in content:
            yield from _values(value, name)
    else:
        yield name, content


def _numbers(content: Any) -> list[tuple[str, int]]:
    """The integers of a configuration with their names."""
    return [(name, int(n)) for name, n in _values(content) if type(n) is int or (type(n) is float and n.is_integer())]
