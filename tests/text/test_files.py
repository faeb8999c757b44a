"""Files are whole or not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.text.files import check_file, check_folder, check_writable, whole_file, write_whole


def test_new_file_has_the_content_and_ordinary_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    assert write_whole(path, b"new") == path
    assert path.read_bytes() == b"new"
    beside = tmp_path / "beside"
    beside.touch()
    assert path.stat().st_mode == beside.stat().st_mode


def test_older_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"a longer old content")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"a longer old content"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_failure_leaves_the_older_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(f"os.{name}", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_file_is_none(tmp_path: Path) -> None:
    def halves() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "a.bin") as file:
        file.writelines(halves())
    assert list(tmp_path.iterdir()) == []


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "a.bin", b"new")


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "new"):
        check_file(path)
    for path in (tmp_path, tmp_path / "new"):
        check_folder(path)
    check_writable(tmp_path)
    with pytest.raises(InvalidInputError, match=r"^cannot write .*: it is a folder$"):
        check_file(tmp_path)
    with pytest.raises(InvalidInputError, match=r"^cannot write .*: there is no folder .*nosuch$"):
        check_file(tmp_path / "nosuch" / "new")
    with pytest.raises(InvalidInputError, match=r"^cannot use .*file as a folder: it is a file$"):
        check_folder(tmp_path / "file")
    with pytest.raises(InvalidInputError, match=r"^the folder .* cannot be written to \(No such file or directory\)$"):
        check_writable(tmp_path / "nosuch")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
