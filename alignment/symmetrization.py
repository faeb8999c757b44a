"""Merges the alignments of both translation directions into one, as Moses' ``symal`` does.

``forward`` is the alignment by the model that translates the source into the target, ``reverse`` that by the opposite
model, transposed back: both hold (source index, target index) links. Their order matters only in grow-diag-final and
grow-diag-final-and, which add forward's remaining links before reverse's.

The heuristics are those of Koehn, Och & Marcu 2003 and Koehn et al. 2005; links are visited in the order of ``symal``,
on which the result depends.
"""

from collections.abc import Callable, Iterable, Mapping, Set
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

COMBINATIONS = (*MAP_COMBINATIONS, "mutual", *SYMMETRIZATIONS)
"""How :class:`alignment.BidirectionalAligner` combines the directions: their maps, probabilities or links."""


class _Points:
    """The points of the alignment, and the words that they cover."""

    def __init__(self, links: Iterable[Link]) -> None:
        self.taken = {(target, source) for source, target in links}
        self.targets = {target for target, _ in self.taken}
        self.sources = {source for _, source in self.taken}

    def uncovered(self, point: Link) -> int:
        """How many of the point's two words have no link yet."""
        return (point[0] not in self.targets) + (point[1] not in self.sources)

    def take(self, point: Link) -> None:
        self.taken.add(point)
        self.targets.add(point[0])
        self.sources.add(point[1])


def _grown(
    forward: Alignment, reverse: Alignment, neighbours: Iterable[Link], uncovered: int | None = None
) -> Alignment:
    """Grow the intersection by neighbours, then add remaining links with at least ``uncovered`` unlinked words."""
    points = _Points(forward.links & reverse.links)
    candidates = {(target, source) for source, target in forward.links ^ reverse.links}
    while _grow_once(points, candidates, neighbours):
        pass
    if uncovered is not None:
        for directed in (forward, reverse):
            for point in sorted((target, source) for source, target in directed.links):
                if points.uncovered(point) >= uncovered:
                    points.take(point)
    return Alignment([(source, target) for target, source in points.taken])


def _grow_once(points: _Points, candidates: Set[Link], neighbours: Iterable[Link]) -> bool:
    """Visit every point once in ascending order, including new ones that lie ahead; return whether any was added."""
    ahead = sorted(points.taken)
    before = len(ahead)
    while ahead:
        point = heappop(ahead)
        for down, right in neighbours:
            neighbour = (point[0] + down, point[1] + right)
            if neighbour in candidates and points.uncovered(neighbour):
                points.take(neighbour)
                if neighbour > point:
                    heappush(ahead, neighbour)
    return len(points.taken) > before
