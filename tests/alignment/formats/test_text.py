"""Words, files of lines, links in Pharaoh format, parallel text, and lines that begin with a sentence id."""

import gzip
import io
import lzma
import os
import random
from pathlib import Path

import pytest

from alignment import Alignment, read_parallel, read_pharaoh, write_pharaoh
from alignment.formats import parse_pharaoh
from alignment.formats.text import split_words, write_text
from captum_norm import InvalidInputError
from captum_norm.checks import quoted
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


def test_words_and_links_stand_between_spaces_and_tabs() -> None:
    assert split_words(" 1\u00a0000  \u3000 francs\t!") == ["1\u00a0000", "\u3000", "francs", "!"]
    assert split_words("") == []
    assert parse_pharaoh(" 10-0\t2-1  2-1 \r") == Alignment([(2, 1), (10, 0)])
    assert parse_pharaoh("") == Alignment()


@pytest.mark.parametrize(
    "token", ["1", "1p2", "-1-2", "1-2-3", "1-", "a-b", "1_0-2", "+1-2", "²-1", "1-2:1.5", "9" * 5000 + "-1"]
)
def test_what_is_no_link_is_named(token: str) -> None:
    with pytest.raises(InvalidInputError, match="expected i-j") as raised:
        parse_pharaoh(f"0-0 {token}")
    assert quoted(token) in str(raised.value)


def test_files_come_back(tmp_path: Path) -> None:
    rng = random.Random(0)
    alignments = [Alignment([(rng.randrange(30), rng.randrange(30)) for _ in range(size)]) for size in (5, 0, 40, 1)]
    path = tmp_path / "hyp.xz"
    write_pharaoh(path, iter(alignments))
    assert list(read_pharaoh(path)) == alignments


def test_alignments_are_read_as_lines_arrive() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        alignments = read_pharaoh(reader)
        for link in ((0, 1), (2, 0)):
            writer.write("{}-{}\n".format(*link).encode())
            assert next(alignments) == Alignment([link])


def test_file_and_line_are_named(tmp_path: Path) -> None:
    path = tmp_path / "hyp.talp"
    path.write_text("0-0\n0-0 x\n")
    with pytest.raises(InvalidInputError) as raised:
        list(read_pharaoh(path))
    expected = f"{path}, line 2: got 'x', expected i-j; read sure and possible links with read_gold"
    assert str(raised.value) == expected


PAIRS = [("das Haus", "the house"), ("", "nothing"), ("ein | Strich", "a\u00a0line")]


def test_separated_and_two_files_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "both").write_text("".join(f"{source} ||| {target}  \n" for source, target in PAIRS))
    (tmp_path / "tabs").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    (tmp_path / "de.gz").write_bytes(gzip.compress("\n".join(source for source, _ in PAIRS).encode()))
    (tmp_path / "en.xz").write_bytes(lzma.compress("".join(f"{target}\r\n" for _, target in PAIRS).encode()))
    assert list(read_parallel(tmp_path / "both")) == list(read_parallel(tmp_path / "tabs")) == PAIRS
    assert list(read_parallel(io.StringIO("a\tb ||| c\td\n\n \t\n"))) == [("a\tb", "c\td"), ("", ""), ("", "")]
    assert list(read_parallel(tmp_path / "de.gz", tmp_path / "en.xz")) == PAIRS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a ||| x\nb c\n", r"line 2: got 0 times \|\|\| and 0 tabs; expected source \|\|\| target, or source and"),
        (b"a\tx\nb\tc\td\n", r"line 2: got 0 times \|\|\| and 2 tabs"),
        (b"a ||| x\na ||| x ||| 0-0\n", r"line 2: got 2 times \|\|\|"),
        (b"a ||| x\n\xff ||| x\n", "line 2: got byte 0xff at byte 1"),
    ],
)
def test_malformed_line_is_named_or_handed_over(content: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        list(read_parallel(io.BytesIO(content)))
    errors: list[InvalidInputError] = []
    pairs = list(read_parallel(io.BytesIO(content + b"c ||| z\n"), on_error=errors.append))
    assert pairs == [("a", "x"), ("", ""), ("c", "z")]
    with pytest.raises(InvalidInputError, match=message):
        raise errors.pop()
    assert not errors


def test_line_that_is_not_utf8_in_either_file_costs_its_pair_alone(tmp_path: Path) -> None:
    (tmp_path / "de").write_bytes(b"a\n\xff\nc\nd\n")
    (tmp_path / "en").write_bytes(b"x\ny\n\xff\nz\n")
    errors: list[InvalidInputError] = []
    pairs = list(read_parallel(tmp_path / "de", tmp_path / "en", on_error=errors.append))
    assert pairs == [("a", "x"), ("", ""), ("", ""), ("d", "z")]
    assert [str(error).split(": got")[0] for error in errors] == [f"{tmp_path}/de, line 2", f"{tmp_path}/en, line 3"]


@pytest.mark.parametrize(("source", "target", "shorter"), [("a\nb\n", "x\n", "target"), ("a\n", "x\ny\n", "source")])
def test_file_that_ends_early_is_named(source: str, target: str, shorter: str) -> None:
    streams = {"source": io.StringIO(source), "target": io.StringIO(target)}
    for name, stream in streams.items():
        stream.name = name
    reader = read_parallel(streams["source"], streams["target"], on_error=lambda _: None)
    assert next(reader) == ("a", "x")
    with pytest.raises(InvalidInputError, match=f"{shorter}, line 2: got no such line"):
        next(reader)
