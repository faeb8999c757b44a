"""What results share: they compare by value, move between devices, are saved and loaded, and display as pages.

A result is its fields, those that its class is created with; their annotations say how they are read from a file.
"""

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as saved_tensors
from torch import Tensor

from captum_norm.checks import quoted, quoted_name
from captum_norm.errors import InvalidInputError
from captum_norm.results import import_views, make_figure, make_file, make_page
from captum_norm.results.tables import csv_records, data_frame, json_text
from captum_norm.text.files import place_of, write_whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Result"]

VERSION = 3
"""The version of the files that :meth:`Result.save` writes; files of earlier ones are read, too."""

# Texts and numbers that are no tensors; Python takes twenty times as much for them.
_LONGEST_HEADER = 1 << 25

# What reading a damaged file may raise.
_DAMAGED = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError, struct.error)


class Result:
    """Base class of results."""

    # The axes that fields may have in files, a letter each; those of the same letter have the same size, "." has any.
    _axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    _added: ClassVar[Mapping[str, Any]] = {}  # fields that files of earlier versions may lack, and what they hold then
    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        (content, tensors), (other_content, others) = _encoded_fields(self), _encoded_fields(other)
        return content == other_content and all(_same(tensor, others[name]) for name, tensor in tensors.items())

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Move all tensors to a device, or convert those of floating-point numbers to a dtype, as for tensors.

        Args:
            device: the device; or the dtype alone.
            dtype: the dtype.

        Returns:
            a new result.

        Raises:
            InvalidInputError: there is no such device or dtype.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise InvalidInputError(f"got the dtype {quoted(dtype)}; expected one of floating-point numbers")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise InvalidInputError(
                f"got the device {quoted(device)}; expected one that is here, such as cpu"
            ) from error

        content, tensors = _encoded_fields(self)
        moved = {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        return type(self)(**_fields(content, hints_of(type(self)), moved))

    def cpu(self) -> Self:
        """Move all tensors to the CPU."""
        return self.to("cpu")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one file, of the kind that the suffix of its name says.

        ``.safetensors`` holds everything, tensors and JSON in its metadata, and :meth:`load` reads it. ``.html`` is the
        page, ``.png``, ``.svg`` and ``.pdf`` are the figure, ``.csv`` and ``.json`` the records.

        Args:
            path: the file's path or URL; its folder must exist. An older file is replaced as a whole, or not at all.

        Returns:
            the path.

        Raises:
            InvalidInputError: the name has another suffix, its folder does not exist or cannot be written to, or there
                is no figure, see :meth:`plot`.
        """
        return write_whole(path, self.file_bytes(PurePath(str(place_of(path))).suffix))

    def file_bytes(self, suffix: str) -> bytes:
        """Return the content of the file that :meth:`save` writes under a name with this suffix."""
        makers: dict[str, Callable[[], bytes]] = {
            ".safetensors": self._data,
            ".html": lambda: make_file(self.page(), ".html"),
            **dict.fromkeys((".png", ".svg", ".pdf"), lambda: make_file(self.plot(), suffix.lower())),
            ".csv": lambda: csv_records(self.records()).encode(),
            ".json": lambda: json_text(self._json()).encode(),
        }
        if suffix.lower() not in makers:
            raise InvalidInputError(
                f"got a file name with the suffix {quoted(suffix)}; expected one of {', '.join(makers)}: name it as "
                "result.html, for example"
            )
        return makers[suffix.lower()]()

    def records(self) -> list[dict[str, Any]]:
        """Return the result as a table: a dictionary for each row, with the names of the columns."""
        raise NotImplementedError

    def _json(self) -> Any:
        """Return what a ``.json`` file holds, by default the records."""
        return self.records()

    def to_frame(self) -> "pd.DataFrame":
        """Return a data frame of pandas with a row for each of the records.

        Raises:
            InvalidInputError: pandas is not installed.
        """
        return data_frame(self.records())

    def _data(self) -> bytes:
        """Format all fields as a safetensors file."""
        content, tensors = _encoded_fields(self)
        # Tensors may share memory, which a file does not.
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        metadata = {"format": "captum-norm", "version": str(VERSION), "result": type(self).__name__, "content": text}
        return saved_tensors(own, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a ``.safetensors`` file of :meth:`save`, to the CPU; nothing in it is run.

        Args:
            path: the file's path or URL.

        Raises:
            InvalidInputError: there is no such file, or it is damaged, or holds another result.
        """
        place = place_of(path)
        called = quoted_name(os.fspath(path))
        with _refusing_damage(called):
            if place.status()[0] == "other":
                raise OSError(errno.EINVAL, "it is a pipe or a device")
            data = place.read()
            (size,) = struct.unpack("<Q", data[:8])
            if size > _LONGEST_HEADER:
                raise ValueError(f"its header has {size:,} bytes; expected at most {_LONGEST_HEADER:,}")
            tensors = load_tensors(data)
            metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        version, kind = metadata.get("version"), metadata.get("result")
        versions = [str(number) for number in range(1, VERSION + 1)]
        if metadata.get("format") != "captum-norm":
            raise InvalidInputError(f"cannot load {called}: it is a safetensors file, but not of captum-norm")
        if version not in versions:
            raise InvalidInputError(
                f"cannot load {called}: it has version {quoted_name(str(version))} of the format, expected "
                f"{' or '.join(versions)}; take the version of captum-norm that wrote it"
            )
        if kind != cls.__name__:
            other = quoted_name(str(kind))
            raise InvalidInputError(
                f"cannot load {called}: it holds {other}; expected {cls.__name__}: read it by {other}.load"
            )
        with _refusing_damage(called):
            content = cls._upgraded(json.loads(metadata["content"]), int(version))
            values = _fields(content, hints_of(cls), tensors)
            _check_axes(cls, values)
            return cls(**values)

    @classmethod
    def _upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        """Return the content of a file of an earlier version with the fields of this one."""
        return content if version == VERSION else dict(cls._added) | content

    def plot(self) -> "Figure":
        """Draw the result; a notebook shows the figure.

        Raises:
            InvalidInputError: it fits no single figure, such as maps of several examples, or has nothing to draw.
        """
        import_views(self)
        figure: Figure = make_figure(self)
        return figure

    def page(self) -> Any:
        """Return what a notebook shows, as the data of a page: a :class:`captum_norm.show.page.Page`."""
        import_views(self)
        return make_page(self)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
        frame: str = self.page()._repr_html_()
        return frame


def hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of the fields that a class is created with."""
    if "__dataclass_fields__" in vars(kind):
        found = get_type_hints(kind)
        return {field.name: found[field.name] for field in fields(kind) if field.init}
    return {name: hint for name, hint in get_type_hints(kind.__init__).items() if name != "return"}  # type: ignore[misc]


def contents(result: Any) -> dict[str, Any]:
    """Return the fields of a result or dataclass."""
    return {name: getattr(result, name) for name in hints_of(type(result))}


def _encoded_fields(result: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make JSON of the fields of a result, and a dictionary of their tensors."""
    tensors = dict[str, Tensor]()
    return {name: _encoded(value, name, tensors) for name, value in contents(result).items()}, tensors


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors, on any devices, have the same numbers; NaN is NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    left, right = tensor.detach().cpu(), other.detach().cpu()
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Make JSON of the value of a field; tensors go into ``tensors`` by their names in the result."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if is_dataclass(value):
        value = contents(value)
    if isinstance(value, Mapping):
        return {key: _encoded(part, f"{name}.{key}", tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _fields(content: Any, hints: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read the fields of a result or dataclass."""
    if not isinstance(content, dict):
        raise TypeError(_few(content))
    if content.keys() != hints.keys():
        raise ValueError(f"got the fields {_few(content)}; expected {', '.join(hints)}")
    values = {}
    for name, hint in hints.items():
        try:
            values[name] = _decoded(content[name], hint, tensors)
        except TypeError as error:
            raise ValueError(f"the field {name} is {error}") from error
    return values


def _decoded(value: Any, hint: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Read a value as its annotation says; TypeError if it is no such value."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        for part in parts:
            with suppress(TypeError):
                return _decoded(value, part, tensors)
        raise TypeError(_few(value))
    if is_dataclass(kind):
        variables = dict(zip(getattr(kind, "__parameters__", ()), parts, strict=False))
        hints = {name: variables.get(of_field, of_field) for name, of_field in hints_of(cast(type, kind)).items()}
        return cast(type, kind)(**_fields(value, hints, tensors))
    if isinstance(value, list) and kind is not str and isinstance(kind, type) and issubclass(kind, Sequence):
        return _sequence(value, kind, parts, tensors)
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Mapping):
        return {_decoded(name, parts[0], tensors): _decoded(part, parts[1], tensors) for name, part in value.items()}
    return _plain(value, kind, parts, tensors)


def _sequence(value: list[Any], kind: Any, parts: Sequence[Any], tensors: Mapping[str, Tensor]) -> Any:
    named_tuple = hasattr(kind, "_fields")
    hints: Any = list(get_type_hints(kind).values()) if named_tuple else parts
    if not named_tuple and (kind is not tuple or parts[-1] is ...):
        hints = [*parts[:1]] * len(value)
    if len(hints) != len(value):
        raise TypeError(_few(value))
    entries = [_decoded(part, hint, tensors) for part, hint in zip(value, hints, strict=True)]
    return kind(*entries) if named_tuple else tuple(entries) if kind is tuple else entries


def _plain(value: Any, kind: Any, choices: Sequence[Any], tensors: Mapping[str, Tensor]) -> Any:
    if kind is Tensor and isinstance(value, dict) and value.keys() == {"tensor"} and value["tensor"] in tensors:
        return tensors[value["tensor"]]
    if kind is float and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
        return float(value)
    if (kind in (str, int, bool, NoneType) and type(value) is kind) or (kind is Literal and value in choices):
        return value
    raise TypeError(_few(value))


def _check_axes(kind: type[Result], values: Mapping[str, Any]) -> None:
    sizes = dict[str, int]()
    for name, patterns in kind._axes.items():
        value = values[name]
        found = (len(value),) if isinstance(value, list) else tuple(value.shape) if isinstance(value, Tensor) else None
        if found is None:
            continue
        pattern = next((axes for axes in patterns if len(axes) == len(found)), None)
        if pattern is None:
            raise ValueError(f"the field {name} has the shape {found}")
        for axis, size in zip(pattern, found, strict=True):
            if axis != "." and sizes.setdefault(axis, size) != size:
                raise ValueError(f"the field {name} has the shape {found}, which does not fit the others")


def _few(value: Any) -> str:
    text = ", ".join(value) if isinstance(value, dict) else repr(value)
    return quoted_name(text if len(text) <= 60 else f"{text[:60]}…")


@contextmanager
def _refusing_damage(called: str) -> Iterator[None]:
    """Say in one sentence that a file cannot be read, or why it is damaged."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"cannot load {called}: {error.strerror or error}") from error
    except _DAMAGED as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidInputError(
            f"cannot load {called}: the file is damaged ({reason}); save the result again"
        ) from error
