"""Text as numbered lines, and files that are written whole or not at all."""

import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment.formats.text import read_lines, scan_lines, split_words, write_lines
from captum_norm import InvalidInputError

COMPRESS = {"": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_end_at_line_feeds_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix]("one\u2028still\x0cone\rstill\r\n\nthrée".encode()))
    expected = [(1, "one\u2028still\x0cone\rstill"), (2, ""), (3, "thrée")]
    assert list(read_lines(path)) == expected
    assert list(read_lines(str(path))) == expected


def test_streams_of_text_and_bytes_stay_open() -> None:
    for stream in (io.StringIO("a\nb"), io.BytesIO(b"a\nb\n")):
        assert list(read_lines(stream)) == [(1, "a"), (2, "b")]
        assert not stream.closed


def test_line_that_is_not_utf8_is_named_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"one\nd\xe9j\xe0\nthree\n")
    (_, one), (_, error), (_, three) = scan_lines(path)
    assert (one, three) == ("one", "three")
    assert str(error) == f"{path}, line 2: got byte 0xe9 at byte 2 of the line, expected UTF-8; convert the file"
    with pytest.raises(InvalidInputError, match="line 2: got byte 0xe9"):
        list(read_lines(path))


def test_stream_of_text_that_is_not_utf8_is_refused() -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"d\xe9j\xe0\n"), encoding="utf-8")
    with pytest.raises(InvalidInputError, match="line 1: got a stream of text that is not UTF-8"):
        list(read_lines(stream))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_file_that_is_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix](b"some words\n" * 100)[:-12])
    with pytest.raises(InvalidInputError, match=f"text{suffix}, line .* damaged or cut short"):
        list(read_lines(path))
    path.write_bytes(b"not compressed")
    with pytest.raises(InvalidInputError, match="damaged"):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_written_lines_come_back_and_bytes_are_reproducible(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    write_lines(path, iter(["a", "", "ü"]))
    assert [line for _, line in read_lines(path)] == ["a", "", "ü"]
    first = path.read_bytes()
    write_lines(path, ["a", "", "ü"])
    assert path.read_bytes() == first
    if suffix == ".gz":  # neither a file name nor a time [RFC 1952, section 2.3]
        assert first[3:8] == bytes(5)
    assert (first == "a\n\nü\n".encode()) == (suffix == "")


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def failing() -> Iterator[str]:
        yield "new"
        raise RuntimeError("killed")

    path = tmp_path / "text"
    write_lines(path, ["old"])
    with pytest.raises(RuntimeError, match="killed"):
        write_lines(path, failing())
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_readable_as_the_umask_says_and_links_stay(tmp_path: Path) -> None:
    plain, path, link = tmp_path / "plain", tmp_path / "text", tmp_path / "link"
    plain.touch()
    path.touch()
    link.symlink_to(path)
    write_lines(link, ["a"])
    assert link.is_symlink()
    assert path.read_text() == "a\n"
    assert path.stat().st_mode == plain.stat().st_mode


def test_words_are_split_at_spaces_and_tabs_alone() -> None:
    assert split_words(" 1\u00a0000  \u3000 francs\t!") == ["1\u00a0000", "\u3000", "francs", "!"]
    assert split_words("") == []
