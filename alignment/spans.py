"""Projects spans of source words onto target words by their links: tags, terms, placeholders."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from alignment.links import Alignment
from captum_norm import InvalidInputError

Span = tuple[int, int]
"""The first word of a span and the one after its last; equal for a place between two words."""

SENTENCE = -1
"""The parent of spans that only the sentence encloses."""


@dataclass(frozen=True, slots=True)
class NestedSpan:
    """A span of source words in a tree of spans.

    Attributes:
        start: its first word.
        end: the word after its last; ``start`` for a place between two words.
        parent: the index of the span that encloses it, or :data:`SENTENCE`.
        beside: the neighbour that it stays beside if it becomes a place; None for neither.
    """

    start: int
    end: int
    parent: int = SENTENCE
    beside: Literal["left", "right"] | None = None


def project_spans(
    spans: Sequence[Span], links: Alignment, source: Sequence[object], target: Sequence[object]
) -> list[Span]:
    """Project spans of source words onto the target: each goes to the words that the fewest links cross.

    A link crosses a span if it leads from inside to outside. Of several such target spans the longest is taken; it
    begins and ends with linked words. A span that holds all words of its parent (the span around it, or the sentence)
    is projected onto all words of that parent's target span.

    Spans that are nested are projected onto nested spans, and disjoint ones onto disjoint ones: where links mix the
    words of two, each gets the part that the fewest links cross. A span whose words have no links there becomes a place
    between two words. Places are projected to where the fewest links lead from one side to the other.

    Args:
        spans: the spans, disjoint or nested; of equal ones, the first encloses the others.
        links: the alignment of the sentence pair.
        source: the source words.
        target: the target words.

    Returns:
        The target span of each source span; its ends are equal if it holds no word.

    Raises:
        InvalidInputError: a span is not within the source or overlaps with another one, or a link is not between words.

    >>> source = "Die Bundesregierung sagte dazu nichts".split()
    >>> target = "The federal government said nothing".split()
    >>> project_spans([(0, 2), (3, 4)], Alignment([(0, 0), (1, 1), (1, 2), (2, 3), (4, 4)]), source, target)
    [(0, 3), (4, 4)]
    """
    order = sorted(range(len(spans)), key=lambda index: (spans[index][0], -spans[index][1], index))
    nested: list[NestedSpan] = []
    around: list[int] = []  # indices in ``nested``, the innermost last
    for start, end in (spans[index] for index in order):
        if not 0 <= start <= end <= len(source):
            raise InvalidInputError(f"got the span {(start, end)}, expected one within the {len(source)} source words")
        while around and nested[around[-1]].end <= start:
            around.pop()
        # A place at the start of a span is before it.
        parent = next((index for index in reversed(around) if start < end or nested[index].start < start), SENTENCE)
        if parent != SENTENCE and nested[parent].end < end:
            found = f"got the spans {(nested[parent].start, nested[parent].end)} and {(start, end)}"
            raise InvalidInputError(f"{found}, which overlap; expected disjoint or nested ones")
        if start < end:
            around.append(len(nested))
        nested.append(NestedSpan(start, end, parent))
    projected = dict(zip(order, project_nested(nested, links, source, target), strict=True))
    return [projected[index] for index in range(len(spans))]


def project_nested(
    spans: Sequence[NestedSpan], links: Alignment, source: Sequence[object], target: Sequence[object]
) -> list[Span]:
    """Project a tree of spans by the rule of :func:`alignment.project_spans`.

    A place at an edge of its parent stays at that edge, and one beside a word goes to that word's translation.

    Args:
        spans: the spans, each after its parent; those with the same parent are disjoint and in order.
        links: the alignment of the sentence pair.
        source: the source words.
        target: the target words.

    Raises:
        InvalidInputError: a link is not between words.
    """
    linked: list[list[int]] = [[] for _ in target]
    for left, right in links:
        if left >= len(source) or right >= len(target):
            found = f"got the link {left}-{right} of {len(source)} source and {len(target)} target words"
            raise InvalidInputError(f"{found}; expected links between words, counted from 0")
        linked[right].append(left)
    children: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        children.setdefault(span.parent, []).append(index)
    projected: dict[int, Span] = {SENTENCE: (0, len(target))}
    for parent in (SENTENCE, *range(len(spans))):
        if parent in children:
            own = NestedSpan(0, len(source)) if parent == SENTENCE else spans[parent]
            family = _Family(own, [spans[index] for index in children[parent]], projected[parent], linked)
            projected.update(zip(children[parent], family.project(), strict=True))
    return [projected[index] for index in range(len(spans))]


@dataclass(frozen=True)
class _Family:
    """The spans that have the same parent.

    Attributes:
        parent: their parent.
        spans: the spans.
        room: the target words of the parent.
        linked: the source words that each target word is linked to.
    """

    parent: NestedSpan
    spans: Sequence[NestedSpan]
    room: Span
    linked: Sequence[Sequence[int]]

    def project(self) -> list[Span]:
        """Choose target spans for all of them, which are disjoint."""
        gains = [self._gains(span) for span in self.spans]
        # A word with more links into a span than elsewhere is held by no other span.
        owned = [{word for word, gain in gain_of.items() if gain > 0} for gain_of in gains]
        owners = {word: index for index, words in enumerate(owned) for word in words}
        found: dict[int, Span] = {}
        for index, span in enumerate(self.spans):
            if span.start < span.end and (span.start, span.end) == (self.parent.start, self.parent.end):
                found[index] = self.room
            elif owned[index]:
                barred = {word for word, owner in owners.items() if owner != index}
                found[index] = self._best(gains[index], owned[index], barred)
        taken = {word for held in found.values() for word in range(*held)}
        for index, span in enumerate(self.spans):
            if index not in found:
                linked = {word for word in gains[index] if word not in taken and self._inside(word, span)}
                if linked:
                    found[index] = self._best(gains[index], linked, taken)
                    taken.update(range(*found[index]))
        closed = {place for start, end in found.values() for place in range(start + 1, end)}
        for index, span in enumerate(self.spans):
            if index not in found:
                found[index] = self._place(span, closed)
        return [found[index] for index in range(len(self.spans))]

    def _inside(self, word: int, span: NestedSpan) -> int:
        """The number of links between a target word and a span."""
        return sum(span.start <= source < span.end for source in self.linked[word])

    def _gains(self, span: NestedSpan) -> dict[int, int]:
        """For each linked target word, how many fewer links cross the span if its projection holds the word."""
        words = [word for word in range(*self.room) if self.linked[word]] if span.start < span.end else []
        return {word: 2 * self._inside(word, span) - len(self.linked[word]) for word in words}

    def _best(self, gains: Mapping[int, int], edges: Container[int], barred: Container[int]) -> Span:
        """The target span between two edges, without barred words, that the fewest links cross; the longest of these.

        It is the interval of maximal sum, found in one pass.
        """
        best = (-math.inf, 0, 0)  # its gain, its length, its end
        start, before, total = 0, math.inf, 0
        for word in range(*self.room):
            if word in barred:
                before = math.inf
            if word in edges and total < before:
                start, before = word, total
            total += gains.get(word, 0)
            if word in edges:
                best = max(best, (total - before, word + 1 - start, -word))
        _, length, end = best
        return 1 - end - length, 1 - end

    def _place(self, span: NestedSpan, closed: Container[int]) -> Span:
        """The place, none of the closed ones, that keeps the most links on their side."""
        first, last = self.room
        if span.start == self.parent.start:
            return first, first
        if span.end == self.parent.end:
            return last, last
        neighbour = span.start - 1 if span.beside == "left" else span.end
        linked = [word for word in range(first, last) if neighbour in self.linked[word]] if span.beside else []
        wanted = None if not linked else linked[-1] + 1 if span.beside == "left" else linked[0]
        share = (span.start - self.parent.start) / (self.parent.end - self.parent.start)
        crossing = 0
        best = (True, 0, math.inf, first)
        for place in range(first, last + 1):
            if place > first:
                crossing += sum(1 if source >= span.start else -1 for source in self.linked[place - 1])
            if place not in closed:
                best = min(best, (place != wanted, crossing, abs(place - first - share * (last - first)), place))
        return best[-1], best[-1]
