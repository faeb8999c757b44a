"""From parallel text to a Pharaoh file."""

import gzip
import io
import lzma
import os
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from alignment import Alignment, read_pharaoh
from alignment.formats.output import Output
from alignment.pipeline import extract
from alignment.pipeline.blocks import BlockAligner, ExtractionCounts, LinkWriting
from captum_norm import InvalidInputError
from captum_norm.runs import cut
from tests.runs import extractions
from tests.runs.extractions import Batch, align, expected, run, write_text

PAIRS = extractions.text(23, seed=1)

OPEN: dict[str, Any] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


@pytest.mark.parametrize("block_lines", [1, 22, 23, 24])
def test_line_n_belongs_to_line_n(tmp_path: Path, block_lines: int) -> None:
    source, out = write_text(tmp_path / "text", PAIRS), tmp_path / "out"
    run(source, out, block_lines=block_lines)
    assert out.read_text() == expected(PAIRS)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "out"}


@pytest.mark.parametrize("suffix", OPEN)
def test_files_may_be_two_and_compressed(tmp_path: Path, suffix: str) -> None:
    sides = tmp_path / f"text.de{suffix}", tmp_path / f"text.en{suffix}"
    for side, path in enumerate(sides):
        with OPEN[suffix](path, "wt", encoding="utf-8") as stream:
            stream.writelines(f"{pair[side]}\n" for pair in PAIRS)
    out = tmp_path / f"out{suffix}"
    extract(*sides, align, out, block_lines=5, max_words=8, report=lambda _: None)
    with OPEN[suffix](out, "rt", encoding="ascii") as stream:
        assert stream.read() == expected(PAIRS)
    assert len(list(read_pharaoh(out))) == len(PAIRS)


def test_file_that_ends_early_is_named_and_what_was_done_is_kept(tmp_path: Path) -> None:
    sides = tmp_path / "text.de", tmp_path / "text.en"
    sides[0].write_text("a\n" * 5)
    sides[1].write_text("b\n" * 4)
    with pytest.raises(InvalidInputError, match=r"text.en, line 5: got no such line"):
        extract(*sides, align, tmp_path / "out", block_lines=4)
    assert (tmp_path / "out.parts" / "block-000000000").exists()
    sides[1].write_text("b\n" * 5)
    told: list[str] = []
    extract(*sides, align, tmp_path / "out", block_lines=4, report=told.append)
    assert told == [f"{tmp_path}/out.parts: 1 blocks are finished already"]


def test_stream_to_stream_goes_straight_through() -> None:
    content = "".join(f"{source} ||| {target}\n" for source, target in PAIRS).encode()
    out = io.BytesIO()
    told: list[str] = []
    counts = extract(io.BytesIO(content), None, align, out, block_lines=4, max_words=8, report=told.append)
    assert out.getvalue().decode() == expected(PAIRS)
    assert (counts.lines, counts.bad_lines) == (len(PAIRS), len(told) - 1)
    assert told[0].endswith("if interrupted, it starts over")


def test_a_line_of_one_very_long_word_is_bad() -> None:
    out = io.BytesIO()
    told: list[str] = []
    text = b"a ||| " + b"b" * 128 + b"\n" + b"a ||| " + b"b" * 129 + b"\n"
    counts = extract(io.BytesIO(text), None, align, out, max_words=8, report=told.append)
    assert out.getvalue() == b"0-0\n\n"
    assert (counts.too_long, counts.bad_lines) == (1, 1)
    assert told[1].startswith(
        "<stream>, line 2: got 129 letters on the target side, expected at most 128, 16 for each of"
    )


def test_stream_to_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out.gz"
    with pytest.raises(InvalidInputError, match="<stream>, line 2: got no word"):
        extract(io.BytesIO(b"a ||| b\na |||\n"), None, align, out, bad_lines="stop", block_lines=1)
    assert list(tmp_path.iterdir()) == []
    extract(io.BytesIO(b"a ||| b\n"), None, align, out, report=lambda _: None)
    assert gzip.decompress(out.read_bytes()) == b"0-0\n"
    with pytest.raises(InvalidInputError, match="exists already"):
        extract(io.BytesIO(b"a ||| b\n"), None, align, out)


def test_pipes_are_streams_whatever_their_names(tmp_path: Path) -> None:
    source, out = tmp_path / "in.pipe", tmp_path / "out.pipe"
    for path in (source, out):
        os.mkfifo(path)
    ends = [
        threading.Thread(target=source.write_bytes, args=(b"a ||| b\n",)),
        threading.Thread(target=extract, args=(source, None, align, out), kwargs={"report": lambda _: None}),
    ]
    for end in ends:
        end.start()
    assert out.read_bytes() == b"0-0\n"
    for end in ends:
        end.join()
    assert {path.name for path in tmp_path.iterdir()} == {"in.pipe", "out.pipe"}


