"""Runs a job: in this process, or by workers on Ray."""

from collections.abc import Callable
from functools import partial
from typing import Any

from captum_norm import bars
from captum_norm.errors import InvalidInputError
from captum_norm.runs.blocks import Block
from captum_norm.runs.job import Backend, Job, Monitor, RayBackend, finish_block
from captum_norm.runs.journal import Journal, Record
from captum_norm.runs.ray_workers import run_on_ray


def run_job(
    job: Job,
    backend: Backend = "local",
    *,
    restart: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Any:
    r"""Finish all blocks of a job exactly once, even if processes are killed, and return its result.

    The folder ``OUTPUT.parts`` keeps finished blocks, with checksums. A run that was killed at any moment continues
    from there when it is started again, on any machine that reaches the folder and with any backend. The result is the
    same for any number of workers, any order in which they finish and any number of deaths, as long as they compute
    alike (same device, same number of threads).

    Args:
        job: the job.
        backend: where it runs.
        restart: whether to discard the work of an unfinished run.
        report: called with messages about the run.

    Raises:
        InvalidInputError: another run is active, or the unfinished one has another identity or other text; the folder
            was not created by a run, or cannot be read or written; Ray is not installed or not reached; or a block
            kills its workers.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from captum_norm.runs import Job, Record, cut
        >>> class Letters(Job):
        ...     def blocks(self):
        ...         return cut([self.output], 2)
        ...     def worker(self):
        ...         return lambda block: Record({"letters": sum(map(len, block.read()))}, b"")
        ...     def finish(self, journal, blocks):
        ...         return sum(record.notes["letters"] for record in journal.records(blocks))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder, "text")
        ...     _ = text.write_text("one\ntwo\nthree\n")
        ...     run_job(Letters(str(text), {}))
        14
    """
    backend = RayBackend() if backend == "ray" else backend
    if backend == "local":
        # What cannot be loaded is refused before anything is written.
        run = partial(_run_here, job, job.worker())
    elif isinstance(backend, RayBackend):
        run = partial(run_on_ray, job, backend)
    else:
        raise InvalidInputError(f'got the backend {backend!r}; expected "local", "ray" or a RayBackend')
    journal = Journal(job.output, job.identity, report)
    with journal.locked(restart=restart):
        with bars.bar(job.title, None, "lines") as bar, bars.hidden():
            result = run(journal, Monitor(job, report, bar))
        journal.remove()
    return result


def _run_here(job: Job, work: Callable[[Block], Record], journal: Journal, monitor: Monitor) -> Any:
    for block in job.blocks():
        monitor.handed(block)
        monitor.done(block, finish_block(job, journal, work, block))
    return job.finish(journal, monitor.blocks)
