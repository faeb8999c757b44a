"""The finished blocks of a run, in a folder beside its output: what a run that was killed goes on from.

The folder holds ``job.json``, which says what the run does, and one file for each finished block: a line of JSON about
the block, then its content. Every file appears by renaming, complete or not at all, so there is nothing to repair after
a kill.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from captum_norm.errors import InvalidInputError

Setting = str | int | float | bool | None
"""What a setting can be: a value that JSON gives back as it was."""

_FORMAT = 1
_CHUNK_FILES = 10_000


class Journal:
    """The folder of one run.

    Args:
        folder: the folder; its parent must exist.
        output: what the run makes, for messages.
        job: what must be the same for all blocks of the output.
    """

    def __init__(self, folder: Path, output: str, job: Mapping[str, Setting]) -> None:
        self.folder = folder
        self.job = {"format": _FORMAT, **job}
        self._output = output
        self._job_file = folder / "job.json"
        self._lock_file = folder / "lock"

    @contextmanager
    def opened(self, *, restart: bool) -> Iterator[None]:
        """Within this context the folder is ready, and no other run may open it; one process of a run does so.

        Args:
            restart: whether finished blocks are discarded.

        Raises:
            InvalidInputError: another run is at work, or the blocks there are of another job.
        """
        self.folder.mkdir(exist_ok=True)
        with self._locked():
            for torn in [path for path in self._paths() if path.suffix == ".tmp"]:
                torn.unlink()
            if restart or not self._job_file.exists() or not self.finished_blocks():
                self.clear()
                write(self._job_file, json.dumps(self.job).encode())
            self.check_job()
            yield

    def tidy(self) -> None:
        """Removes what a run left that was killed while it removed the folder."""
        if self.folder.exists() and not self._job_file.exists():
            with self._locked():
                self.clear()
            self.remove()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = FileLock(self._lock_file).acquire(timeout=0)
        except Timeout as error:
            raise InvalidInputError(f"another run is writing {self._output}; wait for it or end it") from error
        with lock:
            yield

    def check_job(self) -> None:
        """Raises InvalidInputError if the blocks in the folder are of another job."""
        found = json.loads(self._job_file.read_text(encoding="utf-8"))
        for name in found | self.job:
            was, now = (json.dumps(job.get(name), ensure_ascii=False) for job in (found, self.job))
            if was != now:
                message = f"{self.folder} holds an unfinished run with {name} {was}, this one has {now}"
                raise InvalidInputError(f"{message}; set it back, or start afresh with --restart (restart=True)")

    def finished_blocks(self) -> int:
        """How many blocks there are in the folder."""
        return sum(path.name.startswith("block-") for path in self._paths())

    def finished(self, index: int, digest: str, lines: str) -> dict[str, Any] | None:
        """What was noted about a block if it is finished, else None.

        Args:
            index: which block, from 0.
            digest: a hash of the block's text.
            lines: which text that is, for messages.

        Raises:
            InvalidInputError: the block was made from other text.
        """
        header = self._header(self.path(index))
        if header is not None and header["digest"] != digest:
            message = f"{lines} are not those that the unfinished run in {self.folder} has read"
            raise InvalidInputError(f"{message}; set them back, or start afresh with --restart (restart=True)")
        return header

    def write(self, index: int, digest: str, notes: Mapping[str, Any], content: bytes) -> None:
        """Finishes a block; ``notes`` are what :meth:`finished` gives back."""
        header = json.dumps({"digest": digest, "bytes": len(content), **notes})
        write(self.path(index), header.encode() + b"\n" + content)

    def path(self, index: int) -> Path:
        """The file of a block: a line of notes, then the content."""
        return self.folder / f"block-{index:09d}"

    def clear(self) -> None:
        """Removes all that is in the folder but its lock."""
        # The job goes first: blocks without one are of no job, wherever this is interrupted.
        self._job_file.unlink(missing_ok=True)
        while paths := list(islice((path for path in self._paths() if path != self._lock_file), _CHUNK_FILES)):
            for path in paths:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder, when it is no longer open."""
        shutil.rmtree(self.folder)

    def _paths(self) -> Iterator[Path]:
        """What is in the folder, one at a time: there may be hundreds of thousands."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                yield Path(entry)

    @staticmethod
    def _header(path: Path) -> dict[str, Any] | None:
        """What a block's first line says; None if it is not there or, after a failure of the disk, not whole."""
        if not path.exists():
            return None
        with path.open("rb") as block:
            first = block.readline()
            try:
                header: dict[str, Any] = json.loads(first)
            except ValueError:
                return None
        return header if path.stat().st_size == len(first) + header["bytes"] else None


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
