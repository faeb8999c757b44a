"""Signs of a wrong base or orientation, and that right alignments bear none."""

import random

import pytest

from alignment import Alignment, GoldAlignment, alignment_error_rate
from alignment.aer import Correction, find_correction, lacks_first_words


def aligned(seed: int, pairs: int = 100) -> list[Alignment]:
    """Sentences of 8 words to 10, a link for each source word at random."""
    draw = random.Random(seed)
    return [Alignment([(source, draw.randrange(10)) for source in range(8)]) for _ in range(pairs)]


def noisy(gold: list[Alignment], seed: int) -> list[Alignment]:
    """Every other link is one of the gold."""
    return [
        Alignment([links if place % 2 else other for place, (links, other) in enumerate(zip(one, two, strict=True))])
        for one, two in zip(gold, aligned(seed), strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_reading_is_found_and_a_right_one_left_alone(seed: int) -> None:
    gold = [Alignment([(i + 1, j + 1) for i, j in links]) for links in aligned(seed)]
    golden = list(map(GoldAlignment, gold))
    system = noisy(gold, seed + 10)
    right = alignment_error_rate(system, golden).aer
    assert find_correction(system, golden) is None
    assert find_correction(aligned(seed + 20), golden) is None  # as bad in every reading
    exchanged = [links.transposed() for links in system]
    less, more = ([Alignment([(i + d, j + d) for i, j in links]) for links in gold] for d in (-1, 1))
    for read, reading, expected in ((exchanged, "swapped", right), (less, "one more", 0.0), (more, "one less", 0.0)):
        found = find_correction(read, golden)
        assert isinstance(found, Correction)
        assert found == (reading, alignment_error_rate(read, golden).aer, expected)
    assert find_correction(exchanged[:20], golden[:20]) is None  # too few to tell


def test_first_words_are_missed_in_many_links_alone() -> None:
    from_1 = [Alignment([(1, 2), (2, 1)])] * 500
    assert lacks_first_words(from_1)
    assert not lacks_first_words(from_1[1:])
    assert not lacks_first_words([*from_1, Alignment([(0, 3)])])
    assert not lacks_first_words([*from_1, Alignment([(3, 0)])])