def test_link_stays_a_link(tmp_path: Path) -> None:
    source, out, link = write_text(tmp_path / "text", PAIRS), tmp_path / "folder" / "out", tmp_path / "link"
    out.parent.mkdir()
    link.symlink_to(out)
    run(source, link)
    assert link.is_symlink()
    assert out.read_text() == expected(PAIRS)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("missing", "out"), {}, "cannot read .*missing: there is no such file"),
        (("folder", "out"), {}, "cannot read .*folder: it is a folder"),
        (("text", "folder"), {}, "cannot write .*folder: it is a folder"),
        (("text", "missing/out"), {}, "cannot write .*out: there is no folder .*missing; make it"),
        (("x" * 300, "out"), {}, "cannot read .*: File name too long$"),
        (("text", "x" * 300), {}, "cannot write .*: File name too long$"),
        (("text", "text"), {"overwrite": True}, "cannot write .*text: it is the input"),
        (("text", "old"), {}, "old exists already"),
        (("text", "out"), {"block_lines": 0}, "got block_lines 0 and max_words 8, expected at least 1"),
        (("text", "out"), {"max_words": 0}, "got block_lines 4 and max_words 0"),
        (("text", "out"), {"bad_lines": "skip"}, "got bad_lines='skip'; expected one of empty, stop"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(
    tmp_path: Path, names: tuple[str, str], options: dict[str, Any], message: str
) -> None:
    write_text(tmp_path / "text", PAIRS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidInputError, match=message):
        run(tmp_path / names[0], tmp_path / names[1], **options)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for lines in (1_000, 1_000, 6_000):  # once to warm up
        source = write_text(tmp_path / "text", [("das ist ein Haus .", "this is a house .")] * lines)
        tracemalloc.start()
        extract(source, None, align, tmp_path / "out", block_lines=100, overwrite=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 50_000  # 10 bytes a line more: fewer than a line has


def test_bar_is_on_standard_error_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_text(tmp_path / "text", PAIRS)
    run(source, tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    run(source, tmp_path / "out", progress=True, report=None)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"/{len(PAIRS)}.0 " in err
    assert "workers" not in err  # there is one process
    bad = [f"{source}, line {number}: " in err for number in range(1, len(PAIRS) + 1)]
    assert bad == [not line for line in expected(PAIRS).splitlines()]


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


@pytest.mark.parametrize("size", [1, 3, 5, 10, 11])
def test_bad_lines_are_reported_in_order_and_become_empty_lines(size: int) -> None:
    aligner = BlockAligner(diagonal, PHARAOH, 3, stop=False)
    blocks = list(cut([io.BytesIO(b"\n".join(LINES))], size))
    assert [block.first for block in blocks] == list(range(1, 11, size))
    records = [aligner(block) for block in blocks]
    told = [message for record in records for message in record.messages]
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
        aligner(first)
    with pytest.raises(InvalidInputError, match="<stream>, line 3: got no word"):
        aligner(second)


def test_messages_name_the_file_of_the_side() -> None:
    streams = io.BytesIO(b"a\na\na b\na\nrefused\n"), io.BytesIO(b"\n\xff\nx\nx y\nx\n")
    for stream, name in zip(streams, ("text.de", "text.en"), strict=True):
        stream.name = name
    (block,) = cut(streams, 9)
    record = BlockAligner(diagonal, PHARAOH, 1, stop=False)(block)
    assert record.content == b"\n" * 5
    assert [message.split(": got")[0] for message in record.messages[:4]] == [
        "text.en, line 1",
        "text.en, line 2",
        "text.de, line 3",
        "text.en, line 4",
    ]
    assert record.messages[4] == "text.de, line 5: refused by the model"


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

    (block,) = cut([io.BytesIO(b"a |||\n||| b\n\n|||\n")], 4)
    record = BlockAligner(never, PHARAOH, 3, stop=False)(block)
    assert (record.content, len(record.messages)) == (b"\n\n\n\n", 2)  # a line without both sides is blank, not bad
    (block,) = cut([io.BytesIO(b"\n \n"), io.BytesIO(b"\n\t\n")], 2)
    assert BlockAligner(never, PHARAOH, 3, stop=True)(block).content == b"\n\n"


def test_aligner_that_loses_a_pair_is_caught() -> None:
    (block,) = cut([io.BytesIO(b"a ||| b\nc ||| d\n")], 2)
    with pytest.raises(ValueError, match="zip"):
        BlockAligner(lambda pairs: diagonal(pairs)[:1], PHARAOH, 3, stop=False)(block)


def test_counts_say_what_they_are() -> None:
    assert str(COUNTS) == (
        "10 lines, 3 links; 8 bad lines: 3 unreadable, 2 with an empty side, 2 too long, 1 refused by the aligner"
    )
    assert str(ExtractionCounts(lines=1000, links=2000)) == "1,000 lines, 2,000 links; 0 bad lines"
