"""Files of a run with checksums, which detect changes; links are not followed."""

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_MOST_LABEL = 64  # bytes: a checksum of 32 digits, a space, a size, a line feed


def read(path: Path, most: int) -> bytes | None:
    """Read up to ``most`` bytes of a regular file, not through a link; None if there is none.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with suppress(FileNotFoundError), _opened(path) as file:
        return file.read(most)
    return None


def seal(content: bytes, key: bytes) -> bytes:
    """Put a line with the size of the content and its checksum, which depends on the key, before it."""
    return _label(content, key) + content


def unseal(path: Path, key: bytes) -> bytes | None:
    """Read a file that was written with :func:`seal`; None if there is none, or it was changed.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with suppress(FileNotFoundError), _opened(path) as file:
        label = file.readline(_MOST_LABEL)
        size = os.fstat(file.fileno()).st_size - len(label)
        # The size detects a truncated or overgrown file before it is read.
        if label.endswith(f" {size}\n".encode()):
            content = file.read(size)
            return content if label == _label(content, key) else None
    return None


def _label(content: bytes, key: bytes) -> bytes:
    return f"{hashlib.blake2b(content, digest_size=16, key=key).hexdigest()} {len(content)}\n".encode()


def _opened(path: Path) -> BinaryIO:
    """Open a regular file, without following a link or waiting for a pipe."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(opened, "rb")
