"""Files of a run: each tells whether it still holds what was written, and no link is followed to another."""

import errno
import hashlib
import os
import stat
from pathlib import Path

_MOST_LABEL = 64  # bytes: a checksum of 32 digits, a space, a size, a line feed


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


def seal(content: bytes, key: bytes) -> bytes:
    """Content behind a line that tells its checksum, which depends on the key, and its size."""
    return _label(content, key) + content


def unseal(path: Path, key: bytes) -> bytes | None:
    """What a file holds that was written with :func:`seal`; None if it is not there or anything in it is changed.

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
