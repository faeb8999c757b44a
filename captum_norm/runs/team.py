"""Lets several processes that share a folder meet before the work and after it, by small files alone.

Process 0 leads. Each of the others says hello with a random token of its own and begins when it finds that token among
those that process 0 has seen: so the files of an earlier run are never taken for those of this one, and nobody begins
before process 0 has prepared the folder. If one ends early, end all and start them again, as ``torchrun`` does.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from captum_norm.errors import InvalidInputError
from captum_norm.files import write_whole

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0


def torchrun_rank() -> tuple[int, int]:
    """This process's number and the number of processes, from ``RANK`` and ``WORLD_SIZE``; (0, 1) if neither is set.

    Raises:
        InvalidInputError: only one of them is set, or they are no such numbers.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    if rank and world_size and rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size):
        return int(rank), int(world_size)
    message = f"got RANK={rank} and WORLD_SIZE={world_size}, expected 0 ≤ RANK < WORLD_SIZE"
    raise InvalidInputError(f"{message}; start several processes with torchrun, or unset both")


def check_rank(rank: int, world_size: int) -> None:
    """Raises InvalidInputError if there is no process of that number."""
    if not 0 <= rank < world_size:
        raise InvalidInputError(f"got rank {rank} of {world_size} processes, expected 0 to {world_size - 1}")


class Team:
    """All processes, as one of them sees them.

    Args:
        folder: the folder they share; process 0 makes it.
        rank: this process, from 0.
        size: how many there are.
        report: told once if this process waits long for others.
    """

    def __init__(self, folder: Path, rank: int, size: int, report: Callable[[str], None]) -> None:
        self.folder, self.rank, self.size, self.report = folder, rank, size, report
        self.others = range(1, size)
        self.token = secrets.token_hex(8)
        self.seen: dict[int, str] = {}

    def begin(self) -> None:
        """Returns when all are there; process 0 calls it when the folder is ready."""
        if self.rank == 0:
            for other in self.others:
                self._hello(other).unlink(missing_ok=True)  # an earlier run's; who is there says it again
            self._wait("start", self._absent)
            write_whole(self.folder / "team", " ".join(self.seen.values()).encode())
        else:
            self._wait("start", self._unanswered)

    def end(self) -> None:
        """Says that this process is done with the folder; in process 0, returns when all others have said so."""
        if self.rank == 0:
            self._wait("finish", self._busy)
        else:
            write_whole(self._hello(self.rank), f"{self.token} done".encode())

    def _absent(self) -> list[int]:
        self.seen = {other: _read(self._hello(other)) for other in self.others}
        return [other for other, token in self.seen.items() if not token]

    def _unanswered(self) -> list[int]:
        if self.token in _read(self.folder / "team").split():
            return []
        if _read(self._hello(self.rank)) != self.token:
            # Where process 0 has not made the folder yet, or is clearing it, this comes too early: it is said again.
            with suppress(FileNotFoundError):
                write_whole(self._hello(self.rank), self.token.encode())
        return [0]

    def _busy(self) -> list[int]:
        return [other for other, token in self.seen.items() if _read(self._hello(other)) != f"{token} done"]

    def _wait(self, what: str, missing: Callable[[], list[int]]) -> None:
        start, told = time.monotonic(), False
        while absent := missing():
            if not told and time.monotonic() - start > _PATIENCE_SECONDS:
                told = True
                self.report(f"{self.folder}: waiting for process {', '.join(map(str, absent))} to {what}")
            time.sleep(_POLL_SECONDS)

    def _hello(self, rank: int) -> Path:
        return self.folder / f"process-{rank}"


def _read(path: Path) -> str:
    """What a file says; nothing if it is not there."""
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
