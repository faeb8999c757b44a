"""Jobs of one's own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.runs import Block, Job, Journal, Record, cut, run_job


class Sum(Job):
    """Adds up the numbers in a file, one a line, in blocks of two."""

    def __init__(self, path: str) -> None:
        super().__init__(path, {})

    def blocks(self) -> Iterator[Block]:
        return cut([self.output], 2)

    def worker(self) -> Callable[[Block], Record]:
        return lambda block: Record({"sum": sum(map(float, block.read()[0].split()))}, b"")

    def finish(self, journal: Journal, blocks: int) -> Any:
        return sum(record.notes["sum"] for record in journal.records(blocks))


def test_what_cannot_be_loaded_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class Failing(Sum):
        def worker(self) -> Callable[[Block], Record]:
            raise InvalidInputError("no model")

    path = tmp_path / "text"
    path.write_text("1\n")
    with pytest.raises(InvalidInputError, match="no model"):
        run_job(Failing(str(path)))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidInputError, match=r'got the backend \'slurm\'; expected "local", "ray" or a RayBackend'):
        run_job(Sum(str(path)), "slurm")  # type: ignore[arg-type]
