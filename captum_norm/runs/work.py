"""Works through a text block by block: the one loop of all long runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from captum_norm.runs.journal import Journal, Record, TextBlock
from captum_norm.runs.team import Team

AnyBlock = TypeVar("AnyBlock", bound=TextBlock)

Save = Callable[[Callable[[], Record]], None]
"""Takes what makes a record of the work on a block so far; makes and saves one every few seconds."""


class Step(NamedTuple):
    """A block that is done with.

    Attributes:
        texts: how many there are in it.
        notes: those of its record; none if another process makes it.
        fresh: False if it was finished before; the blocks of others are taken to be as this process's last one.
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
    """Finish all blocks of a text, each once, whatever process is killed at whatever moment.

    Within this context the steps are taken, to the end. In the first process the journal then has the records of all
    blocks, whoever made them; it is removed when the context ends without an error.

    Args:
        journal: keeps what is finished; other processes of the run have the same.
        blocks: the text.
        work: makes a block's record from what was saved of it before, and saves what it has done.
        rank: this process; block b is made by process b mod ``world_size``.
        world_size: the number of processes.
        restart: whether to discard what an unfinished run left.
        redo: whether a finished block is made again, by its notes.

    Yields:
        A step for each block, after the work on it.

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
