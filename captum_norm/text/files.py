"""Files and folders by path or URL: read, listed, and written such that readers never see an incomplete file.

URLs, such as ``s3://bucket/text``, are those of fsspec.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from glob import has_magic
from io import BufferedReader, RawIOBase
from os import PathLike, fspath
from pathlib import Path
from re import match
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Literal, Self, cast

from captum_norm.checks import quoted, quoted_name
from captum_norm.errors import InvalidInputError

Kind = Literal["file", "directory", "other"]

_OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "memory", "s3", "s3a"}
"""Where there are no folders to make, and an object appears when it is complete."""

_S3_OPTIONS = {"max_concurrency": 1}
"""Read an object in one request; otherwise another asks for its size first."""

_READ_BYTES = 1 << 20
_REQUEST_BYTES = 1 << 23
_PART_BYTES = 1 << 27
"""S3 takes at most 10,000 parts of a file: 1.3 TB in parts of this size."""

_CODES: dict[type[Exception], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
"""The numbers of errors that come without one."""


class Local:
    """A file or folder of this machine, or of a shared file system; methods raise OSError."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, Path(name)

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "Local":
        return Local(str(self.path / name))

    def status(self) -> tuple[Kind, int | None]:
        """What it is, with links followed, and its size in bytes; raises FileNotFoundError if it does not exist."""
        status = os.stat(self.name and self.path)  # noqa: PTH116  # Path("") is the current folder
        regular = stat.S_ISREG(status.st_mode)
        return "file" if regular else "directory" if stat.S_ISDIR(status.st_mode) else "other", status.st_size

    def kind(self) -> Kind | None:
        """What it is; None if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return self.status()[0]
        return None

    def is_same(self, other: "Place") -> bool:
        """Whether another, both of which exist, is the same file."""
        return isinstance(other, Local) and self.path.samefile(other.path)

    def entries(self) -> Iterator[tuple[str, bool]]:
        """The names in this folder, and whether they are regular files rather than links."""
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                yield entry.name, entry.is_file(follow_symlinks=False) or not os.path.lexists(entry)

    def read(self, start: int = 0, end: int | None = None) -> bytes:
        """Its bytes from ``start`` to ``end``; all by default."""
        with self.open() as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def open(self) -> BinaryIO:
        """Open it for reading."""
        return self.path.open("rb")

    def make(self) -> None:
        """Make this folder."""
        self.path.mkdir(exist_ok=True)

    def remove(self, *names: str) -> None:
        """Remove files of this folder, those that exist."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_folder(self) -> None:
        """Remove the folder, if it is empty."""
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def write(self, content: bytes) -> None:
        """Write the whole file."""
        with self.replacing() as file:
            file.write(content)

    @contextmanager
    def replacing(self, temporary: "Local | None" = None) -> Iterator[BinaryIO]:
        """Open it for writing; a temporary file, by default in the same folder, replaces it at the end."""
        target = Path(os.path.realpath(self.path))
        # Random, since a process in another container may have the same number.
        path = temporary.path if temporary else target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with path.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            path.replace(target)
        except BaseException:
            try:
                path.unlink(missing_ok=True)
            finally:  # an interrupt may come here, too
                path.unlink(missing_ok=True)
            raise
        with suppress(OSError):  # some systems cannot open or flush folders
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


