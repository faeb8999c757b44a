"""Blocks are cut at line feeds, found by their position and read again as they were; jobs of one's own."""

import gzip
import io
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.runs import Block, Job, Journal, Record, cut, run_job

LINES = [b"one", b"", b"\xff\xfe", "été\u2028là".encode(), b"a\rb", b"end\r", b"  ", b"\xe3\x80\x80", b"\x1c", b"last"]


def drawn(rng: random.Random, number: int) -> bytes:
    """Lines of all kinds, the last of which may lack its line feed."""
    content = b"".join(rng.choice(LINES) + b"\n" for _ in range(number))
    return content if rng.random() < 0.5 else content[:-1]


def joined(blocks: Iterable[Block], side: int = 0) -> bytes:
    return b"".join(block.read()[side] for block in blocks)


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_the_text(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    content, size = drawn(rng, rng.randrange(1, 30)), rng.randrange(1, 12)
    path, packed = tmp_path / "text", tmp_path / "text.gz"
    path.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    blocks = list(cut([path], size))
    assert joined(blocks) == joined(cut([packed], size)) == joined(cut([io.BytesIO(content)], size)) == content
    lines = content.split(b"\n")[: content.count(b"\n") + (not content.endswith(b"\n"))]
    assert [block.lines for block in blocks] == [len(lines[at : at + size]) for at in range(0, len(lines), size)]
    assert [(block.index, block.first) for block in blocks] == [(i, i * size + 1) for i in range(len(blocks))]
    assert blocks == [block for block in blocks if block.parts[0].content is None]
    assert blocks[-1].share == 1


def test_text_and_place_identify_a_block(tmp_path: Path) -> None:
    contents = [b"a b\nc\nd\n", b"a\nb c\nd\n", b"a b\nc\ne\n", b"c\na b\nd\n", b"\na b\nc\n"]
    digests = {block.digest for content in contents for block in cut([io.BytesIO(content)], 3)}
    one, two = (io.BytesIO(content) for content in (b"ab\nc\n", b"d\ne\n"))
    (both,) = cut([one, two], 2)
    assert len({*digests, both.digest}) == len(contents) + 1
    path = tmp_path / "text"
    path.write_bytes(b"a\nb\nc\n")
    first, second = cut([path], 2)
    path.write_bytes(b"a\nB\nc\n")
    assert second.read() == [b"c\n"]
    with pytest.raises(
        InvalidInputError, match=r"^lines 1 to 2 of the input have changed since the start: see .*text; "
    ):
        first.read()
    path.unlink()
    with pytest.raises(InvalidInputError, match=r"^cannot read .*text: there is no such file"):
        second.read()


def test_every_byte_is_read_once() -> None:
    class Counted(io.BytesIO):
        read_bytes = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            Counted.read_bytes += len(line)
            return line

    content = b"some words\n" * 1000
    assert joined(cut([Counted(content)], 7)) == content
    assert Counted.read_bytes == len(content)


def test_a_stream_of_text_may_hold_what_is_no_unicode() -> None:
    (block,) = cut([io.StringIO("a\n\udcff\n")], 2)
    assert block.read() == [b"a\n\xed\xb3\xbf\n"]


class Sum(Job):
    """Adds up the numbers in a file, one a line, in blocks of two."""

    def __init__(self, path: str) -> None:
        super().__init__(path, {})

    def blocks(self) -> Iterator[Block]:
        return cut([self.output], 2)

    def worker(self) -> Callable[[Block], Record]:
        return lambda block: Record({"sum": sum(map(float, block.read()[0].split()))}, b"")

    def finish(self, journal: Journal, blocks: int) -> Any:
        return sum(record.notes["sum"] for record in journal.records(blocks))


def test_what_cannot_be_loaded_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class Failing(Sum):
        def worker(self) -> Callable[[Block], Record]:
            raise InvalidInputError("no model")

    path = tmp_path / "text"
    path.write_text("1\n")
    with pytest.raises(InvalidInputError, match="no model"):
        run_job(Failing(str(path)))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidInputError, match=r'got the backend \'slurm\'; expected "local", "ray" or a RayBackend'):
        run_job(Sum(str(path)), "slurm")  # type: ignore[arg-type]
