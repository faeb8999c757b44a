"""Content with a checksum in front, which detects changes."""

import hashlib
import os
from typing import BinaryIO

_MOST_LABEL = 64  # bytes: a checksum of 32 digits, a space, a size, a line feed


def seal(content: bytes, key: bytes) -> bytes:
    """Put a line with the size of the content and its checksum, which depends on the key, before it."""
    return _label(content, key) + content


def unseal(file: BinaryIO, key: bytes) -> bytes | None:
    """Read what was written with :func:`seal`; None if it was changed."""
    label = file.readline(_MOST_LABEL)
    size = file.seek(0, os.SEEK_END) - len(label)
    # The size detects a truncated or overgrown file before it is read.
    if label.endswith(f" {size}\n".encode()):
        file.seek(len(label))
        content = file.read(size)
        return content if label == _label(content, key) else None
    return None


def _label(content: bytes, key: bytes) -> bytes:
    return f"{hashlib.blake2b(content, digest_size=16, key=key).hexdigest()} {len(content)}\n".encode()
