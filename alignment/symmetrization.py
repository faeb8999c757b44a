"""Merges the alignments of both translation directions into one, as Moses' ``symal`` does.

``forward`` is the alignment by the model that translates the source into the target, ``reverse`` that by the opposite
model, transposed back: both hold (source index, target index) links. Their order matters only in grow-diag-final and
grow-diag-final-and, which add forward's remaining links before reverse's.

The heuristics are those of Koehn, Och & Marcu 2003 and Koehn et al. 2005; links are visited in the order of ``symal``,
on which the result depends: fast_align's ``atools`` has another one, and so other links in some sentences.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

from alignment.links import Alignment, Link

Symmetrization = Callable[[Alignment, Alignment], Alignment]
"""``(forward, reverse) -> symmetrised``."""

# In this module a point is (target, source), the order in which symal sorts.
_ADJACENT = ((-1, 0), (0, -1), (1, 0), (0, 1))
_DIAGONAL = ((-1, -1), (-1, 1), (1, -1), (1, 1))


def intersection(forward: Alignment, reverse: Alignment) -> Alignment:
    """The links that both directions propose.

    >>> intersection(Alignment([(0, 0), (1, 1)]), Alignment([(0, 0), (2, 1)]))
    Alignment([(0, 0)])
    """
    return forward & reverse


def union(forward: Alignment, reverse: Alignment) -> Alignment:
    """The links that either direction proposes.

    >>> union(Alignment([(0, 0), (1, 1)]), Alignment([(0, 0), (2, 1)]))
    Alignment([(0, 0), (1, 1), (2, 1)])
    """
    return forward | reverse


def grow(forward: Alignment, reverse: Alignment) -> Alignment:
    """The intersection, grown link by link by horizontal and vertical neighbours.

    A neighbour is added if it is in the union and its source or target word has no link yet; the neighbours of added
    links follow.

    >>> grow(Alignment([(0, 0), (0, 1)]), Alignment([(0, 0), (1, 2)]))
    Alignment([(0, 0), (0, 1)])
    """
    return _grown(forward, reverse, _ADJACENT)


def grow_diag(forward: Alignment, reverse: Alignment) -> Alignment:
    """Like ``grow``, with diagonal neighbours too.

    >>> grow_diag(Alignment([(0, 0), (0, 1)]), Alignment([(0, 0), (1, 2)]))
    Alignment([(0, 0), (0, 1), (1, 2)])
    """
    return _grown(forward, reverse, _ADJACENT + _DIAGONAL)


def grow_diag_final(forward: Alignment, reverse: Alignment) -> Alignment:
    """``grow_diag``, then every remaining link whose source *or* target word has no link yet.

    >>> grow_diag_final(Alignment([(0, 0), (0, 2)]), Alignment([(0, 0), (3, 5)]))
    Alignment([(0, 0), (0, 2), (3, 5)])
    """
    return _grown(forward, reverse, _ADJACENT + _DIAGONAL, uncovered=1)


def grow_diag_final_and(forward: Alignment, reverse: Alignment) -> Alignment:
    """``grow_diag``, then every remaining link whose source *and* target word have no link yet.

    >>> grow_diag_final_and(Alignment([(0, 0), (0, 2)]), Alignment([(0, 0), (3, 5)]))
    Alignment([(0, 0), (3, 5)])
    """
    return _grown(forward, reverse, _ADJACENT + _DIAGONAL, uncovered=2)


SYMMETRIZATIONS: Mapping[str, Symmetrization] = MappingProxyType(
    {
        "intersection": intersection,
        "union": union,
        "grow": grow,
        "grow-diag": grow_diag,
        "grow-diag-final": grow_diag_final,
        "grow-diag-final-and": grow_diag_final_and,
    }
)
"""Moses' heuristics by Moses' names."""

MAP_COMBINATIONS = ("add", "multiply")
"""The combinations of both directions that make one map of two."""

COMBINATIONS = (*MAP_COMBINATIONS, *SYMMETRIZATIONS)
"""How :class:`alignment.BidirectionalAligner` combines the directions: their maps or links."""


def _grown(
    forward: Alignment, reverse: Alignment, neighbours: Sequence[Link], uncovered: int | None = None
) -> Alignment:
    """Grow the intersection by neighbours, then add remaining links with at least ``uncovered`` unlinked words."""
    candidates = {(target, source) for source, target in forward.links ^ reverse.links}
    points = {(target, source) for source, target in forward.links & reverse.links}
    targets, sources = {target for target, _ in points}, {source for _, source in points}

    def take(point: Link, least: int) -> bool:
        """Add a point if so many of its two words have no link yet."""
        if (point[0] not in targets) + (point[1] not in sources) < least:
            return False
        points.add(point)
        targets.add(point[0])
        sources.add(point[1])
        return True

    count = -1
    while count < len(points):
        # Every point is visited once in ascending order, new ones that lie ahead, too.
        count, ahead = len(points), sorted(points)
        while ahead:
            point = heappop(ahead)
            for down, right in neighbours:
                neighbour = (point[0] + down, point[1] + right)
                if neighbour in candidates and take(neighbour, 1) and neighbour > point:
                    heappush(ahead, neighbour)
    if uncovered is not None:
        for directed in (forward, reverse):
            for point in sorted((target, source) for source, target in directed.links):
                take(point, uncovered)
    return Alignment([(source, target) for target, source in points])
