"""Jobs of one's own."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.runs import Block, Job, Parts, Record, cut, run_job
from captum_norm.runs.job import FAN_IN


class Sum(Job[float]):
    """Adds up the numbers in a file, one a line, in blocks of two."""

    def __init__(self, path: str) -> None:
        super().__init__(path, {})

    def blocks(self) -> Iterator[Block]:
        return cut([self.output], 2)

    def worker(self) -> Callable[[Block], Record]:
        return lambda block: total(map(float, block.read()[0].split()))

    def combine(self, records: Iterable[Record]) -> Record:
        return total(np.frombuffer(record.content)[0] for record in records)

    def finish(self, parts: Parts) -> float:
        return float(np.frombuffer(parts.combined().content)[0])


def total(numbers: Iterable[float]) -> Record:
    found = 0.0
    for number in numbers:
        found += number
    return Record({}, np.float64(found).tobytes())


@pytest.mark.parametrize("blocks", [1, 2, FAN_IN - 1, FAN_IN, FAN_IN + 1, FAN_IN**2 + 3])
def test_the_tree_depends_on_the_number_of_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    numbers = [1 / (number + 3) for number in range(2 * blocks)]
    path = tmp_path / "text"
    path.write_text("".join(f"{number!r}\n" for number in numbers))
    level = [sum(numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
    while len(level) > 1:
        level = [plain(level[at : at + FAN_IN]) for at in range(0, len(level), FAN_IN)]
    assert run_job(Sum(str(path))) == level[0]
    assert plain(numbers) == pytest.approx(level[0])


def plain(numbers: list[float]) -> float:
    found = 0.0
    for number in numbers:
        found += number
    return found


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
