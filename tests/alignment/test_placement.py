"""The sentences with tags of ``benchmarks.placement``, and where the shipped models' links put their tags."""

from statistics import fmean

import pytest

from alignment import Alignment
from benchmarks.placement import places, read_pairs, results, shipped

PAIRS = list(read_pairs())


def test_both_sides_have_the_same_tags() -> None:
    assert len(PAIRS) > 150
    for pair in PAIRS:
        assert places(pair.sides[0]).keys() == places(pair.sides[1]).keys()
        assert all(len(words) > 2 for words in pair.words)


def test_gold_links_put_tags_where_they_are() -> None:
    pair = next(pair for pair in PAIRS if pair.sides[0].text == "Je ne connais pas cet homme.")
    links = Alignment([(0, 0), (1, 2), (3, 2), (2, 3), (4, 4), (5, 5), (6, 6)])
    assert [results(pair, links, 1, split=split) for split in (False, True)] == [[True], [True]]
    assert results(pair, Alignment([(1, 2)]), 1, split=True) == [False]
    # A tag that occurs twice has no single place on the other side.
    assert results(pair, links, 0, split=False) == []


@pytest.mark.long
def test_shipped_models_put_most_tags_in_their_place() -> None:
    for _, links in shipped(PAIRS):
        right = [
            value
            for pair, alignment in zip(PAIRS, links, strict=True)
            for side in (0, 1)
            for value in results(pair, alignment, side, split=False)
        ]
        assert len(right) > 400
        assert fmean(right) > 0.88
