"""Files of a run: each tells whether it still holds what was written, and no link is followed to another."""

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_MOST_LABEL = 64  # bytes: a checksum of 32 digits, a space, a size, a line feed


def read(path: Path, most: int) -> bytes | None:
    """The first ``most`` bytes of a regular file, no link followed; None if it is not there.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with suppress(FileNotFoundError), _opened(path) as file:
        return file.read(most)
    return None


def seal(content: bytes, key: bytes) -> bytes:
    """Content behind a line that tells its checksum, which depends on the key, and its size."""
    return _label(content, key) + content


def unseal(path: Path, key: bytes) -> bytes | None:
    """What a file holds that was written with :func:`seal`; None if it is not there or anything in it is changed.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with suppress(FileNotFoundError), _opened(path) as file:
        label = file.readline(_MOST_LABEL)
        size = os.fstat(file.fileno()).st_size - len(label)
        # Its size tells a file that is torn, or has grown without bounds, before it is read.
        if label.endswith(f" {size}\n".encode()):
            content = file.read(size)
            return content if label == _label(content, key) else None
    return None


def _label(content: bytes, key: bytes) -> bytes:
    return f"{hashlib.blake2b(content, digest_size=16, key=key).hexdigest()} {len(content)}\n".encode()


def _opened(path: Path) -> BinaryIO:
    """Opens what is a regular file: a link is not followed, and a pipe does not keep us waiting."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(opened, "rb")
