"""Files by path and URL, in memory and in an S3 bucket, are whole or not there."""

import errno
import gc
import gzip
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Never

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from alignment import Lexicon, write_pharaoh
from captum_norm.errors import InvalidInputError
from captum_norm.text import files
from captum_norm.text.files import check_file, check_folder, is_url, place_of, write_whole
from captum_norm.text.lines import is_regular_file, plain_size, read_lines, read_range
from tests.object_store import DENIED, FULL, ObjectStore, Refusal, Request


def names(url: str) -> list[str]:
    return sorted(name for name, _ in place_of(url).entries())


def test_urls_are_told_from_paths() -> None:
    assert is_url("s3://bucket/a")
    assert is_url("file:///a")
    for name in ("a", "/a://b", "C:\\a", "3s://a", "S3://a", "s3:/a", 3, None, b"s3://a"):
        assert not is_url(name)


def test_a_file_is_written_read_and_removed(place: str) -> None:
    remote = place_of(place) / "a"
    assert str(remote) == f"{place}/a"
    assert remote.kind() is None
    remote.write(b"0123456789")
    assert remote.status() == ("file", 10)
    assert remote.is_same(place_of(f"{place}/a/"))
    assert not remote.is_same(place_of(place))
    assert remote.read() == b"0123456789"
    assert remote.read(3, 5) == b"34"
    assert remote.read(8, 12) == b"89"
    assert place_of(place).kind() == "directory"
    remote.write(b"")
    assert remote.read() == b""
    with place_of(f"{place}/b").replacing() as file:
        file.write(b"b")
    assert sorted(place_of(place).entries()) == [("a", True), ("b", True)]
    for _ in range(2):
        place_of(place).remove("a")
        place_of(place).remove("b", "none")
    assert names(place) == []
    with pytest.raises(FileNotFoundError):
        remote.read()


def test_files_below_are_not_files_of_the_folder(place: str) -> None:
    place_of(f"{place}/below").make()
    place_of(f"{place}/below/a").write(b"a")
    assert list(place_of(place).entries()) == [("below", False)]
    assert names(f"{place}/none") == []


