"""Files are whole or not there."""

from pathlib import Path

import pytest

from captum_norm.visualization.files import write_whole


def test_new_file_has_the_content_and_ordinary_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    assert write_whole(path, b"new") == path
    assert path.read_bytes() == b"new"
    beside = tmp_path / "beside"
    beside.touch()
    assert path.stat().st_mode == beside.stat().st_mode


def test_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"a longer old content")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_leaves_the_older_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(self: Path, _target: Path) -> Path:
        assert self.read_bytes() == b"new"
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "a.bin", b"new")
