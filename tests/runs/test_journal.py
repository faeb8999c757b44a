"""Runs that are killed, and go on as if nothing had happened."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from alignment import Lexicon
from captum_norm import InvalidInputError
from captum_norm.runs import Journal, cut
from captum_norm.text.files import Local
from tests.runs import extractions
from tests.runs.extractions import check_result, expected, interrupt, run, write_text


@pytest.mark.long
def test_killed_before_any_file_operation_it_goes_on(tmp_path: Path) -> None:
    pairs = extractions.text(2 * extractions.BLOCK_LINES - 1)
    operation, killed = 0, True
    while killed:
        operation += 1
        folder = tmp_path / str(operation)
        folder.mkdir()
        source, out = write_text(folder / "text", pairs), folder / "out"
        killed = extractions.run_until_killed(source, out, operation)
        if not out.exists():
            run(source, out)
        check_result(source, out, pairs)
    assert operation > 30


@pytest.mark.long
def test_the_files_beside_the_links_are_there_before_these(tmp_path: Path) -> None:
    """The lexicon of a text that counts its own words, and a page."""
    pairs = extractions.text(2 * extractions.BLOCK_LINES - 1)
    source = write_text(tmp_path / "text", pairs)
    operation, killed, expected_files = 0, True, list[bytes]()
    while killed:
        folder = tmp_path / str(operation)
        folder.mkdir()
        out, lexicon, page = (folder / name for name in ("out", "lexicon", "page"))
        options: dict[str, Any] = {"align": extractions.CountingAligner(), "save_lexicon": lexicon}
        options["at_end"] = partial(page.write_text, "<!doctype html>")
        killed = operation > 0 and extractions.run_until_killed(source, out, operation, **options)
        assert not out.exists() or (lexicon.exists() and page.exists())
        if not out.exists() or any((folder / "out.parts").glob("*")):
            run(source, out, **options)
        files = [path.read_bytes() for path in (out, page)]
        expected_files = expected_files or files
        assert files == expected_files
        assert Lexicon.load(lexicon).sentence_pairs == sum(bool(line) for line in out.read_text().splitlines())
        killed, operation = killed or operation == 0, operation + 1
    assert operation > 30


def test_a_run_that_was_killed_at_its_end_is_tidied_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the folder is left; unless the output is another, or the run is."""
    pairs = extractions.text(9)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    left = 0

    def killed(remove: Callable[..., None]) -> Callable[..., None]:
        def step(place: Local, *names: str) -> None:
            nonlocal left
            for name in names or [""]:
                if out.exists():
                    left -= 1
                    if left == 0:
                        raise KeyboardInterrupt
                remove(place, *filter(None, [name]))

        return step

    def kill(number: int) -> bool:
        nonlocal left
        out.unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "out.parts", ignore_errors=True)
        left = number
        with monkeypatch.context() as patch:
            patch.setattr(Local, "remove", killed(Local.remove))
            patch.setattr(Local, "remove_folder", killed(Local.remove_folder))
            with suppress(KeyboardInterrupt):
                run(source, out)
        return left <= 0

    number = 1
    while kill(number):
        assert (tmp_path / "out.parts").exists()
        check_result(source, out, pairs)
        number += 1
    assert number > 6  # three blocks, the job, the lock, what was published, the folder
    for number in (1, 3, 5):
        kill(number)
        with pytest.raises(InvalidInputError, match="out exists already; give another name, or replace it with --over"):
            run(source, out, settings={"other": 1})
        assert not (tmp_path / "out.parts").exists()
        kill(number)
        run(source, out, settings={"other": 1}, overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"text", "out"}
        kill(number)
        other = write_text(source, [*pairs, ("a", "b")])
        with pytest.raises(InvalidInputError, match="out exists already"):
            run(other, out)
        write_text(source, pairs)


def test_torn_block_is_made_again(tmp_path: Path) -> None:
    pairs = extractions.text(12)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    interrupt(source, out, 2)
    part = tmp_path / "out.parts" / "block-000000001"
    content = part.read_bytes()
    _, block, _ = cut([source], extractions.BLOCK_LINES)
    journal = Journal(str(out), {"block_lines": 4, "max_words": 8})
    for size in range(len(content)):
        part.write_bytes(content[:size])
        assert journal.finished(block) is None
    part.write_bytes(content)
    assert journal.finished(block) is not None
    part.write_bytes(content[:-4])
    # In a container, the number of a process may well be that of the one that was killed.
    (part.parent / f".block-000000002.{os.getpid()}.tmp").write_text("0-0\n")
    run(source, out)
    check_result(source, out, pairs)


def test_what_an_earlier_version_saved_of_an_unfinished_block_is_removed(tmp_path: Path) -> None:
    pairs = extractions.text(12)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    for blocks in (0, 2):
        interrupt(source, out, blocks)
        (tmp_path / "out.parts" / "half-000000002").write_text("of an earlier version")
        run(source, out)
        check_result(source, out, pairs)
        out.unlink()


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


def test_what_a_run_left_is_named_if_the_output_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "remove", failing)
        with pytest.raises(KeyboardInterrupt):
            run(source, out)
    out.write_text("0-0\n")  # another
    left = tmp_path / "out.parts"
    with pytest.raises(InvalidInputError, match=f"; {left} was left by a run: remove it if that run wrote {out}$"):
        run(source, out)
    shutil.rmtree(left)
    with pytest.raises(InvalidInputError, match=r"overwrite=True\)$"):
        run(source, out)


def failing(_: object) -> None:
    raise KeyboardInterrupt


def test_second_run_is_kept_out(tmp_path: Path) -> None:
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"
    interrupt(source, out, 1)
    with (
        FileLock(tmp_path / "out.parts" / "lock"),
        pytest.raises(InvalidInputError, match=r"another run is writing .*out;"),
    ):
        run(source, out)


def test_a_worker_reads_the_job_and_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may have millions of files, and an object store answers a thousand at a time."""
    journal = Journal(str(tmp_path / "out"), {})
    with pytest.raises(InvalidInputError, match=r"out\.parts is not there.*; give a folder that all nodes reach"):
        journal.expect_job()
    with journal.locked(restart=False):
        monkeypatch.setattr(Local, "entries", failing)
        journal.expect_job()
        (tmp_path / "out.parts" / "job.json").write_text("{}")
        with pytest.raises(InvalidInputError, match="not an unfinished run"):
            journal.expect_job()
        monkeypatch.undo()
