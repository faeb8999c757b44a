"""What a job is: blocks of text, work on each, and a result of all."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from captum_norm.errors import InvalidInputError
from captum_norm.runs.blocks import Block
from captum_norm.runs.journal import Identity, Journal, Record

Result = TypeVar("Result")

FAN_IN = 64
"""The number of records that are combined at a time."""


@dataclass(frozen=True)
class Attempt:
    """The work on a block, which may have been begun before.

    Attributes:
        block: the block.
        saved: what :meth:`save` saved of it before the process was killed; None if nothing.
        messages: messages for the user, in order.
    """

    block: Block
    saved: Record | None
    _save: Callable[[Block, Callable[[], Record]], None]
    messages: list[str] = field(default_factory=list)

    def save(self, done: Callable[[], Record]) -> None:
        """Call ``done`` every few seconds and save the record it returns; call this after every batch."""
        self._save(self.block, done)


Work = Callable[[Attempt], Record]
"""Computes the record of a block; it depends on the block and the job alone."""


class Job(ABC, Generic[Result]):
    """Work on text of any size, for :func:`captum_norm.runs.run_job`.

    A job may be pickled and run by many processes; each calls :meth:`worker` once.

    Args:
        output: the path or URL of what the job makes; unfinished work is kept in the folder ``OUTPUT.parts``.
        identity: everything that the result depends on, apart from the text; a run is resumed only with the same.

    Attributes:
        title: a name for progress bars and for Ray's dashboard.
        unit: what its texts are.
    """

    title = "running"
    unit = "lines"

    def __init__(self, output: str, identity: Identity) -> None:
        self.output = output
        self.identity = identity

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the text; see :func:`captum_norm.runs.cut`."""

    @abstractmethod
    def worker(self) -> Work:
        """Load what the work needs and return a function that does it."""

    @abstractmethod
    def finish(self, parts: "Parts") -> Result:
        """Make the result of the records of all blocks; called in one process, which may be a worker."""

    def combine(self, records: Iterable[Record]) -> Record:
        """Combine the records of consecutive blocks, or of parts combined before, for :meth:`Parts.combined`."""
        raise NotImplementedError

    def redo(self, notes: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether to compute a finished block again, by its notes."""
        return False

    def counts(self, notes: Mapping[str, Any]) -> Mapping[str, int]:  # noqa: ARG002
        """Numbers of a block to add up beside the progress bar, by name."""
        return {}

    def set_aside(self, block: Block) -> Record:
        """Return the record that stands for a block that no worker survives.

        Raises:
            InvalidInputError: the job cannot do without any block.
        """
        raise InvalidInputError(f"{type(self).__name__} needs all blocks: {block} cannot be set aside")


@dataclass(frozen=True)
class Parts:
    """The records of all blocks of a job.

    Attributes:
        job: the job.
        journal: stores them.
        number: the number of blocks.
        level: the highest level of combined records that are stored.
    """

    job: Job[Any]
    journal: Journal
    number: int
    level: int = 0

    def blocks(self) -> Iterator[Record]:
        """Read the records of the blocks in their order."""
        return self.journal.records(0, range(self.number))

    def combined(self) -> Record:
        """Combine the records of all blocks with :meth:`Job.combine`.

        They are combined in a tree, :data:`~captum_norm.runs.job.FAN_IN` at a time, whose shape depends on their number
        alone. The result is therefore the same, bit for bit, whoever does it.
        """
        top = 1
        while FAN_IN**top < self.number:
            top += 1
        return self.node(top, 0)

    def node(self, level: int, index: int) -> Record:
        """Combine the records below a node of the tree."""
        if level <= self.level:
            return next(self.journal.records(level, [index]))
        below = range(index * FAN_IN, min((index + 1) * FAN_IN, nodes(self.number, level - 1)))
        if level - 1 <= self.level:
            return self.job.combine(self.journal.records(level - 1, below))
        return self.job.combine(self.node(level - 1, place) for place in below)


def nodes(blocks: int, level: int) -> int:
    """The number of nodes at a level of the tree; those at level 0 are the blocks."""
    return math.ceil(blocks / math.pow(FAN_IN, level))


@dataclass(frozen=True)
class Step:
    """A finished block, as the worker reports it.

    Attributes:
        notes: the notes of its record.
        fresh: False if it was finished before.
        messages: messages for the user.
    """

    notes: Mapping[str, Any]
    fresh: bool
    messages: list[str]


def finished_step(job: Job[Any], journal: Journal, block: Block) -> Step | None:
    """Return a block's step if it is finished, and not to be computed again.

    Raises:
        InvalidInputError: see :meth:`Journal.finished`.
    """
    notes = journal.finished(block)
    if notes is None or notes.get("set_aside") or job.redo(notes):
        return None
    return Step(notes, fresh=False, messages=[])


def finish_block(job: Job[Any], journal: Journal, work: Work, block: Block) -> Step:
    """Finish a block, unless it is finished.

    Raises:
        InvalidInputError: see :meth:`Journal.finished`.
    """
    if (step := finished_step(job, journal, block)) is not None:
        return step
    attempt = Attempt(block, journal.unfinished(block), journal.save)
    record = work(attempt)
    journal.finish(block, record)
    return Step(record.notes, fresh=True, messages=attempt.messages)
