"""Writes files atomically, and checks beforehand whether files and folders can be written."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from captum_norm.errors import InvalidInputError
from captum_norm.text.urls import Remote, is_url


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing; readers never see an incomplete file.

    The content goes to a temporary file in the same folder, which replaces the file at the end of the context, or is
    removed if the context raises.

    Args:
        path: the path or URL of the file, whose folder must exist. The target of a symbolic link is replaced, not the
            link.

    Raises:
        OSError: the folder does not exist or cannot be written to; an older file is unchanged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(folder + "/note.txt") as file:
        ...         _ = file.write(b"hello")
        ...     Path(folder, "note.txt").read_bytes()
        b'hello'
    """
    if is_url(path):
        with Remote(os.fspath(path)).whole() as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    # Random, since a process in another container may have the same number.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync(target.parent)


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file atomically, see :func:`whole_file`; returns its path."""
    with whole_file(path) as file:
        file.write(content)
    return Path(path)


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system supports it."""
    with suppress(OSError):  # some systems cannot open or flush folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def check_file(path: Path) -> None:
    """Check that a path is a file or can become one.

    Raises:
        InvalidInputError: it is a folder, or its folder does not exist.
        OSError: the path cannot be examined.
    """
    if path.is_dir():
        raise InvalidInputError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InvalidInputError(f"cannot write {path}: there is no folder {path.parent}")


def check_url(remote: Remote) -> bool:
    """Check that a URL is that of a file or can become one; return whether it exists.

    Raises:
        InvalidInputError: it is a folder.
        OSError: the file system cannot be reached or refuses.
    """
    kind = remote.kind()
    if kind == "directory":
        raise InvalidInputError(f"cannot write {remote}: it is a folder")
    return kind is not None


def check_folder(path: Path) -> None:
    """Check that a path is a folder or can become one.

    Raises:
        InvalidInputError: it is a file, or its parent does not exist.
        OSError: the path cannot be examined.
    """
    if path.exists():
        if not path.is_dir():
            raise InvalidInputError(f"cannot use {path} as a folder: it is a file")
    elif not path.parent.is_dir():
        raise InvalidInputError(f"cannot make the folder {path}: there is no folder {path.parent}")


def check_writable(folder: Path) -> None:
    """Check that files can be created in a folder, without leaving any.

    Raises:
        InvalidInputError: they cannot.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(f"the folder {folder} cannot be written to ({error.strerror})") from error
