"""Gold alignments in each notation, from either base and in either orientation."""

import io
from typing import Literal, get_args

import pytest

from alignment import Alignment, GoldAlignment, read_gold
from alignment.formats import GoldFormat
from alignment.formats.gold import scan_gold
from captum_norm import InvalidInputError
from tests.fuzzing import bounded, limited

# Three sentence pairs, the second without links; sure 0-0 and 1-2, possible 2-1, then sure 3-0.
SOURCES = ["a b c", "a", "a b c d"]
TARGETS = ["x y z", "x", "x"]
GOLD = [
    GoldAlignment(Alignment([(0, 0), (1, 2)]), Alignment([(2, 1)])),
    GoldAlignment(Alignment()),
    GoldAlignment(Alignment([(3, 0)])),
]

FILES: list[tuple[GoldFormat, Literal[0, 1] | None, str]] = [
    ("talp", 0, "0-0 2p1 1-2\n\n3-0\n"),
    ("talp", 1, "1-1 3p2 2-3\n\n4-1"),
    ("alibi", None, "s1\t0-0 2p1 1-2\ns2\t\ns3 3-0\n"),
    ("alibi", 1, "1\t1-1 3p2 2-3\n2\n3\t4-1\n"),
    ("naacl", None, "0001 1 1 S\n0001 3 2 P 0.7\n0003 4 1\n0001 2 3 S 1.0\n"),
    ("naacl", None, "1 1 1 P\n3 4 1 S\n1 1 1 S\n1 3 2 P\n1 2 3 0.5\n"),
    ("naacl", 0, "0 0 0\n0 2 1 P\n0 1 2\n2 3 0\n"),
    ("tsv", None, "a b c\tx y z\t0-0 2p1 1-2\na\tx\t\na b c d\tx\t3-0\t\t\n"),
    ("tsv", 1, "a b c\tx y z\t1-1 3p2 2-3\na\tx\t\na b c d\tx\t4-1\n"),
]


@pytest.mark.parametrize(("format", "base", "content"), FILES)
def test_notations_say_the_same(format: GoldFormat, base: Literal[0, 1] | None, content: str) -> None:  # noqa: A002
    plain = read_gold(io.StringIO(content), format=format, base=base)
    checked = read_gold(io.StringIO(content), format=format, base=base, sources=SOURCES, targets=TARGETS)
    swapped = read_gold(
        io.BytesIO(content.encode()), format=format, base=base, swapped=True, sources=TARGETS, targets=SOURCES
    )
    assert plain == checked == GOLD
    assert swapped == [gold.transposed() for gold in GOLD]


def test_sentences_without_a_naacl_line_are_there_if_the_texts_say_so() -> None:
    content = "2 1 1 P\n"
    gold = [GoldAlignment(Alignment()), GoldAlignment(Alignment(), Alignment([(0, 0)]))]
    assert read_gold(io.StringIO(content), format="naacl") == gold
    padded = read_gold(io.StringIO(content), format="naacl", targets=["x", "x", "x"])
    assert padded == [*gold, GoldAlignment(Alignment())]


def test_a_naacl_file_takes_memory_by_its_lines_not_by_their_numbers() -> None:
    found = "line 1: got sentence number 999999999, but lines for only 2 sentences; if that is right"
    with limited(), bounded(50):
        with pytest.raises(InvalidInputError, match=found):
            read_gold(io.StringIO("999999999 1 1\n1 1 1\n"), format="naacl")
        gold = read_gold(io.StringIO("1000000 1 1\n"), format="naacl")
    assert len(gold) == 1_000_000
    assert gold[-1].sure == Alignment([(0, 0)])
    assert not any(pair.possible for pair in gold[:-1])


