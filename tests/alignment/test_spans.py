"""Projected spans: brute force agrees about every single one, and trees of them stay trees."""

import random
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

from alignment import Alignment, project_spans
from alignment.tags import NestedSpan, Span, project_nested
from captum_norm import InvalidInputError
from tests.fuzzing import FACTOR

Links = list[tuple[int, int]]


def crossing(span: Span, projected: Span, links: Links) -> int:
    """How many links have one word inside and the other outside."""
    return sum((span[0] <= i < span[1]) != (projected[0] <= j < projected[1]) for i, j in links)


def changing_sides(place: int, projected: int, links: Links) -> int:
    return sum((i < place) != (j < projected) for i, j in links)


def drawn(draw: random.Random, most: int = 8) -> tuple[int, int, Links]:
    """Numbers of source and target words, at least two, and links: some near the diagonal, some anywhere, or none."""
    source, target = draw.randint(2, most), draw.randint(2, most)
    count = draw.choice((0, 1, most, 2 * most))
    links = {(draw.randrange(source), draw.randrange(target)) for _ in range(count)}
    if draw.random() < 0.5:
        links = {(i, min(target - 1, max(0, i + draw.choice((-1, 0, 0, 1))))) for i, _ in links}
    return source, target, sorted(links)


def drawn_spans(draw: random.Random, first: int, last: int, depth: int = 0) -> Iterable[Span]:
    """Spans between two words, disjoint or nested, places included, in random order within each parent."""
    cuts = sorted(draw.choices(range(first, last + 1), k=2 * draw.choice((0, 1, 1, 2, 3))))
    for start, end in zip(cuts[::2], cuts[1::2], strict=True):
        yield start, end
        if start < end and depth < 4:
            yield from drawn_spans(draw, start, end, depth + 1)


@pytest.mark.fuzz
def test_a_single_span_goes_where_the_fewest_links_cross() -> None:
    draw = random.Random(0)
    checked = 0
    for _ in range(200 * FACTOR):
        source, target, links = drawn(draw, most=6)
        for span in combinations(range(source + 1), 2):
            if span == (0, source):
                continue
            [found] = project_spans([span], Alignment(links), range(source), range(target))
            costs = {other: crossing(span, other, links) for other in combinations(range(target + 1), 2)}
            inside = {word: sum(span[0] <= i < span[1] for i, j in links if j == word) for word in range(target)}
            edges = {word for word in inside if 2 * inside[word] > sum(j == word for _, j in links)}
            if edges:
                assert costs[found] == min(costs.values())
            edges = edges or {word for word in inside if inside[word]}
            candidates = [(a, b) for a, b in costs if {a, b - 1} <= edges]
            if candidates:
                assert found == min(candidates, key=lambda other: (costs[other], other[0] - other[1], other))
                checked += 1
            else:
                assert found[0] == found[1]
    assert checked > 500 * FACTOR


@pytest.mark.fuzz
def test_a_single_place_goes_where_the_fewest_links_change_sides() -> None:
    draw = random.Random(1)
    for _ in range(300 * FACTOR):
        source, target, links = drawn(draw)
        for place in range(source + 1):
            [(start, end)] = project_spans([(place, place)], Alignment(links), range(source), range(target))
            assert start == end
            if place in (0, source):
                assert start == (0 if place == 0 else target)
            else:
                least = min(changing_sides(place, other, links) for other in range(target + 1))
                assert changing_sides(place, start, links) == least


