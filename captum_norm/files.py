"""Writes files that are whole or not there, and says beforehand why a file or folder cannot be written."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from tempfile import TemporaryFile

from captum_norm.errors import InvalidInputError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BufferedWriter]:
    """Open a file for writing so that no reader ever meets half of it.

    What is written goes to a temporary file in the same folder. At the end of the block it is on the disk and takes the
    file's name in one step; where the block raises, it is removed.

    Args:
        path: the file; its folder must exist. A symbolic link stays a link: what it points to is replaced.

    Raises:
        OSError: the folder does not exist or cannot be written to; an older file stays as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(folder + "/note.txt") as file:
        ...         _ = file.write(b"hello")
        ...     Path(folder, "note.txt").read_bytes()
        b'hello'
    """
    target = Path(os.path.realpath(path))
    # Not the number of the process, which may be that of one that was killed in another container.
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
    """Write a file at once or not at all, see :func:`whole_file`; its path comes back."""
    with whole_file(path) as file:
        file.write(content)
    return Path(path)


def sync(folder: Path) -> None:
    """Make new names in a folder outlast a power failure, where the system can."""
    with suppress(OSError):  # some systems open no folders, or do not write them on demand
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def check_file(path: Path) -> None:
    """Refuse what is no file, and cannot become one.

    Raises:
        InvalidInputError: it is a folder, or there is no folder to make it in.
        OSError: the system does not say.
    """
    if path.is_dir():
        raise InvalidInputError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InvalidInputError(f"cannot write {path}: there is no folder {path.parent}")


def check_folder(path: Path) -> None:
    """Refuse what is no folder, and cannot become one.

    Raises:
        InvalidInputError: it is a file, or there is no folder to make it in.
        OSError: the system does not say.
    """
    if path.exists():
        if not path.is_dir():
            raise InvalidInputError(f"cannot use {path} as a folder: it is a file")
    elif not path.parent.is_dir():
        raise InvalidInputError(f"cannot make the folder {path}: there is no folder {path.parent}")


def check_writable(folder: Path) -> None:
    """Find out whether files can be made in a folder; nothing stays there.

    Raises:
        InvalidInputError: they cannot.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(f"the folder {folder} cannot be written to ({error.strerror})") from error
