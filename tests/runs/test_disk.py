"""Disks that are full, closed or broken: one sentence, and what was finished before is still there."""

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from captum_norm.errors import InvalidInputError
from tests.runs import extractions
from tests.runs.damage import tree

PAIRS = extractions.text(4 * extractions.BLOCK_LINES)
CALLS = "fsync", "mkdir", "open", "replace", "rmdir", "scandir", "unlink"
"""The system's functions that a run calls, but for those of the lock, which filelock answers for."""


class Broken:
    """Lets the n-th of these calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int, number: int) -> None:
        self.left = number
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name), error))

    def _failing(self, call: Callable[..., Any], error: int) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            if not str(arguments[0]).endswith("lock"):
                self.left -= 1
                if self.left == 0:
                    raise OSError(error, os.strerror(error))
            return call(*arguments, **options)

        return failing


def blocks(folder: Path) -> dict[str, object]:
    return {name: content for name, content in tree(folder).items() if "/block-" in name}


@pytest.mark.few
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_whichever_call_fails_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    template = tmp_path / "template"
    template.mkdir()
    source = extractions.write_text(template / "text", PAIRS)
    extractions.interrupt(source, template / "out", 2)
    number, failed = 0, True
    while failed:
        number += 1
        folder = tmp_path / str(number)
        shutil.copytree(template, folder)
        before = blocks(folder)
        told: str | None = None
        with monkeypatch.context() as patch:
            broken = Broken(patch, error, number)
            try:
                extractions.run(folder / "text", folder / "out")
            except InvalidInputError as refusal:
                told = str(refusal)
        failed = broken.left <= 0
        if told is not None:
            assert os.strerror(error) in told
            assert "\n" not in told
            if not (folder / "out").exists():
                assert before.items() <= blocks(folder).items()
        if (folder / "out.parts").exists():
            extractions.run(folder / "text", folder / "out", overwrite=True)
        assert (folder / "out").read_text() == extractions.expected(PAIRS)
        shutil.rmtree(folder)
    assert number > 25


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 100, 400])
def test_limit_of_file_sizes(tmp_path: Path, size: int) -> None:
    source, out = extractions.write_text(tmp_path / "text", PAIRS * 4), tmp_path / "out"
    with (
        largest_file(size),
        pytest.raises(InvalidInputError, match=r"cannot read or write .*out.parts.*File too large"),
    ):
        extractions.run(source, out, block_lines=40)
    assert not out.exists()
    extractions.run(source, out, block_lines=40)
    extractions.check_result(source, out, PAIRS * 4)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may look into."""
    folder = Path(tempfile.mkdtemp(prefix="captum-norm-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def nobody() -> Iterator[None]:
    """Root may do everything, so it is somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "closed", ["", "out.parts", "out.parts/job.json", "out.parts/block-000000000", "out.parts/lock"]
)
def test_what_may_not_be_read_or_written(place: Path, closed: str) -> None:
    source, out = extractions.write_text(place / "text", PAIRS), place / "out"
    if closed:
        extractions.interrupt(source, out, 2)
        for path in [place, *place.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
        (place / closed).chmod(0)
    before = blocks(place)
    message = f"cannot read or write .*{closed}.*: Permission" if closed else r"cannot be written to \(Permission"
    with nobody(), pytest.raises(InvalidInputError, match=f"{message} denied"):
        extractions.run(source, out)
    assert blocks(place) == before
    for path in place.rglob("*"):
        path.chmod(0o755)
    extractions.run(source, out)
    extractions.check_result(source, out, PAIRS)
