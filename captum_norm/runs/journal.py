"""Keeps the finished work of a run in a folder beside its output, from which a run that was killed goes on.

The folder holds ``job.json``, which says what the run does, and one file for each block: ``block-N`` for one that is
finished, ``half-N`` for one that is not, each some notes in a line of JSON, then content. Every file appears by
renaming, complete or not at all, and bears a checksum that it shares with no other block and no other job: what the
disk, or a hand, has changed since is not taken for work.

A folder without a valid ``job.json`` is nobody's business but its owner's: it is refused, neither emptied nor removed.
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
"""What a run does, by name: all that its result depends on, as values that JSON gives back as they were."""

SAVE_SECONDS = 5.0
"""After so long a block's work so far is saved, as soon as the batch that is being worked on is done."""

_FORMAT = 2
_CHUNK_FILES = 10_000
_MOST_JOB = 1 << 20

_TEAM = r"lock|team|process-\d+|\.(team|process-\d+|job\.json)\.[0-9a-f]+\.tmp"
_BEFORE_JOB = re.compile(_TEAM)
_OURS = re.compile(
    rf"{_TEAM}|job\.(json|void)|(block|half)-\d{{9,}}|merged(\..*)?|\.(block|half|merged).*\.[0-9a-f]+\.tmp"
)


class TextBlock(Protocol):
    """Consecutive texts of an input; ``str`` of it says which, for messages, and ``len`` how many."""

    @property
    def index(self) -> int:
        """Which block of the input, from 0."""

    def content(self) -> Iterable[str]:
        """All of its text: blocks that have the same are the same."""

    def __len__(self) -> int: ...


class Record(NamedTuple):
    """What has been done of a block: some notes, plain values for JSON, and any bytes."""

    notes: Mapping[str, Any]
    content: bytes


