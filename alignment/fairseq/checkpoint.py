"""Reads fairseq checkpoints without fairseq, and without running code from them."""

import argparse
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from captum_norm import InvalidInputError
from captum_norm.checks import quoted_name

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
_OPENNMT = (
    "is a checkpoint of OpenNMT-py, expected one of fairseq; docs/how-to/align-formats.md says which models can be read"
)
_TORCHS_REASON = re.compile(r"WeightsUnpickler error: (.+?)(\.\s|\n|$)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint."""

    settings: Mapping[str, Any]
    weights: Mapping[str, Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a ``.pt`` file of ``fairseq-train`` or ``fairseq-hydra-train``, 0.9 to 0.12."""
    if not os.path.isfile(path):  # noqa: PTH113  # Path's raises an error for long names
        raise InvalidInputError(f"there is no file {path}; give the path of a fairseq checkpoint (.pt)")
    state = _unpickle(path)
    if isinstance(state, Mapping) and {"generator", "vocab"} <= state.keys():
        raise InvalidInputError(f"{path} {_OPENNMT}")
    weights = state.get("model") if isinstance(state, Mapping) else None
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise InvalidInputError(f"{path} contains no model; expected a fairseq checkpoint, with weights under 'model'")
    if not any(name.startswith("encoder.") for name in weights):
        message = "a decoder alone" if any(name.startswith("decoder.") for name in weights) else "neither part"
        raise InvalidInputError(f"{path} is no translation model; expected an encoder and a decoder, found {message}")
    try:
        # A file may attach hooks and attributes to tensors; detach drops them.
        return Checkpoint(_settings(state), {name: tensor.detach() for name, tensor in weights.items()})
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except RecursionError as error:
        raise InvalidInputError(f"{path}: its settings contain each other endlessly") from error


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


def _plain(value: Any) -> Any:
    """Settings as plain containers."""
    if isinstance(value, _Inert):
        return _plain(value.content())
    if isinstance(value, argparse.Namespace):  # if the user has allowed it in torch
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
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
        said = quoted_name(reason[1][:_LONGEST_REASON]) if reason else _first_line(error)
        raise InvalidInputError(f"{path} is damaged, or refused by torch's weights-only unpickler: {said}") from error
    except Exception as error:  # damaged bytes can raise anything, in torch or its C++ code
        raise InvalidInputError(f"{path} is damaged or not a torch checkpoint: {_first_line(error)}") from error


def _checked_names(path: Path) -> set[str]:
    """The classes and functions that the file refers to, if no fairseq checkpoint has others."""
    names = {name for name in _names(path) if _BUILT_NEVER.fullmatch(name) or not _BUILT.fullmatch(name)}
    refused = [name for name in names if not _EXPECTED.fullmatch(name)]
    if any(name.startswith(("onmt.", "torchtext.")) for name in refused):
        raise InvalidInputError(f"it {_OPENNMT}")
    if refused:
        message = (
            f"it refers to {quoted_name(min(refused))}, which no fairseq checkpoint needs and which could run code"
        )
        raise InvalidInputError(f"{message}; nothing was loaded")
    return names


def _names(path: Path) -> set[str]:
    """The classes and functions in the pickles of a file, from their opcodes alone: nothing is built or called."""
    names = set[str]()
    with path.open("rb") as file:
        if not zipfile.is_zipfile(path):
            for _ in range(5):  # a magic number, a version, the system, the state, and the keys of the storages
                names |= _globals(file)
            return names
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    with archive.open(name) as pickled:
                        names |= _globals(pickled)
    return names


def _globals(stream: IO[bytes]) -> set[str]:
    """The names that the next pickle of a stream refers to; torch refuses those of protocol 4."""
    names = set[str]()
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL":
            module, name = str(argument).split(" ")
            # The Python 3 name for a Python 2 name, as in pickles of protocol 2.
            names.add(".".join(NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))))
    return names


def _first_line(error: Exception) -> str:
    return quoted_name((str(error).strip() or type(error).__name__).splitlines()[0][:_LONGEST_REASON])


def _settings(state: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings of the task updated by the model's, flattened: ``encoder: {layers: …}`` is ``encoder_layers``."""
    settings = _plain(state.get("args"))
    if settings is None:
        groups = _plain(state.get("cfg"))
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
