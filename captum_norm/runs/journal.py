"""Stores the finished blocks of a run in a folder beside its output, so that a killed run can be resumed.

The folder has ``job.json``, which describes the run, and a file for each block: ``block-N`` if it is finished,
``half-N`` if not. Each has a line of JSON with notes, then the content. Files are written atomically. Their checksum
depends on block and job, so a file that was changed or belongs elsewhere is not used.

A folder without a valid ``job.json`` is refused, neither emptied nor removed: it may belong to the user.
"""

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock, Timeout

from captum_norm.errors import InvalidInputError
from captum_norm.files import write_whole
from captum_norm.runs import sealed

Job = Mapping[str, str | int | float | bool | None]
"""Everything that the result of a run depends on, by name, as values that survive JSON."""

SAVE_SECONDS = 5.0
"""The interval at which an unfinished block is saved, after the current batch."""

_FORMAT = 2
_CHUNK_FILES = 10_000
_MOST_JOB = 1 << 20

_TEAM = r"lock|team|process-\d+|\.(team|process-\d+|job\.json)\.[0-9a-f]+\.tmp"
_BEFORE_JOB = re.compile(_TEAM)
_OURS = re.compile(
    rf"{_TEAM}|job\.(json|void)|(block|half)-\d{{9,}}|merged(\..*)?|\.(block|half|merged).*\.[0-9a-f]+\.tmp"
)


class TextBlock(Protocol):
    """Consecutive texts of an input; ``str`` describes them in messages, ``len`` counts them."""

    @property
    def index(self) -> int:
        """Its index in the input."""

    def content(self) -> Iterable[str]:
        """Yield all text, which identifies the block."""

    def __len__(self) -> int: ...


class Record(NamedTuple):
    """The work on a block: notes, in plain values for JSON, and any bytes."""

    notes: Mapping[str, Any]
    content: bytes


