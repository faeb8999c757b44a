"""Writes files whole or not at all."""

import os
import uuid
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file so that no reader ever meets half of it.

    The content goes to a temporary file in the same folder, which then takes the file's name in one step.

    Args:
        path: the file; its folder must exist. A symbolic link stays a link: what it points to is replaced.
        content: all of the file, in bytes.

    Returns:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to; an older file stays as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(folder + "/note.txt", b"hello").read_bytes()
        b'hello'
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return Path(path)