@pytest.mark.parametrize("name", ["a*", "a[b]", "a?", "a b", "é", "a%20b", "a#b", "{a}"])
def test_hostile_names_are_names(place: str, name: str) -> None:
    if place.startswith("s3") and name == "a?":
        name = "a?b"
    url = f"{place}/{name}"
    for other in ("a", "ab", "abc"):
        write_whole(f"{place}/{other}", b"other")
    write_whole(url, b"one\n")
    with place_of(url).replacing() as file:
        file.write(b"1\n")
    assert list(read_lines(url)) == [(1, "1")]
    assert names(place) == sorted({"a", "ab", "abc", name})
    place_of(place).remove(name, "none")
    assert names(place) == ["a", "ab", "abc"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_are_read_as_from_a_file(place: str, suffix: str) -> None:
    url, content = f"{place}/text{suffix}", "".join(f"line {line}\n" for line in range(1000)).encode()
    write_whole(url, gzip.compress(content) if suffix else content)
    assert is_regular_file(url)
    assert plain_size(url) == (None if suffix else len(content))
    # Two readers do not disturb each other.
    for (_, left), (_, right) in zip(read_lines(url), read_lines(url), strict=True):
        assert left == right
    if not suffix:
        assert read_range(url, 5, 7) == content[5:12]
    with pytest.raises(InvalidInputError, match=r"^cannot read .*: there is no such file$"):
        is_regular_file(f"{place}/none")
    with pytest.raises(InvalidInputError, match=r"^cannot read .*: it is a folder$"):
        is_regular_file(place)


def interrupted(size: int, error: type[BaseException]) -> Iterator[bytes]:
    yield bytes(size)
    raise error


@pytest.mark.few
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("size", [0, 12 << 20])
def test_nothing_is_published_if_writing_is_interrupted(
    place: str, error: type[BaseException], size: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PART_BYTES", 5 << 20)
    place_of(f"{place}/a").write(b"old")
    for name in ("a", "b"):
        with pytest.raises(error), place_of(f"{place}/{name}").replacing() as file:
            file.writelines(interrupted(size, error))
    gc.collect()
    assert names(place) == ["a"]
    assert place_of(f"{place}/a").read() == b"old"
    if place.startswith("s3"):
        assert request.getfixturevalue("object_store").uploads() == []


def test_large_files_appear_when_they_are_complete(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PART_BYTES", 5 << 20)
    remote, chunk = place_of(f"{place}/a"), os.urandom(1 << 20)
    remote.write(b"old")
    with remote.replacing() as file:
        for _ in range(17):
            file.write(chunk)
        assert remote.read() == b"old"
    assert names(place) == ["a"]
    with remote.open() as opened:
        assert opened.read() == chunk * 17


def test_removing_many_objects_takes_few_requests(object_store: ObjectStore) -> None:
    folder = place_of("s3://bucket/folder")
    wanted = [f"block-{number:09d}" for number in range(2100)]
    for name in wanted[:3] + wanted[-3:]:
        (folder / name).write(b"")
    object_store.requests.clear()
    folder.remove(*wanted)
    assert [request.method for request in object_store.requests] == ["POST"] * 3
    assert names("s3://bucket/folder") == []


def everything(url: str) -> Iterator[Any]:
    """Use a file in every way."""
    folder = place_of(url)
    yield lambda: is_regular_file(f"{url}/text")
    yield lambda: plain_size(f"{url}/text")
    yield lambda: read_range(f"{url}/text", 0, 4)
    yield lambda: list(read_lines(f"{url}/text"))
    yield lambda: list(read_lines(f"{url}/text.gz"))
    yield lambda: write_whole(f"{url}/out", b"content")
    yield lambda: (folder / "out").write(b"content")
    yield folder.kind
    yield lambda: list(folder.entries())
    yield lambda: folder.remove("a")
    yield lambda: folder.remove("a", "b")


def test_errors_have_a_number_and_a_reason(object_store: ObjectStore) -> None:
    for name in ("text", "text.gz"):
        object_store.put(f"folder/{name}", b"one\n")
    with object_store.refusing(lambda _: DENIED):
        for use in everything("s3://bucket/folder"):
            with pytest.raises((InvalidInputError, PermissionError), match=r"Access Denied|Permission denied") as found:
                use()
            assert "\n" not in str(found.value)
    with object_store.refusing(lambda request: FULL if request.method in {"PUT", "POST"} else None):
        for write in (lambda: write_whole("s3://bucket/out", b"a"), lambda: place_of("s3://bucket/out").write(b"a")):
            with pytest.raises(OSError, match="The quota of the bucket is exceeded") as found:
                write()
            assert found.value.errno == errno.EIO
            assert found.value.filename == "s3://bucket/out"
    wrong = Refusal("403 Forbidden", "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist")
    with (
        object_store.refusing(lambda _: wrong),
        pytest.raises(PermissionError, match="Access Key Id you provided does not exist"),
    ):
        place_of("s3://bucket/a").read()


def test_a_bucket_that_does_not_exist_is_named_and_not_made(object_store: ObjectStore) -> None:
    for use in everything("s3://nosuchbucket/folder"):
        try:
            use()
        except (InvalidInputError, OSError) as error:
            assert "The specified bucket does not exist" in str(error)  # noqa: PT017
    place_of("s3://nosuchbucket/folder").make()
    assert object_store.files.ls("") == ["bucket"]


def test_a_connection_that_breaks_while_text_is_read_is_one_sentence(object_store: ObjectStore) -> None:
    for suffix, content in (("", b"line\n" * 10), (".gz", gzip.compress(b"line\n" * 10))):
        url = object_store.put(f"text{suffix}", content)
        reads = 0

        def once(request: Request) -> Refusal | None:
            nonlocal reads
            reads += request.method == "GET"
            return DENIED if reads else None

        with (
            object_store.refusing(once),
            pytest.raises(InvalidInputError, match=rf"^cannot read {url}: Access Denied$"),
        ):
            list(read_lines(url))


def test_unknown_protocols_and_missing_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    refused_early = {
        "nosuch://bucket/a": "cannot reach nosuch://bucket/a: Protocol not known: nosuch",
        "gs://bucket/a": "cannot reach gs://bucket/a: .*gcsfs",
        "s3://": "got the URL s3://; expected the name of a file or folder in it",
        "memory:///": "got the URL memory:///; expected the name",
        "file://": "got the URL file://; expected the name",
    }
    for url, message in refused_early.items():
        for use in (place_of, is_regular_file, lambda url: read_range(url, 0, 1), lambda url: write_whole(url, b"")):
            with pytest.raises(InvalidInputError, match=f"^{message}") as found:
                use(url)
            assert "\n" not in str(found.value)


@pytest.mark.parametrize("error", [RuntimeError("two\nlines"), KeyError("key"), OSError("no number"), Exception()])
def test_errors_of_any_type_are_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Never:
        raise error

    for name in ("info", "ls", "open", "cat_file", "pipe_file", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    for use in everything("memory://folder"):
        with pytest.raises((InvalidInputError, OSError)) as found:
            use()
        assert "\n" not in str(found.value)
        assert not isinstance(found.value, OSError) or found.value.errno == errno.EIO


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


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "new"):
        check_file(path)
    for path in (tmp_path, tmp_path / "new"):
        check_folder(path)
    with pytest.raises(InvalidInputError, match=r"^cannot write .*: it is a folder; give the name of a file in it$"):
        check_file(tmp_path)
    writers: list[Callable[[Path], object]] = [check_file, partial(write_whole, content=b""), Lexicon().save]
    writers.append(partial(write_pharaoh, alignments=[]))
    for write in writers:
        with pytest.raises(InvalidInputError, match=r"^cannot write .*new: there is no folder .*nosuch; make it"):
            write(tmp_path / "nosuch" / "new")
    with pytest.raises(InvalidInputError, match=r"^cannot use .*file as a folder: it is a file$"):
        check_folder(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
