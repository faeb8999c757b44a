"""Runs that are killed, and go on as if nothing had happened."""

import os
import random
from pathlib import Path

import pytest
from filelock import FileLock

from alignment import Alignment
from alignment.pipeline import ExtractionCounts, extract
from alignment.pipeline.blocks import ParallelText
from alignment.pipeline.journal import Journal
from captum_norm import InvalidInputError
from tests.alignment.pipeline import runs
from tests.alignment.pipeline.runs import Batch, align, check_result, expected, interrupt, run, write_text


def test_killed_before_any_file_operation_it_goes_on(tmp_path: Path) -> None:
    pairs = runs.text(2 * runs.BLOCK_LINES - 1)
    operation, killed = 0, True
    while killed:
        operation += 1
        folder = tmp_path / str(operation)
        folder.mkdir()
        source, out = write_text(folder / "text", pairs), folder / "out"
        killed = runs.run_until_killed(source, out, operation)
        if not out.exists():
            run(source, out)
        check_result(source, out, pairs)
    assert operation > 30


def test_killed_at_random_until_it_is_through(tmp_path: Path) -> None:
    rng = random.Random(0)
    pairs = runs.text(40 * runs.BLOCK_LINES + 1)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    kills = 0
    while not out.exists() and kills < 100:
        runs.kill_at_random(runs.start(source, out, delay=0.001), out, rng)
        kills += 1
    check_result(source, out, pairs)
    assert kills > 3


def test_finished_blocks_are_neither_aligned_nor_counted_again(tmp_path: Path) -> None:
    pairs = [("a b", "c"), ("", "c"), ("a", "refused"), ("refused", "b")] * 3
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    interrupt(source, out, 2)
    seen: list[int] = []
    told: list[str] = []

    def counting(batch: Batch) -> list[Alignment | InvalidInputError]:
        seen.append(len(batch))
        return align(batch)

    counts = extract(source, None, counting, out, block_lines=4, max_words=8, report=told.append)
    assert seen == [3]
    assert counts == ExtractionCounts(lines=12, links=6, empty=3, refused=3)
    assert told == [
        f"{out}.parts: 2 blocks are finished already",
        f"{source}, line 10: got no word on the source side, expected at least one",
        f"{source}, line 12: got a word that is refused",
    ]


def test_torn_block_is_made_again(tmp_path: Path) -> None:
    pairs = runs.text(12)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    interrupt(source, out, 2)
    part = tmp_path / "out.parts" / "block-000000001"
    content = part.read_bytes()
    _, block, _ = ParallelText(source, None).blocks(runs.BLOCK_LINES)
    journal = Journal(out, {})
    for size in range(len(content)):
        part.write_bytes(content[:size])
        assert journal.counts(block) is None
    part.write_bytes(content)
    assert journal.counts(block) is not None
    part.write_bytes(content[:-4])
    # In a container, the number of a process may well be that of the one that was killed.
    (part.parent / f".block-000000002.{os.getpid()}.tmp").write_text("0-0\n")
    run(source, out)
    check_result(source, out, pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"layer": 2}}, "unfinished run with layer 1, this one has 2; set it back, or start afresh"),
        ({"settings": {"layer": 1, "rule": "é"}}, 'with rule null, this one has "é"'),
        ({"settings": {}}, "with layer 1, this one has null"),
        ({"block_lines": 5}, "with block_lines 4, this one has 5"),
        ({"max_words": 9}, "with max_words 8, this one has 9"),
    ],
)
def test_other_settings_are_refused_until_restart(tmp_path: Path, options: dict[str, object], message: str) -> None:
    pairs = runs.text(9)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    interrupt(source, out, 1, settings={"layer": 1})
    with pytest.raises(InvalidInputError, match=f"out.parts holds an .*{message}"):
        run(source, out, **{"settings": {"layer": 1}, **options})
    interrupt(source, out, 0, restart=True, **{"settings": {"layer": 1}, **options})
    run(source, out, settings={"layer": 1})  # nothing was finished, so nothing is mixed
    assert out.read_text() == expected(pairs)


def test_other_lines_are_refused_where_they_were_read(tmp_path: Path) -> None:
    pairs = runs.text(12)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    interrupt(source, out, 2)
    changed = [*pairs[:7], ("anders", "different"), *pairs[8:]]
    write_text(source, changed)
    with pytest.raises(
        InvalidInputError, match=r"lines 5 to 8 of the input are not .*out.parts has read; set them back"
    ):
        run(source, out)
    run(source, out, restart=True)
    assert out.read_text() == expected(changed)


def test_lines_not_read_yet_may_be_repaired(tmp_path: Path) -> None:
    pairs = [*[("a b", "c")] * 9, ("a", ""), ("a", "b")]
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    with pytest.raises(InvalidInputError, match="text, line 10: got no word on the target side"):
        run(source, out, bad_lines="stop")
    assert not out.exists()
    pairs[9] = ("a", "c d")
    run(write_text(source, pairs), out, bad_lines="stop")
    assert out.read_text() == expected(pairs)


def test_bad_line_that_was_let_pass_stops_a_strict_run(tmp_path: Path) -> None:
    source, out = write_text(tmp_path / "text", [("a", "b"), ("", "b"), *[("a", "b")] * 7]), tmp_path / "out"
    interrupt(source, out, 2)
    with pytest.raises(InvalidInputError, match="text, line 2: got no word on the source side"):
        run(source, out, bad_lines="stop")


def test_old_output_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    pairs = runs.text(9)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    out.write_text("old\n")
    interrupt(source, out, 1, overwrite=True)
    assert out.read_text() == "old\n"
    with pytest.raises(InvalidInputError, match="out exists already; give another name, or replace it"):
        run(source, out)
    run(source, out, overwrite=True)
    assert out.read_text() == expected(pairs)


def test_blocks_without_a_job_are_not_trusted(tmp_path: Path) -> None:
    pairs = runs.text(9)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    interrupt(source, out, 1)
    part = tmp_path / "out.parts" / "block-000000000"
    part.write_text(part.read_text().replace("0-0", "7-7"))
    (part.parent / "job.json").unlink()
    run(source, out)
    assert out.read_text() == expected(pairs)


def test_folder_that_was_being_removed_is_removed(tmp_path: Path) -> None:
    source, out = write_text(tmp_path / "text", runs.text(9)), tmp_path / "out"
    interrupt(source, out, 1)
    (tmp_path / "out.parts" / "job.json").unlink()
    out.touch()
    with pytest.raises(InvalidInputError, match="out exists already"):
        run(source, out)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "out"}


def test_second_run_is_kept_out(tmp_path: Path) -> None:
    source, out = write_text(tmp_path / "text", runs.text(9)), tmp_path / "out"
    interrupt(source, out, 1)
    with (
        FileLock(tmp_path / "out.parts" / "lock"),
        pytest.raises(InvalidInputError, match=r"another run is writing .*out;"),
    ):
        run(source, out)
