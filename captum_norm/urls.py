"""Reads and writes files by URL, such as ``s3://bucket/text``, through fsspec."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike, fspath
from re import match
from secrets import token_hex
from typing import Any, BinaryIO

from captum_norm.errors import InvalidInputError

_PUT_IS_ATOMIC = {"abfs", "abfss", "az", "gcs", "gs", "memory", "s3", "s3a"}
"""Object stores: an object appears when it is complete."""


def is_url(name: object) -> bool:
    """Whether a name is a URL rather than a path.

    Example:
        >>> is_url("s3://bucket/text.fr"), is_url("corpus/text.fr")
        (True, False)
    """
    return isinstance(name, str | PathLike) and match("[a-z][a-z0-9+.-]*://", str(fspath(name))) is not None


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Convert the errors of a file system, which may be of any type, into OSErrors."""
    try:
        yield
    except (InvalidInputError, OSError):
        raise
    except ImportError as error:
        raise InvalidInputError(f"cannot reach {url}: {error}") from error
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class Remote:
    """A file or folder by its URL.

    Raises:
        InvalidInputError: the protocol is unknown, or its package is not installed.
        OSError: by all methods, if the file system cannot be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        with reaching(url):
            try:
                # What other processes write must be seen at once.
                self._system, self._path = url_to_fs(self.url, use_listings_cache=False)
            except ValueError as error:
                raise InvalidInputError(f"cannot reach {url}: {error}") from error

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Remote":
        return Remote(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def is_file(self) -> bool:
        """Whether it is a file."""
        with reaching(self.url):
            return bool(self._system.isfile(self._path))

    def is_folder(self) -> bool:
        """Whether it is a folder; in an object store, whether it holds anything."""
        with reaching(self.url):
            return bool(self._system.isdir(self._path))

    def size(self) -> int:
        """Its size in bytes."""
        with reaching(self.url):
            return int(self._system.size(self._path))

    def names(self) -> Iterator[str]:
        """The names of the files in this folder."""
        with reaching(self.url), suppress(FileNotFoundError):
            for found in self._system.ls(self._path, detail=False, refresh=True):
                if name := found.rstrip("/").rpartition("/")[2]:
                    yield name

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Its bytes from ``start`` to ``end``; all by default."""
        with reaching(self.url):
            return bytes(self._system.cat_file(self._path, start=start, end=end))

    def open(self) -> BinaryIO:
        """Open it for reading."""
        with reaching(self.url):
            opened: BinaryIO = self._system.open(self._path, "rb")
            return opened

    def make(self) -> None:
        """Make this folder and those above it, where there are folders."""
        with reaching(self.url):
            self._system.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove the file, if it exists."""
        with reaching(self.url), suppress(FileNotFoundError):
            self._system.rm_file(self._path)

    def remove_folder(self) -> None:
        """Remove the folder, if it exists and is empty."""
        with suppress(OSError), reaching(self.url):
            self._system.rmdir(self._path)

    def write(self, content: bytes) -> None:
        """Write the whole file, as :meth:`whole` does."""
        if self._puts:
            with reaching(self.url):
                self._system.pipe_file(self._path, content)
        else:
            with self.whole() as file:
                file.write(content)

    @contextmanager
    def whole(self) -> Iterator[BinaryIO]:
        """Open it for writing; readers never see an incomplete file.

        An object appears when it is complete. In other file systems, a temporary file in the same folder is renamed.
        """
        with reaching(self.url), ExitStack() as failed:
            if self._puts:
                file: Any = self._system.open(self._path, "wb", autocommit=False)
                failed.callback(file.discard)
                yield file
                file.close()
                file.commit()
            else:
                folder, _, name = self._path.rpartition("/")
                temporary = f"{folder}/.{name}.{token_hex(4)}.tmp"
                failed.callback(self._system.rm_file, temporary)
                with self._system.open(temporary, "wb") as file:
                    yield file
                self._system.mv(temporary, self._path)
            failed.pop_all()

    @property
    def _puts(self) -> bool:
        """Whether a file appears only when it is complete."""
        protocol = self._system.protocol
        return not _PUT_IS_ATOMIC.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