class Remote:
    """A file or folder by its URL; methods are those of :class:`Local`.

    Raises:
        InvalidInputError: the URL names nothing, its protocol is unknown, or the protocol's package is not installed.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        protocol, _, path = self.url.partition("://")
        if not path.strip("/"):
            raise InvalidInputError(f"got the URL {url}; expected the name of a file or folder in it")
        self._objects, self._s3 = protocol in _OBJECT_STORES, protocol in {"s3", "s3a"}
        with as_oserror(url):
            try:
                # What other processes write must be seen at once.
                options = {"use_listings_cache": False, **(_S3_OPTIONS if self._s3 else {})}
                self._system, self._path = url_to_fs(self.url, **options)
            except ValueError as error:
                raise InvalidInputError(f"cannot reach {url}: {error}") from error

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Self:
        below = copy(self)
        below.url, below._path = f"{self.url}/{name}", f"{self._path}/{name}"
        return below

    def status(self) -> tuple[Kind, int | None]:
        """What it is, and its size, if known; a folder of an object store is one if it holds anything."""
        with as_oserror(self.url):
            info = self._system.info(self._path)
            return info["type"], info.get("size")

    def kind(self) -> Kind | None:
        with suppress(FileNotFoundError):
            return self.status()[0]
        return None

    def is_same(self, other: "Place") -> bool:
        return isinstance(other, Remote) and (self._system, self._path) == (other._system, other._path)

    def entries(self) -> Iterator[tuple[str, bool]]:
        """The names in this folder, and whether they are files."""
        listed: list[dict[str, Any]] = []
        with suppress(FileNotFoundError), as_oserror(self.url):
            listed = self._system.ls(self._path, detail=True)
        for entry in listed:
            if name := entry["name"].rstrip("/").removeprefix(self._path).strip("/"):
                yield name, entry["type"] == "file"

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        with as_oserror(self.url):
            return bytes(self._system.cat_file(self._path, start=start, end=end))

    def open(self) -> BinaryIO:
        with as_oserror(self.url):
            opened = self._system.open(self._path, "rb", block_size=_REQUEST_BYTES)
        return BufferedReader(_Reader(opened, self.url), _READ_BYTES)

    def make(self) -> None:
        """Make this folder and those above it, where there are folders."""
        if not self._objects:  # s3fs would make a bucket
            with as_oserror(self.url):
                self._system.makedirs(self._path, exist_ok=True)

    def remove(self, *names: str) -> None:
        paths = [f"{self._path}/{name}" for name in names]
        if self._s3 and len(paths) > 1 and not any(map(has_magic, paths)):  # rm takes an asterisk for several
            with as_oserror(self.url):
                self._system.rm(paths)
            return
        for path in paths:
            with suppress(FileNotFoundError), as_oserror(self.url):
                self._system.rm_file(path)

    def remove_folder(self) -> None:
        """Remove the folder, if it exists and is empty."""
        if not self._objects:
            with suppress(OSError), as_oserror(self.url):
                self._system.rmdir(self._path)

    def write(self, content: bytes) -> None:
        if self._objects:
            with as_oserror(self.url):
                self._system.pipe_file(self._path, content)
        else:
            with self.replacing() as file:
                file.write(content)

    @contextmanager
    def replacing(self, temporary: "Remote | None" = None) -> Iterator[BinaryIO]:
        """Open it for writing; S3 shows an object when it is complete, elsewhere a temporary file is renamed."""
        folder, _, name = self._path.rpartition("/")
        path = temporary._path if temporary else f"{folder}/.{name}.{secrets.token_hex(4)}.tmp"
        options: dict[str, Any] = {"autocommit": False, "block_size": _PART_BYTES} if self._s3 else {}
        with ExitStack() as failed:
            with as_oserror(self.url):
                file = self._system.open(self._path if self._s3 else path, "wb", **options)
            failed.callback(self._discard, file, path)
            yield cast(BinaryIO, Writer(file, self.url))
            with as_oserror(self.url):
                file.close()
                if self._s3:
                    file.commit()
                elif self._objects:  # mv would take a name with an asterisk for several
                    self._system.cp_file(path, self._path)
                    self._system.rm_file(path)
                else:
                    self._system.mv(path, self._path)
            failed.pop_all()

    def _discard(self, file: Any, path: str) -> None:
        """Give up a file that is being written."""
        with suppress(Exception):
            if self._s3:
                file.discard()
                file.closed = True  # otherwise the garbage collector uploads the rest
            else:
                file.close()
                self._system.rm_file(path)


Place = Local | Remote
"""A file or folder, which may not exist."""


def is_url(name: object) -> bool:
    """Whether a name is a URL rather than a path."""
    return isinstance(name, str | PathLike) and match("[a-z][a-z0-9+.-]*://", str(fspath(name))) is not None


def place_of(name: str | PathLike[str]) -> Place:
    """The file or folder at a path or URL."""
    if not isinstance(name, str | PathLike):
        raise InvalidInputError(f"got the path {quoted(name)}; expected a string or a path")
    return Remote(fspath(name)) if is_url(name) else Local(fspath(name))


def write_whole(path: str | PathLike[str], content: bytes) -> Path:
    """Write a file such that readers never see an incomplete one; returns its path."""
    file_to_write(path).write(content)
    return Path(path)


def file_to_write(path: str | PathLike[str]) -> Place:
    """The file to write at a path or URL; InvalidInputError if a local one cannot be written."""
    if not is_url(path):
        check_file(path)
    return place_of(path)


def check_file(name: str | PathLike[str]) -> Kind | None:
    """Check that a path or URL is a file or can become one; return what it is, None if it does not exist."""
    place = place_of(name)
    kind = _examined(place)
    if kind == "directory":
        raise InvalidInputError(f"cannot write {place}: it is a folder; give the name of a file in it")
    if isinstance(place, Local) and kind != "other":
        if not place.path.parent.is_dir():
            raise InvalidInputError(
                f"cannot write {place}: there is no folder {place.path.parent}; make it, or choose another one"
            )
        _check_writable(place.path.parent)
    return kind


def check_folder(name: str | PathLike[str]) -> None:
    """Check that a path or URL is a folder or can become one."""
    place = place_of(name)
    kind = _examined(place)
    if kind not in ("directory", None):
        raise InvalidInputError(f"cannot use {place} as a folder: it is a file")
    if isinstance(place, Local):
        if kind is None and not place.path.parent.is_dir():
            raise InvalidInputError(f"cannot make the folder {place}: there is no folder {place.path.parent}")
        _check_writable(place.path.parent if kind is None else place.path)


def _examined(place: Place) -> Kind | None:
    """What a place to write is; None if it does not exist, InvalidInputError if that cannot be told."""
    try:
        return place.kind()
    except OSError as error:
        raise InvalidInputError(f"cannot write {quoted_name(str(place))}: {error.strerror or error}") from error


def _check_writable(folder: Path) -> None:
    """Check that files can be created in a local folder, without leaving any."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(f"the folder {folder} cannot be written to ({error.strerror})") from error


@contextmanager
def as_oserror(url: str) -> Iterator[None]:
    """Convert the errors of a file system, which may be of any type, into OSErrors with number, reason and the URL."""
    try:
        yield
    except InvalidInputError:
        raise
    except ImportError as error:
        raise InvalidInputError(f"cannot reach {url}: {error}") from error
    except Exception as error:
        code = getattr(error, "errno", None) or _CODES.get(type(error), errno.EIO)
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if " " not in reason:  # a name only
            reason = os.strerror(code)
        if not isinstance(error, OSError):
            reason = f"{reason} ({type(error).__name__})"
        raise OSError(code, reason, url) from error


class _Reader(RawIOBase):
    """Reads an open file of fsspec, whose position others may share."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url, self._position = file, url, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with as_oserror(self._url):
            self._file.seek(self._position)
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class Writer(RawIOBase):
    """Writes into an open file of fsspec, and leaves it open; hashes the bytes."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url, self.sha256 = file, url, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        with as_oserror(self._url):
            written: int = self._file.write(content)
        self.sha256.update(content)
        return written
