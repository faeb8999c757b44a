"""Words, and files that are written whole or not at all."""

import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment.formats.text import split_words, write_lines
from captum_norm.texts import read_lines

COMPRESS = {"": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress}


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