class Journal:
    """The folder of one run.

    Args:
        folder: the folder; its parent must exist.
        output: what the run makes, for messages.
        job: what must be the same for all blocks of the output.
        report: told of blocks that are finished or damaged.

    Attributes:
        blocks: how many blocks of the text have been worked through.
    """

    def __init__(self, folder: Path, output: str, job: Job, report: Callable[[str], None] = lambda _: None) -> None:
        self.folder = folder
        self.job = dict(job)
        self.report = report
        self.blocks = 0
        self._output = output
        self._job_file = folder / "job.json"
        # Renaming the one to the other makes all blocks void at once, and takes no room on a full disk.
        self._void_file = folder / "job.void"
        self._lock_file = folder / "lock"
        self._saved = time.monotonic()

    @contextmanager
    def opened(self, *, restart: bool) -> Iterator[None]:
        """Within this context the folder is ready, and no other run may open it; one process of a run does so.

        Args:
            restart: whether finished blocks are discarded.

        Raises:
            InvalidInputError: another run is at work, the blocks there are of another job, the folder is none that a
                run has made, or the system does not let it be read or written.
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
        """Turns what the system raises when files cannot be read or written into an InvalidInputError."""
        try:
            yield
        except OSError as error:
            reason = f"cannot read or write {error.filename or self.folder}: {error.strerror or error}"
            raise InvalidInputError(f"{reason}; put that right and start again: what is finished is kept") from error

    def check(self) -> None:
        """Raises InvalidInputError if there is something in the folder's place that no run has made."""
        with self.plainly():
            try:
                kind = os.lstat(self.folder).st_mode
            except FileNotFoundError:
                return
            if not stat.S_ISDIR(kind):
                raise self._foreign("it is no folder")
            strange = None
            for entry in self._entries():
                if _OURS.fullmatch(entry.name) and not entry.is_file(follow_symlinks=False) and os.path.lexists(entry):
                    raise self._foreign(f"its {entry.name} is no regular file")
                if not _BEFORE_JOB.fullmatch(entry.name):
                    strange = entry.name
            # A run that begins meanwhile has one of them at every moment, and may go from the second to the first.
            jobs = (self._read_job(path) for path in (self._job_file, self._void_file, self._job_file))
            if strange is not None and all(job is None for job in jobs):
                raise self._foreign(f"it has {strange}, but no {self._job_file.name}")

    def has_job(self) -> bool:
        """Whether the folder holds the work of a run; what one left that was killed removing it is removed now."""
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
        """Raises InvalidInputError if the blocks in the folder are of another job."""
        with self.plainly():
            found = self._read_job(self._job_file) or {}
        for name in {**found, **self.job}:
            was, now = (json.dumps(job.get(name), ensure_ascii=False) for job in (found, self.job))
            if was != now:
                message = f"{self.folder} holds an unfinished run with {name} {was}, this one has {now}"
                raise InvalidInputError(f"{message}; set it back, or start afresh with --restart (restart=True)")

    def finished(self, block: TextBlock) -> Mapping[str, Any] | None:
        """What was noted about a block if it is finished, else None.

        Raises:
            InvalidInputError: it was made from other text.
        """
        record = self._record(self._block_file(block.index))
        if record is None:
            return None
        if record.notes["digest"] != _digest(block):
            message = f"{block} are not those that the unfinished run in {self.folder} has read"
            raise InvalidInputError(f"{message}; set them back, or start afresh with --restart (restart=True)")
        return record.notes

    def unfinished(self, block: TextBlock) -> Record | None:
        """What was saved of a block that is not finished; None if nothing was, or of other text."""
        record = self._record(self._half_file(block.index))
        return record if record is not None and record.notes["digest"] == _digest(block) else None

    def save(self, block: TextBlock, done: Callable[[], Record]) -> None:
        """Saves what has been done of a block, if nothing has been saved for :data:`SAVE_SECONDS`."""
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._write(self._half_file(block.index), block, done())

    def finish(self, block: TextBlock, record: Record) -> None:
        """Keeps a block that is finished."""
        self._write(self._block_file(block.index), block, record)
        with self.plainly():
            self._half_file(block.index).unlink(missing_ok=True)

    def records(self) -> Iterator[Record]:
        """All blocks, in their order, when they are finished.

        Raises:
            InvalidInputError: one was damaged after it was found to be finished.
        """
        for path in map(self._block_file, range(self.blocks)):
            record = self._record(path)
            if record is None:
                message = f"{path} is no longer what it was when the run began"
                raise InvalidInputError(f"{message}; start the run again, and it makes that block anew")
            yield record

    def remove(self) -> None:
        """Removes what the run has made, and the folder if nothing else is in it; to be called while it is open."""
        with self.plainly():
            self._clear()
            self._void_file.unlink(missing_ok=True)
            self._lock_file.unlink(missing_ok=True)
            try:
                self.folder.rmdir()
            except OSError as error:  # what is in it now is another run's, or none's
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = FileLock(self._lock_file).acquire(timeout=0)
        except Timeout as error:
            raise InvalidInputError(f"another run is writing {self._output}; wait for it or end it") from error
        with lock:
            yield

    def _clear(self) -> None:
        """Makes all blocks void, then removes them; wherever this is interrupted, the next run goes on with it."""
        with suppress(FileNotFoundError):
            self._job_file.replace(self._void_file)
        self._unlink(lambda name: self.folder / name not in (self._void_file, self._lock_file))

    def _unlink(self, chosen: Callable[[str], bool]) -> None:
        """Removes those of our files that are chosen by name."""
        # A folder that changes while it is read may not show all of its files: then those that were left are next.
        while names := list(islice((name for name in self._names() if chosen(name)), _CHUNK_FILES)):
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

    def _names(self) -> Iterator[str]:
        """The names in the folder that are those of our files."""
        return (entry.name for entry in self._entries() if _OURS.fullmatch(entry.name))

    def _entries(self) -> Iterator["os.DirEntry[str]"]:
        """What is in the folder, one at a time: there may be hundreds of thousands."""
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
        """What is in the file of a block; None if it is not there or damaged, which is reported."""
        with self.plainly():
            found = sealed.unseal(path, self._key(path))
            if found is not None:
                header, _, content = found.partition(b"\n")
                return Record(json.loads(header), content)
            if path.exists():
                self.report(f"{path} is damaged; what it had is made anew")
        return None

    def _read_job(self, path: Path) -> Job | None:
        """The job that a file says; None if there is none.

        Raises:
            InvalidInputError: it is not such a file.
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
        message = f"{self.folder} is in the way of {self._output}, and no unfinished run: {reason}"
        return InvalidInputError(f"{message}; move it away")


def _digest(block: TextBlock) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in block.content():
        digest.update(text.encode())
    return digest.hexdigest()


def _job_text(job: Job) -> bytes:
    """What is in the file of a job: the only text that says it, so that any change is seen."""
    checksum = hashlib.blake2b(json.dumps(job).encode(), digest_size=16).hexdigest()
    return json.dumps({"captum-norm": _FORMAT, "checksum": checksum, "job": job}, indent=1).encode()
