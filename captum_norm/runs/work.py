"""The loop over the blocks of a text that all long runs share."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from captum_norm.runs.journal import Journal, Record, TextBlock
from captum_norm.runs.team import Team

AnyBlock = TypeVar("AnyBlock", bound=TextBlock)

Save = Callable[[Callable[[], Record]], None]
"""Called with a function that returns a record of the work so far; calls it and saves the record every few seconds."""


class Step(NamedTuple):
    """A finished block.

    Attributes:
        texts: the number of its texts.
        notes: the notes of its record; none if another process works on it.
        fresh: False if it was finished before; blocks of other processes are assumed to be like this one's last.
    """

    texts: int
    notes: Mapping[str, Any]
    fresh: bool


@contextmanager
def work_through(
    journal: Journal,
    blocks: Iterable[AnyBlock],
    work: Callable[[AnyBlock, Record | None, Save], Record],
    *,
    rank: int,
    world_size: int,
    restart: bool,
    redo: Callable[[Mapping[str, Any]], bool] = lambda _: False,
) -> Iterator[Iterator[Step]]:
    """Finish all blocks of a text exactly once, even if processes are killed.

    The caller takes all steps inside this context. In the first process the journal then has the records of all blocks,
    including those of other processes; it is removed when the context ends without an error.

    Args:
        journal: stores finished blocks; all processes of a run have the same.
        blocks: the text.
        work: computes the record of a block, from its saved record if there is one, and saves intermediate ones.
        rank: the number of this process, which works on blocks b with b mod ``world_size`` = rank.
        world_size: the number of processes.
        restart: whether to discard an unfinished run.
        redo: whether to compute a finished block again, by its notes.

    Yields:
        A step after each block.

    Raises:
        InvalidInputError: see :meth:`Journal.opened`, :meth:`Journal.check_job` and :meth:`Journal.finished`.
    """
    team = Team(journal.folder, rank, world_size, journal.report)

    def steps() -> Iterator[Step]:
        with journal.plainly():
            team.begin()
        journal.check_job()
        fresh = True
        for block in blocks:
            journal.blocks += 1
            notes: Mapping[str, Any] | None = None
            if block.index % world_size == rank:
                notes = journal.finished(block)
                fresh = notes is None or redo(notes)
                if notes is None or fresh:
                    record = work(block, journal.unfinished(block), partial(journal.save, block))
                    journal.finish(block, record)
                    notes = record.notes
            yield Step(len(block), notes or {}, fresh)
        with journal.plainly():
            team.end()

    if rank > 0:
        journal.check()
        yield steps()
    else:
        with journal.opened(restart=restart):
            yield steps()
            journal.remove()
