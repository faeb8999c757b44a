"""Reads fairseq checkpoints without fairseq, and without running code from them."""

import argparse
import pickle
import pickletools
import re
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from captum_norm import InvalidInputError
from captum_norm.text.lines import named, quoted

_MOST_PARTS = 100_000


class _Item(NamedTuple):
    """An object on the stack.

    Attributes:
        value: the object, if it is a number, a string or a tuple of these; otherwise None.
        parts: how many objects hashing it traverses.
    """

    value: Any = None
    parts: int = 1


_MARK = _Item("the mark")


@dataclass
class PickleScan:
    """The names that pickles refer to, and the memory that they declare.

    Attributes:
        names: the classes and functions, ``module.name``.
        storages: the number of elements of each storage, by key.
    """

    names: set[str] = field(default_factory=set)
    storages: dict[str, int] = field(default_factory=dict)

    def read(self, stream: BinaryIO) -> None:
        """Add the names and storages of the next pickle of a stream.

        Raises:
            InvalidInputError: a tuple has more than 100,000 objects, shared ones counted each time.
            ValueError: the pickle is incomplete.
            LookupError: it uses an object that does not exist.
        """
        stack, memo = list[_Item](), dict[Any, _Item]()
        for opcode, argument, _ in pickletools.genops(stream):
            match opcode.name:
                case "GLOBAL":
                    self.names.add(_current_name(str(argument)))
                    stack.append(_Item())
                case "MARK":
                    stack.append(_MARK)
                case "TUPLE":
                    stack.append(_tuple(_popped_to_mark(stack)))
                case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(_tuple(_popped(stack, len(opcode.stack_before))))
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "GET" | "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "BINPERSID":
                    self._declare(stack.pop().value)
                    stack.append(_Item())
                case _:
                    _step(stack, opcode, argument)

    def _declare(self, identity: Any) -> None:
        """Record the storage ``("storage", type, key, location, elements, …)``; torch refuses anything else."""
        match identity:
            case (_, _, str() | bytes() as key, _, int() as elements, *_):
                self.storages[str(key)] = max(elements, self.storages.get(str(key), 0))


def _current_name(argument: str) -> str:
    """The Python 3 name for a Python 2 name, as in pickles of protocol 2: ``builtins.int`` for ``__builtin__ long``."""
    module, name = argument.split(" ")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _tuple(items: list[_Item]) -> _Item:
    parts = 1 + sum(item.parts for item in items)
    if parts > _MOST_PARTS:
        raise InvalidInputError(f"a tuple has more than {_MOST_PARTS} objects")
    return _Item(tuple(item.value for item in items), parts)


def _popped(stack: list[_Item], count: int) -> list[_Item]:
    start = len(stack) - count
    if start < 0:
        raise LookupError("the stack has fewer objects")
    items = stack[start:]
    del stack[start:]
    return items


def _popped_to_mark(stack: list[_Item]) -> list[_Item]:
    items = list[_Item]()
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _step(stack: list[_Item], opcode: pickletools.OpcodeInfo, argument: Any) -> None:
    """Apply any other opcode to the stack, as described by ``pickletools``."""
    taken = [kind.name for kind in opcode.stack_before]
    if "mark" in taken:
        _popped_to_mark(stack)
        taken = taken[: taken.index("mark")]
    _popped(stack, len(taken))
    stack.extend(_Item(None if taken else argument) for _ in opcode.stack_after)


