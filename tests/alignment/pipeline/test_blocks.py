"""Blocks of lines, and what becomes of bad ones."""

import io
import re

import pytest

from alignment import Alignment
from alignment.pipeline.blocks import BlockAligner, ExtractionCounts, ParallelText
from captum_norm import InvalidInputError
from tests.runs.extractions import Batch

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


@pytest.mark.parametrize("size", [1, 3, 5, 10, 11])
def test_bad_lines_are_reported_in_order_and_become_empty_lines(size: int) -> None:
    text = ParallelText(io.BytesIO(b"\n".join(LINES)), None)
    told: list[str] = []
    aligner = BlockAligner(text, diagonal, 3, stop=False, report=told.append)
    blocks = list(text.blocks(size))
    assert [block.first for block in blocks] == list(range(1, 11, size))
    records = [aligner(block) for block in blocks]
    assert b"".join(record.content for record in records) == b"0-0 1-1" + b"\n" * 9 + b"0-0\n"
    assert sum((ExtractionCounts(**record.notes["counts"]) for record in records), ExtractionCounts()) == COUNTS
    assert COUNTS.bad_lines == len(told) == len(REASONS)
    for message, (number, reason) in zip(told, REASONS.items(), strict=True):
        assert message.startswith(f"<stream>, line {number}: {reason}")


@pytest.mark.parametrize("number", REASONS)
def test_first_bad_line_stops_if_told_to(number: int) -> None:
    text = ParallelText(io.BytesIO(b"\n".join([LINES[0], LINES[number - 1], LINES[4]])), None)
    aligner = BlockAligner(text, diagonal, 3, stop=True, report=lambda _: None)
    first, second = text.blocks(2)
    with pytest.raises(InvalidInputError, match=f"<stream>, line 2: {re.escape(REASONS[number])}.*--bad-lines empty"):
        aligner(first)
    with pytest.raises(InvalidInputError, match="<stream>, line 3: got no word"):
        aligner(second)


def test_messages_name_the_file_of_the_side() -> None:
    streams = io.BytesIO(b"a\na\na b\na\nrefused\n"), io.BytesIO(b"\n\xff\nx\nx y\nx\n")
    for stream, name in zip(streams, ("text.de", "text.en"), strict=True):
        stream.name = name
    text = ParallelText(*streams)
    told: list[str] = []
    (block,) = text.blocks(9)
    record = BlockAligner(text, diagonal, 1, stop=False, report=told.append)(block)
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
        list(ParallelText(streams["text.de"], streams["text.en"]).blocks(9))


def test_aligner_is_not_asked_about_nothing() -> None:
    def never(_: Batch) -> list[Alignment | InvalidInputError]:
        raise AssertionError

    text = ParallelText(io.BytesIO(b"a |||\n||| b\n"), None)
    (block,) = text.blocks(2)
    assert BlockAligner(text, never, 3, stop=False, report=lambda _: None)(block).content == b"\n\n"


def test_aligner_that_loses_a_pair_is_caught() -> None:
    text = ParallelText(io.BytesIO(b"a ||| b\nc ||| d\n"), None)
    (block,) = text.blocks(2)
    with pytest.raises(ValueError, match="zip"):
        BlockAligner(text, lambda pairs: diagonal(pairs)[:1], 3, stop=False, report=lambda _: None)(block)


def test_content_tells_texts_apart() -> None:
    contents = [b"a b ||| c\nd ||| e\n", b"a ||| b c\nd ||| e\n", b"a b ||| c\nd ||| f\n", b"d ||| e\na b ||| c\n"]
    blocks = [block for content in contents for block in ParallelText(io.BytesIO(content), None).blocks(2)]
    assert len({"".join(block.content()) for block in blocks}) == 4
    (again,) = ParallelText(io.BytesIO(b"a b\nd\n"), io.BytesIO(b"c\r\ne")).blocks(2)
    assert list(again.content()) == list(blocks[0].content())


def test_counts_say_what_they_are() -> None:
    assert str(COUNTS) == (
        "10 lines, 3 links; 8 bad lines: 3 unreadable, 2 with an empty side, 2 too long, 1 refused by the aligner"
    )
    assert str(ExtractionCounts(lines=1000, links=2000)) == "1,000 lines, 2,000 links; 0 bad lines"
