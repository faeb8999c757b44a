"""Does the work of a job within a Ray Data pipeline."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

from captum_norm.errors import InvalidInputError
from captum_norm.runs.blocks import cut
from captum_norm.runs.job import Attempt, Job
from captum_norm.runs.worker import load_job
from captum_norm.text.lines import quoted
from captum_norm.versions import versions

Rows = Mapping[str, Sequence[Any]]
"""A batch of rows, by column."""


class SharedJob(NamedTuple):
    """A job in Ray's object store.

    Attributes:
        content: the reference of the pickled job.
        arrays: that of its models' weights, which all workers on a node share.
        versions: the versions of packages that it was pickled with.
    """

    content: Any
    arrays: Any
    versions: Mapping[str, str]


def share(job: Job[Any]) -> SharedJob:
    """Put a job into Ray's object store, once for all workers; Ray must be initialised."""
    import ray

    from captum_norm.runs.shared import dumps

    content, arrays = dumps(job)
    return SharedJob(ray.put(content), ray.put(arrays), versions())


class BlockWorker:
    """An actor for ``map_batches`` of Ray Data: it loads a job once and takes each batch as a block of its text.

    It maps a batch to one row: ``notes``, those of the block's record as JSON, ``content``, its bytes, and
    ``messages``, those for the user, one a line. Lines are counted from the start of the batch. There is neither a
    journal nor order: Ray Data repeats what is lost, and :meth:`Job.combine` and :meth:`Job.finish` are not called.

    Args:
        job: the job, from :func:`share`. Its own text is not read.
        columns: the columns with the lines of the text, one for each file that the job reads.

    Raises:
        InvalidInputError: the job cannot be loaded, or was pickled with other versions.
    """

    def __init__(self, job: SharedJob, columns: Sequence[str] = ("text",)) -> None:
        import ray

        self._work = load_job(ray.get(job.content), ray.get(job.arrays), job.versions).worker()
        self._columns = columns

    def __call__(self, batch: Rows) -> dict[str, list[Any]]:
        """Work on a batch."""
        files = [_file(name, batch) for name in self._columns]
        rows: dict[str, list[Any]] = {"notes": [], "content": [], "messages": []}
        for block in cut(files, max(1, len(batch[self._columns[0]]))):  # one, unless the batch is empty
            attempt = Attempt(block, None, lambda *_: None)
            record = self._work(attempt)
            rows["notes"].append(json.dumps(dict(record.notes)))
            rows["content"].append(record.content)
            rows["messages"].append("\n".join(attempt.messages))
        return rows


class _Column(BytesIO):
    """The lines of a column, with its name for messages."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


def _file(name: str, batch: Rows) -> _Column:
    if name not in batch:
        raise InvalidInputError(f"got rows with the columns {', '.join(batch)}; expected {name}")
    texts = batch[name]
    for text in texts:
        if not isinstance(text, str) or "\n" in text:
            raise InvalidInputError(f"got {quoted(text)} as {name}; expected a string of one line in each row")
    return _Column("".join(f"{text}\n" for text in texts).encode(errors="surrogatepass"), name)
