"""Words, and files of lines."""

import gzip
import lzma
from pathlib import Path

import pytest

from alignment.formats.text import split_words, write_text
from captum_norm.text.lines import read_lines

COMPRESS = {"": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_written_lines_come_back_and_bytes_are_reproducible(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    write_text(path, iter([b"a\n\n", "ü\n".encode()]))
    assert [line for _, line in read_lines(path)] == ["a", "", "ü"]
    first = path.read_bytes()
    write_text(path, ["a\n\nü\n".encode()])
    assert path.read_bytes() == first
    if suffix == ".gz":  # neither a file name nor a time [RFC 1952, section 2.3]
        assert first[3:8] == bytes(5)
    assert (first == "a\n\nü\n".encode()) == (suffix == "")


def test_words_are_split_at_spaces_and_tabs_alone() -> None:
    assert split_words(" 1\u00a0000  \u3000 francs\t!") == ["1\u00a0000", "\u3000", "francs", "!"]
    assert split_words("") == []
