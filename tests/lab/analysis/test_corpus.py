"""Texts in files."""

import bz2
import gzip
import hashlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.corpus import Corpus

CONTENT = "one\n\n  \ntwo\nthree\r\n\nfour"


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_texts_by_lines_and_by_documents(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compress(CONTENT.encode()))
    assert list(Corpus(path).texts()) == [(1, "one"), (4, "two"), (5, "three"), (7, "four")]
    assert list(Corpus(path, "documents").texts()) == [(1, "one"), (4, "two\nthree"), (7, "four")]
    assert list(Corpus(path, "documents", 2).texts()) == [(1, "one"), (4, "two\nthree")]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert [text for _, text in Corpus(path).texts()] == ["one", "\ufefftwo"]


def test_blocks_and_facts(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a\nb\nc\n")
    assert [str(block) for block in Corpus(path).blocks(2)] == [
        "lines 1 to 2 of the input",
        "lines 3 to 3 of the input",
    ]
    assert Corpus(path).digest() == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", b"good\nb\xffd\n", "line 2: got byte 0xff at byte 2 of the line, expected UTF-8"),
        ("text.gz", gzip.compress(b"good\n" * 999, mtime=0)[:-9], "damaged or truncated"),
        ("text.xz", b"no xz at all", "damaged or truncated"),
        ("text", b"\n \n", "has no text"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        Corpus(tmp_path / name).digest()


def test_a_corpus_goes_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xff\n")
    with pytest.raises(InvalidInputError, match=r"^standard input, line 1: got byte 0xff"):
        Corpus(path, name="standard input").digest()
    path.write_bytes(b"\n")
    with pytest.raises(InvalidInputError, match=r"^standard input has no text"):
        Corpus(path, name="standard input").digest()


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such file"):
        Corpus(tmp_path / "absent")
    with pytest.raises(InvalidInputError, match="it is a folder"):
        Corpus(tmp_path)
    with pytest.raises(InvalidInputError, match=r"^cannot read .*: File name too long$"):
        Corpus("x" * 300)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInputError, match=r"pipe more than once; expected a regular file$"):
        Corpus(tmp_path / "pipe")
    (tmp_path / "text").write_text("a\n")
    with pytest.raises(InvalidInputError, match="unit='words'"):
        Corpus(tmp_path / "text", "words")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="limit=0"):
        Corpus(tmp_path / "text", limit=0)
