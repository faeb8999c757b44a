"""The finished blocks of a run, in a folder beside its output: what a run that was killed goes on from.

``OUT.parts`` holds ``job.json``, which says what the run does, and one file for each finished block: a line of JSON
about the block, then its lines of the output. Every file appears by renaming, complete or not at all, so there is
nothing to repair after a kill; in the end ``OUT`` appears in the same way.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from alignment.formats.text import write_lines
from alignment.pipeline.blocks import AlignedBlock, Block, ExtractionCounts
from captum_norm import InvalidInputError

Setting = str | int | float | bool | None
"""What a setting can be: a value that JSON gives back as it was."""

_FORMAT = 1
_CHUNK_FILES = 10_000


class Journal:
    """The folder of one run.

    Args:
        out: the output file; ``.gz`` and ``.xz`` are compressed.
        job: what must be the same for all blocks of the output.
    """

    def __init__(self, out: Path, job: Mapping[str, Setting]) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.parts")
        self.job = {"format": _FORMAT, **job}
        self._job_file = self.folder / "job.json"
        self._lock_file = self.folder / "lock"

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
                self._clear()
                write_lines(self._job_file, [json.dumps(self.job)])
            self.check_job()
            yield

    def tidy(self) -> None:
        """Removes what a run left that was killed while it removed the folder."""
        if self.folder.exists() and not self._job_file.exists():
            with self._locked():
                self._clear()
            self.remove()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = FileLock(self._lock_file).acquire(timeout=0)
        except Timeout as error:
            raise InvalidInputError(f"another run is writing {self.out}; wait for it or end it") from error
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

    def finished(self, block: Block) -> ExtractionCounts | None:
        """The counts of a block that is finished, else None.

        Raises:
            InvalidInputError: the block was made from other lines.
        """
        header = _read_header(self._path(block.index))
        if header is None:
            return None
        if header["digest"] != block.digest():
            lines = f"lines {block.first} to {block.first + len(block.pairs) - 1} of the input"
            message = f"{lines} are not those that the unfinished run in {self.folder} has read"
            raise InvalidInputError(f"{message}; set them back, or start afresh with --restart (restart=True)")
        return ExtractionCounts(**header["counts"])

    def write(self, block: Block, aligned: AlignedBlock) -> None:
        """Finishes a block."""
        size = sum(len(line) + 1 for line in aligned.lines)
        header = {"digest": block.digest(), "bytes": size, "counts": asdict(aligned.counts)}
        write_lines(self._path(block.index), [json.dumps(header), *aligned.lines])

    def merge(self, blocks: int) -> ExtractionCounts:
        """Makes the output from its blocks, removes what else is in the folder, and gives the counts of all lines."""
        counts = ExtractionCounts()

        def lines() -> Iterator[str]:
            nonlocal counts
            for index in range(blocks):
                with self._path(index).open(encoding="ascii") as part:
                    counts += ExtractionCounts(**json.loads(part.readline())["counts"])
                    for line in part:
                        yield line.removesuffix("\n")

        merged = self.folder / f"merged{self.out.suffix}"
        write_lines(merged, lines())
        merged.replace(self.out)
        self._clear()
        return counts

    def remove(self) -> None:
        """Removes the folder, when it is no longer open."""
        shutil.rmtree(self.folder)

    def _clear(self) -> None:
        # The job goes first: blocks without one are of no job, wherever this is interrupted.
        self._job_file.unlink(missing_ok=True)
        while paths := list(islice((path for path in self._paths() if path != self._lock_file), _CHUNK_FILES)):
            for path in paths:
                path.unlink(missing_ok=True)

    def _paths(self) -> Iterator[Path]:
        """What is in the folder, one at a time: there may be hundreds of thousands."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                yield Path(entry)

    def _path(self, index: int) -> Path:
        return self.folder / f"block-{index:09d}"


def _read_header(path: Path) -> dict[str, Any] | None:
    """What a block's first line says; None if the block is not there or, after a failure of the disk, not whole."""
    if not path.exists():
        return None
    with path.open("rb") as part:
        first = part.readline()
        try:
            header: dict[str, Any] = json.loads(first)
        except ValueError:
            return None
    return header if path.stat().st_size == len(first) + header["bytes"] else None