def holds(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@pytest.mark.fuzz
def test_trees_stay_trees() -> None:
    draw = random.Random(2)
    pairs = 0
    for _ in range(1000 * FACTOR):
        source, target, links = drawn(draw, most=draw.choice((3, 8, 20)))
        spans = list(drawn_spans(draw, 0, source))
        projected = project_spans(spans, Alignment(links), range(source), range(target))
        assert all(0 <= start <= end <= target for start, end in projected)
        for (one, place), (other, other_place) in combinations(zip(spans, projected, strict=True), 2):
            if one[1] <= other[0] or other[1] <= one[0]:  # disjoint, or one a place at the other's edge
                assert place[1] <= other_place[0] or other_place[1] <= place[0]
            elif holds(one, other):  # the first of equal ones is the outer one
                assert holds(place, other_place)
            else:
                assert holds(other, one)
                assert holds(other_place, place)
            pairs += 1
    assert pairs > 1000 * FACTOR


ROWS: list[tuple[str, Sequence[Span], Links, tuple[int, int], Sequence[Span]]] = [
    ("words in another order", [(0, 1), (1, 2)], [(0, 1), (1, 0)], (2, 2), [(1, 2), (0, 1)]),
    ("one wrong link far away", [(0, 3)], [(0, 0), (1, 1), (2, 2), (0, 6), (3, 3), (4, 4), (5, 5)], (6, 7), [(0, 3)]),
    ("a word between, as in ne mange pas", [(0, 1)], [(0, 0), (0, 2), (1, 1)], (2, 3), [(0, 3)]),
    ("the same, and that word in a span, too", [(0, 1), (1, 2)], [(0, 0), (0, 2), (1, 1)], (3, 3), [(0, 1), (1, 2)]),
    ("two spans of one word, as in du", [(0, 1), (1, 2)], [(0, 0), (1, 0)], (3, 2), [(0, 1), (1, 1)]),
    ("a span whose only word belongs rather elsewhere", [(1, 2)], [(0, 0), (1, 0), (2, 0)], (4, 2), [(0, 1)]),
    ("a place at the edge of one", [(1, 1), (1, 3)], [(0, 0), (1, 0), (0, 2), (2, 2)], (4, 3), [(0, 0), (0, 3)]),
    ("an unlinked word inside", [(0, 2)], [(0, 0), (1, 2), (2, 3)], (3, 4), [(0, 3)]),
    ("unlinked words at the edges", [(1, 2)], [(0, 0), (1, 2), (2, 4)], (3, 5), [(2, 3)]),
    ("the whole sentence", [(0, 2), (0, 2)], [(0, 1)], (2, 3), [(0, 3), (0, 3)]),
    ("no links", [(1, 2), (0, 1), (2, 3)], [], (3, 6), [(2, 2), (0, 0), (6, 6)]),
    ("no target words", [(0, 1), (1, 1)], [], (2, 0), [(0, 0), (0, 0)]),
    ("no source words", [(0, 0)], [], (0, 2), [(0, 0)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "links", "words", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_cases(spans: Sequence[Span], links: Links, words: tuple[int, int], expected: Sequence[Span]) -> None:
    assert project_spans(spans, Alignment(links), range(words[0]), range(words[1])) == expected


def test_a_place_beside_a_word_goes_with_it() -> None:
    links = Alignment([(0, 2), (1, 3), (2, 1), (3, 0)])
    found = {
        beside: project_nested([NestedSpan(2, 2, beside=beside)], links, range(4), range(4))
        for beside in ("left", "right", None)
    }
    assert found == {"left": [(4, 4)], "right": [(1, 1)], None: [(0, 0)]}


@pytest.mark.parametrize(
    ("spans", "links", "message"),
    [
        ([(0, 2), (1, 3)], [], r"got the spans \(0, 2\) and \(1, 3\), which overlap; expected disjoint or nested ones"),
        ([(0, 4)], [], r"got the span \(0, 4\), expected one within the 3 source words"),
        ([(2, 1)], [], r"got the span \(2, 1\)"),
        ([(-1, 1)], [], r"got the span \(-1, 1\)"),
        ([], [(3, 0)], "got the link 3-0 of 3 source and 2 target words; expected links between words"),
        ([], [(0, 2)], "got the link 0-2 of 3 source and 2 target words"),
    ],
)
def test_what_is_refused(spans: Sequence[Span], links: Links, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        project_spans(spans, Alignment(links), range(3), range(2))
