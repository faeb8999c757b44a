"""Reads and writes files by URL, such as ``s3://bucket/text``, through fsspec."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from io import BufferedReader, RawIOBase
from os import PathLike, fspath
from re import match
from secrets import token_hex
from typing import Any, BinaryIO, Literal, Self, cast

from captum_norm.errors import InvalidInputError

_OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "memory", "s3", "s3a"}
"""Where there are no folders to make, and an object appears when it is complete."""

_S3 = {"s3", "s3a"}
_S3_OPTIONS = {"max_concurrency": 1}
"""Read an object in one request; otherwise another asks for its size first."""

_READ_BYTES = 1 << 20
_REQUEST_BYTES = 1 << 23
_MOST_DELETED = 1000
_PARTS = 1500
"""An upload to S3 has at most 10,000 parts. From this number on, they grow with it: 5 TiB then take 8,000."""

_CODES: dict[type[Exception], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
"""The numbers of errors that come without one."""


def is_url(name: object) -> bool:
    """Whether a name is a URL rather than a path.

    Example:
        >>> is_url("s3://bucket/text.fr"), is_url("corpus/text.fr")
        (True, False)
    """
    return isinstance(name, str | PathLike) and match("[a-z][a-z0-9+.-]*://", str(fspath(name))) is not None


@contextmanager
def reaching(url: str) -> Iterator[None]:
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


class Remote:
    """A file or folder by its URL.

    Raises:
        InvalidInputError: the URL names nothing, its protocol is unknown, or the protocol's package is not installed.
        OSError: by all methods, if the file system cannot be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        protocol, _, path = self.url.partition("://")
        if not path.strip("/"):
            raise InvalidInputError(f"got the URL {url}; expected the name of a file or folder in it")
        self._objects, self._s3 = protocol in _OBJECT_STORES, protocol in _S3
        with reaching(url):
            try:
                # What other processes write must be seen at once.
                options = {"use_listings_cache": False, **(_S3_OPTIONS if self._s3 else {})}
                self._system, self._path = url_to_fs(self.url, **options)
            except ValueError as error:
                raise InvalidInputError(f"cannot reach {url}: {error}") from error

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and (self._system, self._path) == (other._system, other._path)

    def __hash__(self) -> int:
        return hash(self._path)

    def __truediv__(self, name: str) -> Self:
        below = copy(self)
        below.url, below._path = f"{self.url}/{name}", f"{self._path}/{name}"
        return below

    def info(self) -> tuple[Literal["file", "directory", "other"], int | None]:
        """What it is, and its size in bytes, if known; a folder of an object store is one if it holds anything.

        Raises:
            FileNotFoundError: it does not exist.
        """
        with reaching(self.url):
            found = self._system.info(self._path)
            return found["type"], found.get("size")

    def kind(self) -> Literal["file", "directory", "other"] | None:
        """What it is; None if it does not exist."""
        with suppress(FileNotFoundError):
            return self.info()[0]
        return None

    def entries(self) -> Iterator[tuple[str, bool]]:
        """The names in this folder, and whether they are files."""
        with suppress(FileNotFoundError):
            for path, is_file in self._pages() if self._s3 else self._listed():
                if name := path.rstrip("/").removeprefix(self._path).strip("/"):
                    yield name, is_file

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Its bytes from ``start`` to ``end``; all by default."""
        with reaching(self.url):
            return bytes(self._system.cat_file(self._path, start=start, end=end))

    def open(self) -> BinaryIO:
        """Open it for reading."""
        with reaching(self.url):
            opened = self._system.open(self._path, "rb", block_size=_REQUEST_BYTES)
        return BufferedReader(_Reader(opened, self.url), _READ_BYTES)

    def make(self) -> None:
        """Make this folder and those above it, where there are folders."""
        if not self._objects:  # s3fs would make a bucket
            with reaching(self.url):
                self._system.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove the file, if it exists."""
        with suppress(FileNotFoundError), reaching(self.url):
            self._system.rm_file(self._path)

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files from this folder, those that exist."""
        if not self._s3 or len(names) == 1:
            for name in names:
                (self / name).remove()
            return
        bucket, key, _ = self._system.split_path(self._path)
        keys = [{"Key": f"{key}/{name}".lstrip("/")} for name in names]
        for start in range(0, len(keys), _MOST_DELETED):
            request = {"Objects": keys[start : start + _MOST_DELETED], "Quiet": True}
            with reaching(self.url):
                answer = self._system.call_s3("delete_objects", Bucket=bucket, Delete=request)
                for failed in answer.get("Errors", ()):
                    raise PermissionError(errno.EACCES, f"{failed['Key']} cannot be removed: {failed['Message']}")

    def remove_folder(self) -> None:
        """Remove the folder, if it exists and is empty."""
        if not self._objects:
            with suppress(OSError), reaching(self.url):
                self._system.rmdir(self._path)

    def write(self, content: bytes) -> None:
        """Write the whole file; readers never see an incomplete one."""
        if self._objects:
            with reaching(self.url):
                self._system.pipe_file(self._path, content)
        else:
            with self.whole() as file:
                file.write(content)

    @contextmanager
    def whole(self, temporary: "Remote | None" = None) -> Iterator[BinaryIO]:
        """Open it for writing; readers never see an incomplete file.

        In S3, an object appears when it is complete. In other file systems, a temporary file is renamed.

        Args:
            temporary: the temporary file, in the same file system; one in the same folder if None.
        """
        with ExitStack() as failed:
            if self._s3:
                with reaching(self.url):
                    file = self._system.open(self._path, "wb", autocommit=False)
                failed.callback(_discard, file)
                yield cast(BinaryIO, _Writer(file, self.url))
                with reaching(self.url):
                    file.close()
                    file.commit()
            else:
                folder, _, name = self._path.rpartition("/")
                path = f"{folder}/.{name}.{token_hex(4)}.tmp" if temporary is None else temporary._path
                failed.callback(self._discard, path)
                with reaching(self.url):
                    file = self._system.open(path, "wb")
                try:
                    yield cast(BinaryIO, _Writer(file, self.url))
                finally:
                    with reaching(self.url):
                        file.close()
                with reaching(self.url):
                    self._rename(path)
            failed.pop_all()

    def _rename(self, path: str) -> None:
        """Give a file this name."""
        if self._objects:  # mv would take a name with an asterisk for several
            self._system.cp_file(path, self._path)
            self._system.rm_file(path)
        else:
            self._system.mv(path, self._path)

    def _discard(self, path: str) -> None:
        with suppress(Exception):
            self._system.rm_file(path)

    def _listed(self) -> Iterator[tuple[str, bool]]:
        with reaching(self.url):
            found = self._system.ls(self._path, detail=True)
        return ((entry["name"], entry["type"] == "file") for entry in found)

    def _pages(self) -> Iterator[tuple[str, bool]]:
        """List the objects page by page, since there may be millions: s3fs itself keeps a kilobyte of each."""
        bucket, key, _ = self._system.split_path(self._path)
        request = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", "Delimiter": "/"}
        while True:
            with reaching(self.url):
                page = self._system.call_s3("list_objects_v2", **request)
            yield from ((f"{bucket}/{found['Prefix']}", False) for found in page.get("CommonPrefixes", ()))
            yield from ((f"{bucket}/{found['Key']}", True) for found in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]


class _Opened(RawIOBase):
    """An open file of fsspec, and how far it was read or written."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url, self._position = file, url, 0


class _Reader(_Opened):
    """Reads an open file, whose position others may share."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with reaching(self._url):
            self._file.seek(self._position)
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _Writer(_Opened):
    """Writes into an open file, and leaves it open."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        with reaching(self._url):
            written: int = self._file.write(content)
        self._position += written
        if hasattr(self._file, "blocksize"):
            self._file.blocksize = max(self._file.blocksize, self._position // _PARTS)
        return written


def _discard(file: Any) -> None:
    """Give up the upload of a file that was opened with ``autocommit=False``."""
    with suppress(Exception):
        file.discard()
    file.closed = True  # otherwise the garbage collector uploads the rest