# What fairseq's files contain beside tensors: settings, enumerations, meters, and types noted by OmegaConf.
_EXPECTED = re.compile(
    r"argparse\.Namespace|(fairseq|omegaconf|numpy|typing|enum)\.\S+|collections\.defaultdict"
    r"|builtins\.(bool|dict|float|int|list|str|tuple)"
)
# What torch builds itself: tensors. Other functions of torch could make objects of any size from a number.
_BUILT = re.compile(
    r"collections\.OrderedDict|_codecs\.encode|torch\.(Size|device|[A-Z][A-Za-z0-9]*Storage)|torch\.[a-z]+\d*"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|torch\.nn\.parameter\.Parameter"
)
_BUILT_NEVER = re.compile(r"torch\.(Typed|Untyped)Storage")
_LONGEST_REASON = 200
_MOST_VALUES, _DEEPEST = 100_000, 50
# Embeddings may be stored under three names.
_MOST_COPIES = 8
_TORCHS_REASON = re.compile(r"WeightsUnpickler error: (.+?)(\.\s|\n|$)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        settings: the settings of model and task, flat, named as on fairseq's command line
            (``encoder_attention_heads``).
        weights: the tensors under fairseq's names.
    """

    settings: Mapping[str, Any]
    weights: Mapping[str, Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a ``.pt`` file of ``fairseq-train`` or ``fairseq-hydra-train``, 0.9 to 0.12.

    torch's weights-only unpickler builds tensors and plain containers; classes of fairseq, OmegaConf and argparse are
    replaced by one that only stores its arguments. No code of the file or of those libraries runs.

    Raises:
        InvalidInputError: the file does not exist, is damaged, refers to anything that no fairseq checkpoint needs, or
            contains no translation model.
    """
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; give the path of a fairseq checkpoint (.pt)")
    state = _unpickle(path)
    weights = state.get("model") if isinstance(state, Mapping) else None
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise InvalidInputError(f"{path} contains no model; expected a fairseq checkpoint, with weights under 'model'")
    if not any(name.startswith("encoder.") for name in weights):
        found = "a decoder alone" if any(name.startswith("decoder.") for name in weights) else "neither part"
        raise InvalidInputError(f"{path} is no translation model; expected an encoder and a decoder, found {found}")
    _check_sizes(weights, path)
    try:
        # A file may attach hooks and attributes to tensors; detach drops them.
        return Checkpoint(_settings(state), {name: tensor.detach() for name, tensor in weights.items()})
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error


def _check_sizes(weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights that would need much more memory, when copied, than the file has bytes."""
    total = 0
    for name, tensor in weights.items():
        declared = tensor.numel() * tensor.element_size()
        if tensor.layout != torch.strided or declared > tensor.untyped_storage().nbytes():
            shape = "×".join(map(str, tensor.shape))
            raise InvalidInputError(f"{path}: {quoted(name)} is declared as {shape}, more than the file contains")
        total += declared
    if total > _MOST_COPIES * path.stat().st_size:
        found = f"{path}: its weights have {total} bytes, the file has {path.stat().st_size}"
        raise InvalidInputError(f"{found}; expected each weight once")


class _Inert:
    """Replaces a class or a function: stores its arguments and state, and does nothing."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Inert":
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def content(self) -> Any:
        """The stored value: the content of a namespace or node, the value of an enumeration."""
        if not isinstance(self.state, Mapping):
            return self.arguments[-1] if self.arguments else None
        return next((self.state[key] for key in ("_content", "_val") if key in self.state), self.state)


class _Plain:
    """Converts settings to plain containers, within limits: lists can contain each other, and themselves."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """Convert a value.

        Raises:
            InvalidInputError: it has more than 100,000 values, shared ones counted each time, or more than 50 levels.
        """
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise InvalidInputError(
                f"its settings have more than {_MOST_VALUES} values, or more than {_DEEPEST} levels"
            )
        if isinstance(value, _Inert):
            return self(value.content(), depth + 1)
        if isinstance(value, argparse.Namespace):  # if the user has allowed it in torch
            value = vars(value)
        if isinstance(value, Mapping):
            return {key: self(entry, depth + 1) for key, entry in value.items() if isinstance(key, str)}
        if isinstance(value, list | tuple):
            return [self(entry, depth + 1) for entry in value]
        return value


def _unpickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about content that is refused anyway
            stand_ins: list[Any] = [(_Inert, name) for name in _checked_names(path)]
            with torch.serialization.safe_globals(stand_ins):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except pickle.UnpicklingError as error:
        reason = _TORCHS_REASON.search(str(error))
        said = named(reason[1][:_LONGEST_REASON]) if reason else _first_line(error)
        raise InvalidInputError(f"{path} is damaged, or refused by torch's weights-only unpickler: {said}") from error
    except Exception as error:  # damaged bytes can raise anything, in torch or its C++ code
        raise InvalidInputError(f"{path} is damaged or not a torch checkpoint: {_first_line(error)}") from error


def _checked_names(path: Path) -> set[str]:
    """The classes and functions that the file refers to, after checks that it runs no code and needs little memory."""
    scan, size = PickleScan(), path.stat().st_size
    with path.open("rb") as file:
        if zipfile.is_zipfile(path):
            _scan_zip(file, size, scan)
        else:
            for _ in range(5):  # a magic number, a version, the system, the state, and the keys of the storages
                scan.read(file)
    if sum(scan.storages.values()) > size:
        raise InvalidInputError(f"it declares {sum(scan.storages.values())} numbers, but has {size} bytes")
    names = {name for name in scan.names if _BUILT_NEVER.fullmatch(name) or not _BUILT.fullmatch(name)}
    refused = [name for name in names if not _EXPECTED.fullmatch(name)]
    if refused:
        found = f"it refers to {named(min(refused))}, which no fairseq checkpoint needs and which could run code"
        raise InvalidInputError(f"{found}; nothing was loaded")
    return names


def _scan_zip(file: BinaryIO, size: int, scan: PickleScan) -> None:
    """Scan the pickle in a zip file, which must be uncompressed, as torch writes it, and declare at most its size."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        declared = sum(entry.file_size for entry in entries)
        if declared > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise InvalidInputError(f"it unpacks to {declared} bytes and has {size}; expected a file that torch saved")
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                with archive.open(entry) as pickled:
                    scan.read(pickled)  # type: ignore[arg-type]


def _first_line(error: Exception) -> str:
    return named((str(error).strip() or type(error).__name__).splitlines()[0][:_LONGEST_REASON])


def _settings(state: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings of the task updated by the model's, flattened: ``encoder: {layers: …}`` is ``encoder_layers``."""
    plain = _Plain()
    settings = plain(state.get("args"))
    if settings is None:
        groups = plain(state.get("cfg"))
        groups = groups if isinstance(groups, Mapping) else {}
        settings = {
            name: value
            for group in (groups.get("task"), groups.get("model"))
            if isinstance(group, Mapping)
            for name, value in group.items()
        }
    if not isinstance(settings, Mapping) or not settings:
        raise InvalidInputError("it contains no settings; expected them under 'args' or 'cfg', as fairseq saves them")
    flat = dict[str, Any]()
    for name, value in settings.items():
        nested = value if name in ("encoder", "decoder", "quant_noise") and isinstance(value, Mapping) else None
        flat |= {name: value} if nested is None else {f"{name}_{inner}": entry for inner, entry in nested.items()}
    return flat
