"""Blocks of lines, and what becomes of bad ones."""

import io
import re

import pytest

from alignment import Alignment
from alignment.formats.output import Output
from alignment.pipeline.blocks import BlockAligner, ExtractionCounts, LinkWriting
from captum_norm import InvalidInputError
from captum_norm.runs import Attempt, Block, Record, cut
from tests.runs.extractions import Batch

PHARAOH = LinkWriting(Output())

# Every reason there is, and "too long" on either side.
LINES = [
    b"a b ||| x y",
    b"\xff ||| x",
    b"a x",
    b"a ||| x ||| x",
    b" ||| x",
    b"a |||",
    b"a b c d ||| x",
    b"a ||| x y z 0",
    b"refused ||| x",
    b"a ||| x",
]
REASONS = {
    2: "got byte 0xff",
    3: "got 0 times",
    4: "got 2 times",
    5: "got no word on the source side",
    6: "got no word on the target side",
    7: "got 4 words on the source side, expected at most 3; allow more with --max-words (max_words=)",
    8: "got 4 words on the target side",
    9: "refused by the model",
}
COUNTS = ExtractionCounts(lines=10, links=3, unreadable=3, empty=2, too_long=2, refused=1)


def diagonal(pairs: Batch) -> list[Alignment | InvalidInputError]:
    return [
        InvalidInputError("refused by the model")
        if "refused" in source
        else Alignment([(index, index) for index in range(min(len(source), len(target)))])
        for source, target in pairs
    ]


def aligned(aligner: BlockAligner, block: Block, told: list[str] | None = None) -> Record:
    return aligner(Attempt(block, None, lambda *_: None, [] if told is None else told))


@pytest.mark.parametrize("size", [1, 3, 5, 10, 11])
def test_bad_lines_are_reported_in_order_and_become_empty_lines(size: int) -> None:
    told: list[str] = []
    aligner = BlockAligner(diagonal, PHARAOH, 3, stop=False)
    blocks = list(cut([io.BytesIO(b"\n".join(LINES))], size))
    assert [block.first for block in blocks] == list(range(1, 11, size))
    records = [aligned(aligner, block, told) for block in blocks]
    assert b"".join(record.content for record in records) == b"0-0 1-1" + b"\n" * 9 + b"0-0\n"
    assert sum((ExtractionCounts(**record.notes["counts"]) for record in records), ExtractionCounts()) == COUNTS
    assert COUNTS.bad_lines == len(told) == len(REASONS)
    for message, (number, reason) in zip(told, REASONS.items(), strict=True):
        assert message.startswith(f"<stream>, line {number}: {reason}")


@pytest.mark.parametrize("number", REASONS)
def test_first_bad_line_stops_if_told_to(number: int) -> None:
    aligner = BlockAligner(diagonal, PHARAOH, 3, stop=True)
    first, second = cut([io.BytesIO(b"\n".join([LINES[0], LINES[number - 1], LINES[4]]))], 2)
    with pytest.raises(InvalidInputError, match=f"<stream>, line 2: {re.escape(REASONS[number])}.*--bad-lines empty"):
        aligned(aligner, first)
    with pytest.raises(InvalidInputError, match="<stream>, line 3: got no word"):
        aligned(aligner, second)


def test_messages_name_the_file_of_the_side() -> None:
    streams = io.BytesIO(b"a\na\na b\na\nrefused\n"), io.BytesIO(b"\n\xff\nx\nx y\nx\n")
    for stream, name in zip(streams, ("text.de", "text.en"), strict=True):
        stream.name = name
    told: list[str] = []
    (block,) = cut(streams, 9)
    record = aligned(BlockAligner(diagonal, PHARAOH, 1, stop=False), block, told)
    assert record.content == b"\n" * 5
    assert [message.split(": got")[0] for message in told[:4]] == [
        "text.en, line 1",
        "text.en, line 2",
        "text.de, line 3",
        "text.en, line 4",
    ]
    assert told[4] == "text.de, line 5: refused by the model"


@pytest.mark.parametrize("utf16", ["text.de", "text.en"])
def test_a_side_in_another_encoding_is_at_fault_not_the_one_that_is_longer(utf16: str) -> None:
    streams = {name: io.BytesIO(("a b\nc d\n" * 3).encode()) for name in ("text.de", "text.en")}
    streams[utf16] = io.BytesIO(("a b\nc d\n" * 3).encode("utf-16"))
    for name, stream in streams.items():
        stream.name = name
    with pytest.raises(InvalidInputError, match=f"^{utf16}, line 1: got byte 0xff at byte 1 of the line"):
        list(cut([streams["text.de"], streams["text.en"]], 9))


def test_aligner_is_not_asked_about_nothing() -> None:
    def never(_: Batch) -> list[Alignment | InvalidInputError]:
        raise AssertionError

    (block,) = cut([io.BytesIO(b"a |||\n||| b\n")], 2)
    assert aligned(BlockAligner(never, PHARAOH, 3, stop=False), block).content == b"\n\n"


def test_aligner_that_loses_a_pair_is_caught() -> None:
    (block,) = cut([io.BytesIO(b"a ||| b\nc ||| d\n")], 2)
    with pytest.raises(ValueError, match="zip"):
        aligned(BlockAligner(lambda pairs: diagonal(pairs)[:1], PHARAOH, 3, stop=False), block)


def test_counts_say_what_they_are() -> None:
    assert str(COUNTS) == (
        "10 lines, 3 links; 8 bad lines: 3 unreadable, 2 with an empty side, 2 too long, 1 refused by the aligner"
    )
    assert str(ExtractionCounts(lines=1000, links=2000)) == "1,000 lines, 2,000 links; 0 bad lines"
