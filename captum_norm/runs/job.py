"""Describes a job: blocks of text, work on each, a result of all; where it runs, and how far it is."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never

from captum_norm import bars
from captum_norm.checks import check_count, check_index, check_number, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.runs.blocks import Block
from captum_norm.runs.journal import Identity, Journal, Record

if TYPE_CHECKING:
    from tqdm import tqdm

MOST_CORES = 1024
"""The most cores of a worker, and the most threads: torch ends a process that asks for many more."""


@dataclass(frozen=True)
class RayBackend:
    """Workers on Ray.

    Attributes:
        workers: the number of workers; None for as many as the cluster has room for, which may change.
        address: the address of a cluster, such as ``"auto"`` or ``"ray://head:10001"``; None for that in
            ``RAY_ADDRESS``, or else for this machine alone.
        cpus_per_worker: the number of cores for each worker, and of its threads.
        gpus_per_worker: the number, or share, of GPUs for each worker.
        retries: how often a block is begun again whose worker died.

    Raises:
        InvalidInputError: a number is out of range, or the address is no string.
    """

    workers: int | None = None
    address: str | None = None
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    retries: int = 2

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count("workers", self.workers)
        address: Any = self.address
        if not isinstance(address, str | None):
            expected = 'expected that of a cluster, such as "auto", or None'
            raise InvalidInputError(f"got address={quoted(address)}; {expected}")
        cores, gpus = (check_number(name, getattr(self, name)) for name in ("cpus_per_worker", "gpus_per_worker"))
        if not 0 < cores <= MOST_CORES or gpus < 0:
            numbers = f"cpus_per_worker={self.cpus_per_worker} and gpus_per_worker={self.gpus_per_worker}"
            expected = f"more than 0 cores, at most {MOST_CORES}, and 0 GPUs or more"
            raise InvalidInputError(f"got {numbers}; expected {expected}")
        if check_index("retries", self.retries) < 0:
            raise InvalidInputError(f"got {self.retries} retries; expected 0 or more")


Backend = Literal["local", "ray"] | RayBackend
"""Where a job runs: in this process, or by workers on Ray; ``"ray"`` is ``RayBackend()``."""


class Job(ABC):
    """Work on text of any size, for :func:`captum_norm.runs.run_job`.

    A job may be pickled and run by many processes; each calls :meth:`worker` once.

    Args:
        output: the path or URL of what the job makes; unfinished work is kept in the folder ``OUTPUT.parts``.
        identity: everything that the result depends on, apart from the text; a run is resumed only with the same.

    Attributes:
        title: a name for progress bars and for Ray's dashboard.
    """

    title = "running"

    def __init__(self, output: str, identity: Identity) -> None:
        self.output = output
        self.identity = identity

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the text; see :func:`captum_norm.runs.cut`."""

    @abstractmethod
    def worker(self) -> Callable[[Block], Record]:
        """Load what the work needs and return a function that does it, which depends on block and job alone."""

    @abstractmethod
    def finish(self, journal: Journal, blocks: int) -> Any:
        """Make the result of ``journal.records(blocks)``, the records of all blocks; called in one process."""

    def redo(self, notes: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether to compute a finished block again, by its notes."""
        return False

    def counts(self, notes: Mapping[str, Any]) -> Mapping[str, int]:  # noqa: ARG002
        """Numbers of a block to add up beside the progress bar, by name."""
        return {}


class Step(NamedTuple):
    """A finished block, as the worker reports it; not ``fresh`` if it was finished before."""

    notes: Mapping[str, Any]
    fresh: bool
    messages: Sequence[str] = ()


def finished_step(job: Job, journal: Journal, block: Block) -> Step | None:
    """Return a block's step if it is finished, and not to be computed again."""
    notes = journal.finished(block)
    if notes is None or job.redo(notes):
        return None
    return Step(notes, fresh=False)


def finish_block(job: Job, journal: Journal, work: Callable[[Block], Record], block: Block) -> Step:
    """Finish a block, unless it is finished."""
    if (step := finished_step(job, journal, block)) is not None:
        return step
    record = work(block)
    journal.finish(block, record)
    return Step(record.notes, fresh=True, messages=record.messages)


class Monitor:
    """Counts what is done of a job, and shows it in the bar; ``report`` is called with messages for the user."""

    def __init__(self, job: Job, report: Callable[[str], None], bar: "tqdm[Never]") -> None:
        self.job, self.report, self._bar = job, report, bar
        self.workers = 1
        self.blocks = self.retries = 0
        self._handed = 0
        self._counts = Counter[str]()

    def handed(self, block: Block) -> None:
        """A block was found and handed to a worker."""
        self._handed += block.lines
        if block.share:
            self._bar.total = round(self._handed / block.share)

    def done(self, block: Block, step: Step) -> None:
        """A block is finished."""
        self.blocks += 1
        self._counts.update(self.job.counts(step.notes))
        for message in step.messages:
            self.report(message)
        bars.advance(self._bar, block.lines, fresh=step.fresh)
        self.tick()

    def retry(self, what: str, reason: str) -> None:
        """A worker died, and what it did is begun again."""
        self.retries += 1
        self.report(f"a worker died; {what} is begun again: {reason}")

    def tick(self) -> None:
        """Refresh what is shown."""
        shown: dict[str, int] = dict(self._counts)
        if self.workers != 1:
            shown |= {"workers": self.workers, "retries": self.retries}
        self._bar.set_postfix(shown, refresh=False)
