"""Files that are whole or not there, and that tell whether they still hold what was written."""

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from captum_norm.errors import InvalidInputError

_MOST_LABEL = 64  # bytes: a checksum of 32 digits, a space, a size, a line feed


def check_folder(folder: Path) -> None:
    """Refuse what is no folder, and cannot become one.

    Raises:
        InvalidInputError: it is a file, or there is no folder to make it in.
        OSError: the system does not say.
    """
    if folder.exists():
        if not folder.is_dir():
            raise InvalidInputError(f"cannot use {folder} as a folder: it is a file")
    elif not folder.parent.is_dir():
        raise InvalidInputError(f"cannot make the folder {folder}: there is no folder {folder.parent}")


def write(path: Path, content: bytes) -> None:
    """Writes a file at once or not at all, and to the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as raw:
            raw.write(content)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Makes new names in a folder outlast a failure of power, where the system can."""
    with suppress(OSError):  # some systems open no folders, or do not write them on demand
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def read(path: Path, most: int) -> bytes | None:
    """The first ``most`` bytes of a regular file, no link followed; None if it is not there.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    try:
        with os.fdopen(_open(path), "rb") as raw:
            return raw.read(most)
    except FileNotFoundError:
        return None


def sealed(content: bytes, key: bytes) -> bytes:
    """Content behind a line that tells its checksum, which depends on the key, and its size."""
    return _label(content, key) + content


def unsealed(path: Path, key: bytes) -> bytes | None:
    """What a file holds that was written with :func:`sealed`; None if it is not there or anything in it is changed.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    try:
        with os.fdopen(_open(path), "rb") as raw:
            label = raw.readline(_MOST_LABEL)
            size = os.fstat(raw.fileno()).st_size - len(label)
            # Its size tells a file that is torn, or has grown without bounds, before it is read.
            if not label.endswith(f" {size}\n".encode()):
                return None
            content = raw.read(size)
    except FileNotFoundError:
        return None
    return content if label == _label(content, key) else None


def _label(content: bytes, key: bytes) -> bytes:
    return f"{hashlib.blake2b(content, digest_size=16, key=key).hexdigest()} {len(content)}\n".encode()


def _open(path: Path) -> int:
    """Opens what is a regular file: a link is not followed, and a pipe does not keep us waiting."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return opened
