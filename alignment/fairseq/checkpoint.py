"""fairseq checkpoints, read without fairseq and without running anything that they hold."""

import argparse
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from captum_norm import InvalidInputError

# What fairseq's files hold beside tensors: settings, enumerations, meters, and the types that OmegaConf notes.
_EXPECTED = re.compile(
    r"argparse\.Namespace|(fairseq|omegaconf|numpy|typing|enum)\.\S+|collections\.defaultdict"
    r"|builtins\.(bool|dict|float|int|list|str|tuple)"
)
# What torch may build itself; it refuses what is not harmless.
_LEFT_TO_TORCH = re.compile(r"torch\.\S+|collections\.OrderedDict")
# What torch raises, found by damaging bytes one by one.
_DAMAGED = AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, struct.error
_TORCHS_REASON = re.compile(r"WeightsUnpickler error: (.+?)(\.\s|\n|$)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says of its model.

    Attributes:
        settings: the settings of the model and the task, flat, under the names of fairseq's command line
            (``encoder_attention_heads``).
        weights: the tensors under fairseq's names.
    """

    settings: Mapping[str, Any]
    weights: Mapping[str, Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a ``.pt`` file of ``fairseq-train`` or ``fairseq-hydra-train``, 0.9 to 0.12.

    torch's unpickler for weights builds tensors and plain containers; every class of fairseq, OmegaConf and argparse
    is replaced by one that only keeps what it is given. No code of the file or of those libraries runs.

    Raises:
        InvalidInputError: there is no such file, it is damaged, it refers to anything that no fairseq checkpoint
            needs, or it holds no translation model.
    """
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; give the path of a fairseq checkpoint (.pt)")
    state = _unpickle(path)
    weights = state.get("model") if isinstance(state, Mapping) else None
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise InvalidInputError(f"{path} holds no model; expected a checkpoint of fairseq, with weights under 'model'")
    if not any(name.startswith("encoder.") for name in weights):
        found = "a decoder alone" if any(name.startswith("decoder.") for name in weights) else "neither part"
        raise InvalidInputError(f"{path} is no translation model; expected an encoder and a decoder, found {found}")
    return Checkpoint(_settings(state, path), weights)


class _Inert:
    """Stands in for a class or a function: keeps its arguments and its state, and does nothing."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Inert":
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def plain(self) -> Any:
        """What was kept, as plain containers: a namespace's or node's content, an enumeration's value."""
        if not isinstance(self.state, Mapping):
            return _plain(self.arguments[-1]) if self.arguments else None
        content = next((self.state[key] for key in ("_content", "_val") if key in self.state), self.state)
        return _plain(content)


def _plain(value: Any) -> Any:
    if isinstance(value, _Inert):
        return value.plain()
    if isinstance(value, argparse.Namespace):  # where the user has told torch that it is safe
        value = vars(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _unpickle(path: Path) -> Any:
    zipped = zipfile.is_zipfile(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else _old_globals(path)
        refused = [name for name in names if not _EXPECTED.fullmatch(name)]
        if refused:
            found = f"{path} refers to {min(refused)}, which no fairseq checkpoint needs and which could run code"
            raise InvalidInputError(f"{found}; nothing was loaded")
        stand_ins: list[Any] = [(_Inert, name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except InvalidInputError:
        raise
    except pickle.UnpicklingError as error:
        reason = _TORCHS_REASON.search(str(error))
        said = reason[1] if reason else _first_line(error)
        raise InvalidInputError(f"{path} is damaged, or refused by torch's reader of weights: {said}") from error
    except _DAMAGED as error:
        raise InvalidInputError(f"{path} is damaged or no checkpoint of torch: {_first_line(error)}") from error


def _old_globals(path: Path) -> set[str]:
    """What a file of torch before 1.6 refers to and torch may refuse; such a file begins with four pickles."""
    with path.open("rb") as file:
        names = {name for _ in range(4) for name in _globals_of_one(file)}
    return {name for name in names if not _LEFT_TO_TORCH.fullmatch(name)}


def _globals_of_one(file: BinaryIO) -> Iterable[str]:
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            module, name = str(argument).split(" ")
            yield f"{'builtins' if module == '__builtin__' else module}.{name}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _settings(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Settings of the model over those of the task, with ``encoder: {layers: …}`` written ``encoder_layers``."""
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
        raise InvalidInputError(f"{path} holds no settings; expected them under 'args' or 'cfg', as fairseq saves them")
    flat = dict[str, Any]()
    for name, value in settings.items():
        nested = value if name in ("encoder", "decoder", "quant_noise") and isinstance(value, Mapping) else None
        flat |= {name: value} if nested is None else {f"{name}_{inner}": entry for inner, entry in nested.items()}
    return flat
