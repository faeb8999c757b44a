"""Several processes, one output."""

import io
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment import Alignment
from alignment.pipeline import extract, torchrun_rank
from captum_norm import InvalidInputError
from captum_norm.runs import team
from captum_norm.runs.team import Team
from tests.runs import extractions
from tests.runs.extractions import Batch, check_result, expected, write_text


@pytest.mark.parametrize("lines", [0, 1, 30])
def test_processes_make_the_output_of_one(tmp_path: Path, lines: int) -> None:
    pairs = extractions.text(lines)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    for process in extractions.start(source, out, processes=3):
        process.join()
        assert process.exitcode == 0
    check_result(source, out, pairs)


def test_killed_and_started_again_in_other_numbers(tmp_path: Path) -> None:
    rng = random.Random(0)
    pairs = extractions.text(40 * extractions.BLOCK_LINES + 1)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    kills = 0
    while not out.exists() and kills < 100:
        processes = extractions.start(source, out, processes=rng.choice([2, 3]), delay=0.002)
        extractions.kill_at_random(processes, out, rng)
        kills += 1
    check_result(source, out, pairs)
    assert kills > 3


def test_blocks_go_round(tmp_path: Path) -> None:
    pairs = [(f"a{line}", "b") for line in range(5 * extractions.BLOCK_LINES)]
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    seen: dict[int, list[str]] = {0: [], 1: []}

    def run_as(rank: int) -> None:
        def align(batch: Batch) -> list[Alignment | InvalidInputError]:
            seen[rank].extend(words[0] for words, _ in batch)
            return extractions.align(batch)

        counts = extract(source, None, align, out, block_lines=extractions.BLOCK_LINES, rank=rank, world_size=2)
        assert (counts is None) == (rank == 1)

    threads = [threading.Thread(target=run_as, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in (0, 1):
        assert seen[rank] == [f"a{line}" for line in range(len(pairs)) if line // extractions.BLOCK_LINES % 2 == rank]
    assert out.read_text() == expected(pairs)


def test_no_process_mixes_other_settings_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"
    extractions.interrupt(source, out, 1, settings={"layer": 1})
    monkeypatch.setattr(Team, "begin", lambda _: None)
    with pytest.raises(InvalidInputError, match="with layer 1, this one has 2"):
        extract(source, None, extractions.align, out, settings={"layer": 2}, rank=1, world_size=2)


def test_streams_are_for_one_process(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="got a stream and 2 processes"):
        extract(io.BytesIO(), None, extractions.align, tmp_path / "out", rank=1, world_size=2)


def test_nobody_takes_the_files_of_an_earlier_run_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(team, "_PATIENCE_SECONDS", 0.0)
    folder = tmp_path / "parts"
    told: list[str] = []
    leader, other = (Team(folder, rank, 2, told.append) for rank in (0, 1))

    def started(target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join(0.05)
        return thread

    beginning = started(other.begin)  # before there is a folder
    folder.mkdir()
    for name in ("process-1", "team"):
        (folder / name).write_text("0123 done")
    beginning.join(0.05)
    assert beginning.is_alive()
    leader.begin()
    beginning.join()
    ending = started(leader.end)
    assert ending.is_alive()
    other.end()
    ending.join()
    assert {f"{folder}: waiting for process 0 to start", f"{folder}: waiting for process 1 to finish"} <= set(told)
    again = started(leader.begin)
    assert again.is_alive()
    Team(folder, 1, 2, told.append).begin()
    again.join()


@pytest.mark.parametrize(
    ("environment", "position"),
    [({}, (0, 1)), ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)), ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1))],
)
def test_position_is_what_torchrun_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], position: tuple[int, int]
) -> None:
    set_environment(monkeypatch, environment)
    assert torchrun_rank() == position


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "a", "WORLD_SIZE": "1"}],
)
def test_position_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(InvalidInputError, match=r"got RANK=.* and WORLD_SIZE=.*, expected 0 ≤ RANK < WORLD_SIZE"):
        torchrun_rank()


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
