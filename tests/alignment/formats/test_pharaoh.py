"""Pharaoh format, line by line and file by file."""

import os
import random
from pathlib import Path

import pytest

from alignment import Alignment, format_pharaoh, parse_pharaoh, read_pharaoh, write_pharaoh
from captum_norm import InvalidInputError
from captum_norm.text.lines import quoted


def test_line_is_written_in_ascending_order() -> None:
    assert format_pharaoh(Alignment([(10, 0), (2, 3), (2, 1)])) == "2-1 2-3 10-0"
    assert format_pharaoh(Alignment()) == ""


def test_line_is_parsed_whatever_its_spaces() -> None:
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
