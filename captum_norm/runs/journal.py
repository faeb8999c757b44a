"""Stores the finished blocks of a run in a folder beside its output, so that a killed run can be resumed.

The folder has ``job.json``, which describes the run, and a file ``block-N`` for each finished block. Each is written
atomically: a checksum, which depends on block and job, notes, then the content. Before the output is published,
``published.json`` says what it will be; it is the last file to be removed. A folder without a valid ``job.json`` is
refused, neither emptied nor removed: it may belong to the user.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from secrets import token_hex
from typing import Any, BinaryIO, NamedTuple, cast

from filelock import FileLock, Timeout

from captum_norm.errors import InvalidInputError
from captum_norm.runs.blocks import Block
from captum_norm.text.files import Local, Place, Writer, place_of

Identity = Mapping[str, str | int | float | bool | None]
"""Everything that the result of a run depends on, by name, as values that survive JSON."""

_FORMAT = 3
_READ_AHEAD = 16
_JOB, _LOCK, _PUBLISHED = "job.json", "lock", "published.json"

_WITHOUT_JOB = re.compile(r"lock|published\.json|\.job\.json\.[0-9a-f]+\.tmp")
# Earlier versions saved unfinished blocks, too: half-N.
_OURS = re.compile(
    r"lock|(job|status|published)\.json|(block|half)-\d{9,}|merged.*"
    r"|\.(job|status|published|block|half|merged).*\.[0-9a-f]+\.tmp"
)


class Record(NamedTuple):
    """The work on a block: notes, in plain values for JSON, and any bytes; messages for the user are not stored."""

    notes: Mapping[str, Any]
    content: bytes
    messages: Sequence[str] = ()


class Journal:
    """The folder of one run.

    Args:
        output: the path or URL of what the run makes; its folder is ``OUTPUT.parts``, whose parent must exist.
        job: everything that must be the same for all blocks.
        report: called with messages about finished or damaged blocks.
    """

    def __init__(self, output: str, job: Identity, report: Callable[[str], None] = lambda _: None) -> None:
        self.job = dict(job)
        self.report = report
        self._output = output
        self._folder: Place = place_of(f"{output}.parts")

    @property
    def folder(self) -> str:
        """The path or URL of the folder."""
        return str(self._folder)

    @contextmanager
    def locked(self, *, restart: bool) -> Iterator[None]:
        """Prepare the folder and, unless it is at a URL, lock it against other runs inside the context.

        Args:
            restart: whether to discard finished blocks.

        Raises:
            InvalidInputError: another run is active, the blocks belong to another job, no run created the folder, or it
                cannot be read or written.
        """
        with self._lock():
            with self.as_input_error():
                names = self.check()
                blocks = sum(name.startswith("block-") for name in names)
                if blocks and not restart:
                    self._check_job()
                    self._remove(lambda name: name.endswith(".tmp"))
                    self.report(f"{self.folder}: {blocks:,} blocks are finished already")
                else:
                    self._remove(lambda name: name not in (_JOB, _LOCK))
                    (self._folder / _JOB).write(_job_text(self.job))
            yield

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Make the folder and, unless it is at a URL, lock it."""
        with ExitStack() as stack:
            with self.as_input_error():
                self.check()
                self._folder.make()
                if isinstance(self._folder, Local):
                    if os.name == "nt":
                        stack.callback(self._folder.remove_folder)
                    try:
                        lock = FileLock(self._folder.path / _LOCK, timeout=0)
                        stack.callback(lock.release, force=True)  # before it is acquired, for interrupts
                        lock.acquire()
                    except Timeout as error:
                        message = f"another run is writing {self._output}; wait for it or stop it"
                        raise InvalidInputError(message) from error
            yield

    @contextmanager
    def as_input_error(self) -> Iterator[None]:
        """Convert an OSError into an InvalidInputError."""
        try:
            yield
        except OSError as error:
            reason = f"cannot read or write {error.filename or self.folder}: {error.strerror or error}"
            raise InvalidInputError(f"{reason}; fix it and start again: finished blocks are kept") from error

    def check(self) -> list[str]:
        """Return the names of the run's files; raise InvalidInputError if the folder exists and no run created it."""
        names, strange = [], None
        with self.as_input_error():
            kind = self._folder.kind()
            if isinstance(self._folder, Local) and self._folder.path.is_symlink():
                kind = "other"
            if kind not in ("directory", None):
                raise self._foreign("it is not a folder")
            for name, is_regular in self._folder.entries():
                if _OURS.fullmatch(name):
                    names.append(name)
                    if not is_regular:
                        raise self._foreign(f"its {name} is not a regular file")
                if not _WITHOUT_JOB.fullmatch(name):
                    strange = name
            if strange is not None and self._read_job() is None:
                raise self._foreign(f"it has {strange}, but no {_JOB}")
        return names

    def has_job(self) -> bool:
        """Whether the folder has the work of a run."""
        with suppress(InvalidInputError), self.as_input_error():
            self.check()
            return self._read_job() is not None or self.published() is not None
        return False

    def published(self) -> Mapping[str, Any] | None:
        """The job and what was noted when the output was published, if that is there; the run was then killed."""
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            notes: dict[str, Any] = json.loads(self._read(_PUBLISHED) or b"")
            if notes["sha256"] == _sha256(place_of(self._output)):
                return notes
        return None

    def tidy(self) -> None:
        """Remove what a run left that was killed when it had published the output."""
        with self._lock():
            self.remove()

    def expect_job(self) -> None:
        """Raise InvalidInputError if the folder cannot be reached from here, or no run created it."""
        with self.as_input_error():
            if self._read_job() is None:
                message = f"{self.folder} is not there, where the run keeps its work"
                raise InvalidInputError(f"{message}; give a folder that all nodes reach, or a URL such as s3://…")

    def _check_job(self) -> None:
        """Raise InvalidInputError if the blocks in the folder belong to another job."""
        before = self._read_job() or {}
        for name in {**before, **self.job}:
            was, now = (json.dumps(job.get(name), ensure_ascii=False) for job in (before, self.job))
            if was != now:
                message = f"{self.folder} holds an unfinished run with {name} {was}, this one has {now}"
                raise InvalidInputError(f"{message}; set it back, or start afresh with --restart (restart=True)")

    def finished(self, block: Block) -> Mapping[str, Any] | None:
        """Return the notes of a block if it is finished, else None.

        Raises:
            InvalidInputError: the block had other text.
        """
        record = self._record(_block_file(block.index))
        if record is None:
            return None
        if record.notes["digest"] != block.digest:
            message = f"{block} are not those that the unfinished run in {self.folder} has read"
            raise InvalidInputError(f"{message}; set them back, or start afresh with --restart (restart=True)")
        return record.notes

    def finish(self, block: Block, record: Record) -> None:
        """Save a finished block."""
        name = _block_file(block.index)
        content = json.dumps({"digest": block.digest, **record.notes}).encode() + b"\n" + record.content
        with self.as_input_error():
            (self._folder / name).write(self._label(content, name) + content)

    def records(self, blocks: int) -> Iterator[Record]:
        """Read the records of so many blocks in order; several at a time, since in object stores each takes its time.

        Raises:
            InvalidInputError: one was damaged since it was saved.
        """

        def read(index: int) -> Record:
            record = self._record(_block_file(index))
            if record is None:
                message = f"{self.folder}/{_block_file(index)} was changed during the run"
                raise InvalidInputError(f"{message}; start the run again to repeat that block")
            return record

        with ThreadPoolExecutor(_READ_AHEAD) as pool:
            for first in range(0, blocks, _READ_AHEAD):
                yield from pool.map(read, range(first, min(first + _READ_AHEAD, blocks)))

    @contextmanager
    def publishing(self, notes: Mapping[str, Any], *, overwrite: bool) -> Iterator[BinaryIO]:
        """Open the output for writing; it appears when the context ends.

        Args:
            notes: what :meth:`published` returns if the run is killed before its end; read when the context ends.
            overwrite: whether it may exist.

        Raises:
            InvalidInputError: it has come to exist, with other content, and may not; or it cannot be written.
        """
        place = place_of(self._output)
        # In the folder of the run, which a later run clears; another name for each process, since one that was believed
        # dead may still be writing.
        temporary: Any = self._folder / f"merged-{token_hex(4)}"
        with self.as_input_error(), place.replacing(temporary) as stream:
            yield stream
            stream.flush()
            sha256 = stream.sha256.hexdigest() if isinstance(stream, Writer) else _sha256(temporary)
            # A worker that died when it had published the output leaves the same content.
            if not overwrite and place.kind() is not None and _sha256(place) != sha256:
                message = f"{self._output} has come to exist; move it away and start again: no work is lost"
                raise InvalidInputError(message)
            (self._folder / _PUBLISHED).write(json.dumps({**notes, "job": self.job, "sha256": sha256}).encode())

    def remove(self) -> None:
        """Remove the files of the run, and the folder if it is then empty; call this while it is open."""
        with self.as_input_error():
            self._remove(lambda name: name not in (_JOB, _LOCK, _PUBLISHED))
            self._folder.remove(_JOB)  # after these: blocks without a job would be taken for the user's
            if os.name != "nt":  # there, no open file can be removed, and the lock removes its own
                self._folder.remove(_LOCK)
            self._folder.remove(_PUBLISHED)
            self._folder.remove_folder()

    def _remove(self, chosen: Callable[[str], bool]) -> None:
        """Remove our files that are chosen by name."""
        # Listing a folder that changes may skip files, so list it until none are left.
        before = list[str]()
        while names := [name for name, _ in self._folder.entries() if _OURS.fullmatch(name) and chosen(name)]:
            if names == before:
                raise PermissionError(errno.EACCES, "its files cannot be removed", self.folder)
            self._folder.remove(*names)
            before = names

    def _read(self, name: str) -> bytes | None:
        """Read a file; None if there is none."""
        with suppress(FileNotFoundError):
            return (self._folder / name).read()
        return None

    def _label(self, content: bytes, name: str) -> bytes:
        """The first line of a file: a checksum of its other content, which depends on job and name, and the size."""
        key = hashlib.blake2b(_job_text(self.job) + name.encode()).digest()
        return f"{hashlib.blake2b(content, digest_size=16, key=key).hexdigest()} {len(content)}\n".encode()

    def _record(self, name: str) -> Record | None:
        """Read a record; None if there is none, or it is damaged, which is reported."""
        with self.as_input_error():
            file = self._read(name)
        if file is None:
            return None
        label, _, content = file.partition(b"\n")
        if label + b"\n" != self._label(content, name):
            self.report(f"{self.folder}/{name} is damaged; its work is repeated")
            return None
        notes, _, content = content.partition(b"\n")
        return Record(json.loads(notes), content)

    def _read_job(self) -> Identity | None:
        """Read the job; None if there is none, InvalidInputError if it is damaged or has another format."""
        content = self._read(_JOB)
        if content is None:
            return None
        try:
            job: Identity = json.loads(content)["job"]
            if content == _job_text(job):
                return job
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise self._foreign(f"its {_JOB} is damaged, or of another program or version")

    def _foreign(self, reason: str) -> InvalidInputError:
        message = f"{self.folder} is in the way of {self._output}, and not an unfinished run: {reason}"
        return InvalidInputError(f"{message}; move it away")


def _sha256(place: Place) -> str:
    with place.open() as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def _block_file(index: int) -> str:
    return f"block-{index:09d}"


def _job_text(job: Identity) -> bytes:
    """The only valid content of a job's file, so that any change is detected."""
    checksum = hashlib.blake2b(json.dumps(job).encode(), digest_size=16).hexdigest()
    return json.dumps({"captum-norm": _FORMAT, "checksum": checksum, "job": job}, indent=1).encode()
