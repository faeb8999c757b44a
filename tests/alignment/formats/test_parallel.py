"""Parallel text from one file or two."""

import gzip
import io
import lzma
from pathlib import Path

import pytest

from alignment import read_parallel
from captum_norm import InvalidInputError

PAIRS = [("das Haus", "the house"), ("", "nothing"), ("ein | Strich", "a\u00a0line")]


def test_separated_and_two_files_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "both").write_text("".join(f"{source} ||| {target}  \n" for source, target in PAIRS))
    (tmp_path / "de.gz").write_bytes(gzip.compress("\n".join(source for source, _ in PAIRS).encode()))
    (tmp_path / "en.xz").write_bytes(lzma.compress("".join(f"{target}\r\n" for _, target in PAIRS).encode()))
    assert list(read_parallel(tmp_path / "both")) == PAIRS
    assert list(read_parallel(tmp_path / "de.gz", tmp_path / "en.xz")) == PAIRS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a ||| x\nb\tc\n", r"line 2: got 0 times \|\|\|, expected source \|\|\| target"),
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
