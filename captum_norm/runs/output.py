"""Publishes the output of a run: it appears when it is complete."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, cast

from captum_norm.errors import InvalidInputError
from captum_norm.runs.journal import Journal
from captum_norm.text.files import sync, whole_file
from captum_norm.text.urls import Remote, is_url


@contextmanager
def published(output: str, journal: Journal, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open the output for writing; it appears when the context ends.

    At a URL, a manifest follows it: ``OUTPUT.manifest.json`` with its size, its SHA-256 and the identity of the run.

    Args:
        output: its path or URL.
        journal: the journal of the run.
        overwrite: whether it may exist.

    Raises:
        InvalidInputError: it has come to exist, with other content, and may not; or it cannot be written.
    """

    def check(other: Any, sha256: str) -> None:
        # A worker that died when it had published the output leaves the same content.
        with other:
            if hashlib.file_digest(other, "sha256").hexdigest() != sha256:
                raise InvalidInputError(f"{output} has come to exist; move it away and start again: no work is lost")

    with journal.plainly():
        if is_url(output):
            remote = Remote(output)
            # Another name for each process: one that was believed dead may still be writing.
            with remote.whole(Remote(journal.folder) / f"merged-{token_hex(4)}") as stream:
                counted = _Counted(stream)
                yield cast(BinaryIO, counted)
                if not overwrite and remote.kind() is not None:
                    check(remote.open(), counted.sha256.hexdigest())
            told = {"output": output, "bytes": counted.bytes, "sha256": counted.sha256.hexdigest(), "job": journal.job}
            Remote(f"{output}.manifest.json").write(json.dumps(told, indent=1).encode())
        else:
            # In the folder of the run, which a later run clears, rather than beside the output.
            file, merged = Path(output), Path(journal.folder, "merged")
            with whole_file(merged) as opened:
                yield opened
            if not overwrite and file.exists():
                with merged.open("rb") as content:
                    check(file.open("rb"), hashlib.file_digest(content, "sha256").hexdigest())
            merged.replace(file)
            sync(file.parent)


class _Counted:
    """Passes bytes on, and counts and hashes them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.bytes, self.sha256 = stream, 0, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.bytes += len(content)
        self.sha256.update(content)
        return self._stream.write(content)

    def flush(self) -> None:
        self._stream.flush()