def test_tsv_has_the_sentences_that_its_links_are_checked_against() -> None:
    content = "a b\tx\t0-0 1p0\n\ufeffa\tx y\t0-1\n"
    gold = [GoldAlignment(Alignment([(0, 0)]), Alignment([(1, 0)])), GoldAlignment(Alignment([(0, 1)]))]
    assert scan_gold(io.StringIO(content), format="tsv") == (gold, ["a b", "\ufeffa"], ["x", "x y"])
    exchanged = scan_gold(io.StringIO(content), format="tsv", swapped=True)
    assert exchanged == ([pair.transposed() for pair in gold], ["x", "x y"], ["a b", "\ufeffa"])
    with pytest.raises(InvalidInputError, match="line 1: got target index 1, expected 0 to 0, counted from 0"):
        read_gold(io.StringIO("a b\tx\t1-1\n"), format="tsv")
    with pytest.raises(InvalidInputError, match="line 1: got source index 1, expected 0 to 0, counted from 0"):
        read_gold(io.StringIO("x\ta b\t1-1\n"), format="tsv", swapped=False)
    with pytest.raises(InvalidInputError, match="line 1: got target index 0, expected none, since there is no word"):
        read_gold(io.StringIO("a\t\t0-0\n"), format="tsv")
    # Sentences that are given go first.
    assert read_gold(io.StringIO(content), format="tsv", sources=["a b", "a"], targets=["x", "x y"]) == gold


MALFORMED: list[tuple[GoldFormat, Literal[0, 1] | None, str, str]] = [
    ("talp", 0, "0-0\n0:0\n", "line 2: got '0:0', expected i-j"),
    ("talp", None, "0-0\n", "gold.txt: talp files count from 0 or from 1; give base=0 or base=1"),
    ("talp", 1, "1-1\n1-0\n\n", "line 2: got target index 0, expected at least 1"),
    ("talp", 0, "0-0 3p1\n\n3-0\n", "line 1: got source index 3, expected 0 to 2"),
    ("talp", 1, "1-4\n\n4-1\n", "line 1: got target index 4, expected 1 to 3"),
    ("talp", 0, "0-0\n\n", "got 2 alignments, expected 3, as many as source sentences"),
    ("talp", 0, "0-0\n\n\n\n", "got 4 alignments, expected 3"),
    ("alibi", None, "1 0-0\n1 0-0\n", "line 2: got the sentence id '1' again"),
    ("alibi", None, "0-0 1-1\n", "line 1: got '0-0', expected a sentence id"),
    ("alibi", None, "1 0-0\n\n", "line 2: got '', expected a sentence id"),
    ("naacl", None, "1 1 1 S\n1 1\n", "line 2: got '1 1', expected: sentence i j"),
    ("naacl", None, "1 1 1 Q\n", "line 1: got '1 1 1 Q'"),
    ("naacl", None, "0 1 1\n", "line 1: got sentence number 0, expected at least 1"),
    ("naacl", None, "1 0 1\n", "line 1: got source index 0, expected at least 1"),
    ("naacl", None, "1 1 1\n3 2 1\n3 5 1\n", "line 3: got source index 5, expected 1 to 4"),
    ("naacl", None, "4 1 1\n", "line 1: got sentence number 4, expected 1 to 3 for 3 sentences"),
    ("naacl", None, "999999999 1 1\n", "line 1: got sentence number 999999999, expected 1 to 3"),
    ("tsv", None, "a b c\tx y z\t0-0\na\tx\n", "line 2: got 2 columns, expected source TAB target TAB links"),
    ("tsv", None, "a b c\tx y z\t0-0\t\t1-1\n", "line 1: got 5 columns"),
    ("tsv", None, "a b c\tx y z\t3-0\na\tx\t\na\tx\t\n", "line 1: got source index 3, expected 0 to 2"),
]


@pytest.mark.parametrize(("format", "base", "content", "message"), MALFORMED)
def test_errors_name_file_and_line(
    format: GoldFormat,  # noqa: A002
    base: Literal[0, 1] | None,
    content: str,
    message: str,
) -> None:
    stream = io.StringIO(content)
    stream.name = "gold.txt"
    with pytest.raises(InvalidInputError) as raised:
        read_gold(stream, format=format, base=base, sources=SOURCES, targets=TARGETS)
    assert str(raised.value).startswith("gold.txt")
    assert message in str(raised.value)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=f"expected one of {', '.join(get_args(GoldFormat))}"):
        read_gold(io.StringIO(), format="giza")  # type: ignore[arg-type] # the point of the test