class Journal:
    """The folder of one run.

    Args:
        folder: the folder; its parent must exist.
        output: the name of the output, for messages.
        job: everything that must be the same for all blocks.
        report: called with messages about finished or damaged blocks.

    Attributes:
        blocks: the number of blocks done.
    """

    def __init__(self, folder: Path, output: str, job: Job, report: Callable[[str], None] = lambda _: None) -> None:
        self.folder = folder
        self.job = dict(job)
        self.report = report
        self.blocks = 0
        self._output = output
        self._job_file = folder / "job.json"
        # Renaming job.json to job.void invalidates all blocks at once, even on a full disk.
        self._void_file = folder / "job.void"
        self._lock_file = folder / "lock"
        self._saved = time.monotonic()

    @contextmanager
    def opened(self, *, restart: bool) -> Iterator[None]:
        """Prepare the folder and lock it against other runs inside the context; one process of a run does so.

        Args:
            restart: whether to discard finished blocks.

        Raises:
            InvalidInputError: another run is active, the blocks belong to another job, no run created the folder, or it
                cannot be read or written.
        """
        with ExitStack() as stack:
            with self.plainly():
                self.check()
                self.folder.mkdir(exist_ok=True)
                stack.enter_context(self._locked())
                self.check()
                kinds = Counter(name.partition("-")[0] for name in self._names())
                begun = self._read_job(self._job_file) is not None and (kinds["block"] or kinds["half"])
                if begun and not restart:
                    self.check_job()
                    self._unlink(lambda name: name.endswith(".tmp"))
                    if kinds["block"]:
                        self.report(f"{self.folder}: {kinds['block']:,} blocks are finished already")
                else:
                    self._clear()
                    write_whole(self._job_file, _job_text(self.job))
                    self._void_file.unlink(missing_ok=True)
            yield

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Convert an OSError into an InvalidInputError."""
        try:
            yield
        except OSError as error:
            reason = f"cannot read or write {error.filename or self.folder}: {error.strerror or error}"
            raise InvalidInputError(f"{reason}; fix it and start again: finished blocks are kept") from error

    def check(self) -> None:
        """Raise InvalidInputError if the folder exists and no run created it."""
        with self.plainly():
            try:
                kind = os.lstat(self.folder).st_mode
            except FileNotFoundError:
                return
            if not stat.S_ISDIR(kind):
                raise self._foreign("it is not a folder")
            strange = None
            for entry in self._entries():
                if _OURS.fullmatch(entry.name) and not entry.is_file(follow_symlinks=False) and os.path.lexists(entry):
                    raise self._foreign(f"its {entry.name} is not a regular file")
                if not _BEFORE_JOB.fullmatch(entry.name):
                    strange = entry.name
            # A run that starts meanwhile has one of them at any moment, and may rename the second to the first.
            jobs = (self._read_job(path) for path in (self._job_file, self._void_file, self._job_file))
            if strange is not None and all(job is None for job in jobs):
                raise self._foreign(f"it has {strange}, but no {self._job_file.name}")

    def has_job(self) -> bool:
        """Whether the folder has the work of a run; finishes a removal that was interrupted."""
        try:
            self.check()
            with self.plainly():
                if self._void_file.exists() and not self._job_file.exists():
                    with self._locked():
                        self.remove()
                return self._read_job(self._job_file) is not None
        except InvalidInputError:
            return False

    def check_job(self) -> None:
        """Raise InvalidInputError if the blocks in the folder belong to another job."""
        with self.plainly():
            found = self._read_job(self._job_file) or {}
        for name in {**found, **self.job}:
            was, now = (json.dumps(job.get(name), ensure_ascii=False) for job in (found, self.job))
            if was != now:
                message = f"{self.folder} holds an unfinished run with {name} {was}, this one has {now}"
                raise InvalidInputError(f"{message}; set it back, or start afresh with --restart (restart=True)")

    def finished(self, block: TextBlock) -> Mapping[str, Any] | None:
        """Return the notes of a block if it is finished, else None.

        Raises:
            InvalidInputError: the block had other text.
        """
        record = self._record(self._block_file(block.index))
        if record is None:
            return None
        if record.notes["digest"] != _digest(block):
            message = f"{block} are not those that the unfinished run in {self.folder} has read"
            raise InvalidInputError(f"{message}; set them back, or start afresh with --restart (restart=True)")
        return record.notes

    def unfinished(self, block: TextBlock) -> Record | None:
        """Return the saved record of an unfinished block; None if there is none, or it had other text."""
        record = self._record(self._half_file(block.index))
        return record if record is not None and record.notes["digest"] == _digest(block) else None

    def save(self, block: TextBlock, done: Callable[[], Record]) -> None:
        """Save an unfinished block, unless one was saved less than :data:`SAVE_SECONDS` ago."""
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._write(self._half_file(block.index), block, done())

    def finish(self, block: TextBlock, record: Record) -> None:
        """Save a finished block."""
        self._write(self._block_file(block.index), block, record)
        with self.plainly():
            self._half_file(block.index).unlink(missing_ok=True)

    def records(self) -> Iterator[Record]:
        """Read the records of all finished blocks in their order.

        Raises:
            InvalidInputError: a block was damaged since it was finished.
        """
        for path in map(self._block_file, range(self.blocks)):
            record = self._record(path)
            if record is None:
                message = f"{path} was changed during the run"
                raise InvalidInputError(f"{message}; start the run again to repeat that block")
            yield record

    def remove(self) -> None:
        """Remove the files of the run, and the folder if it is then empty; call this while it is open."""
        with self.plainly():
            self._clear()
            self._void_file.unlink(missing_ok=True)
            self._lock_file.unlink(missing_ok=True)
            try:
                self.folder.rmdir()
            except OSError as error:  # it has files of another run or the user
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = FileLock(self._lock_file).acquire(timeout=0)
        except Timeout as error:
            raise InvalidInputError(f"another run is writing {self._output}; wait for it or stop it") from error
        with lock:
            yield

    def _clear(self) -> None:
        """Invalidate all blocks, then remove them; the next run completes an interrupted removal."""
        with suppress(FileNotFoundError):
            self._job_file.replace(self._void_file)
        self._unlink(lambda name: self.folder / name not in (self._void_file, self._lock_file))

    def _unlink(self, chosen: Callable[[str], bool]) -> None:
        """Remove our files that are chosen by name."""
        # Listing a folder that changes may skip files, so list it until none are left.
        while names := list(islice((name for name in self._names() if chosen(name)), _CHUNK_FILES)):
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

    def _names(self) -> Iterator[str]:
        """The names of our files in the folder."""
        return (entry.name for entry in self._entries() if _OURS.fullmatch(entry.name))

    def _entries(self) -> Iterator["os.DirEntry[str]"]:
        """The entries of the folder, one at a time, since there may be hundreds of thousands."""
        with os.scandir(self.folder) as entries:
            yield from entries

    def _block_file(self, index: int) -> Path:
        return self.folder / f"block-{index:09d}"

    def _half_file(self, index: int) -> Path:
        return self.folder / f"half-{index:09d}"

    def _key(self, path: Path) -> bytes:
        return hashlib.blake2b(_job_text(self.job) + path.name.encode()).digest()

    def _write(self, path: Path, block: TextBlock, record: Record) -> None:
        header = json.dumps({"digest": _digest(block), **record.notes}).encode()
        with self.plainly():
            write_whole(path, sealed.seal(header + b"\n" + record.content, self._key(path)))
        self._saved = time.monotonic()

    def _record(self, path: Path) -> Record | None:
        """Read the record of a block; None if there is none, or it is damaged, which is reported."""
        with self.plainly():
            found = sealed.unseal(path, self._key(path))
            if found is not None:
                header, _, content = found.partition(b"\n")
                return Record(json.loads(header), content)
            if path.exists():
                self.report(f"{path} is damaged; its work is repeated")
        return None

    def _read_job(self, path: Path) -> Job | None:
        """Read a job; None if there is none.

        Raises:
            InvalidInputError: the file is damaged or has another format.
        """
        content = sealed.read(path, _MOST_JOB)
        if content is None:
            return None
        try:
            job: Job = json.loads(content)["job"]
            if content == _job_text(job):
                return job
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise self._foreign(f"its {path.name} is damaged, or of another program or version")

    def _foreign(self, reason: str) -> InvalidInputError:
        message = f"{self.folder} is in the way of {self._output}, and not an unfinished run: {reason}"
        return InvalidInputError(f"{message}; move it away")


def _digest(block: TextBlock) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in block.content():
        digest.update(text.encode())
    return digest.hexdigest()


def _job_text(job: Job) -> bytes:
    """The only valid content of a job's file, so that any change is detected."""
    checksum = hashlib.blake2b(json.dumps(job).encode(), digest_size=16).hexdigest()
    return json.dumps({"captum-norm": _FORMAT, "checksum": checksum, "job": job}, indent=1).encode()
