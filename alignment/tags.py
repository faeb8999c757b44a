"""Transfers tags to a translation: spans projected by links, and the tags written around what they lead to."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import sub
from typing import Literal, NamedTuple

from alignment.links import Alignment
from alignment.markup import CHARACTER, SENTENCE, Element, Markup, Span, TextWord, check_plain, element_runs, word_runs
from captum_norm import InvalidInputError

_ID = re.compile(r"""\sid\s*=\s*(["'])(?P<id>.*?)\1""", re.DOTALL)
_ORIGINAL = re.compile(r"\s(?:dataRefStart|copyOf)\s*=")


@dataclass(frozen=True, slots=True)
class NestedSpan:
    """A span of source words in a tree of spans."""

    start: int
    end: int  # the word after its last; ``start`` for a place between two words
    parent: int = SENTENCE  # the index of the span that encloses it
    beside: Literal["left", "right"] | None = None  # the neighbour that it stays beside if it becomes a place
    split: bool = False  # whether it may become several spans; it is no parent then


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
            message = f"got the spans {(nested[parent].start, nested[parent].end)} and {(start, end)}"
            raise InvalidInputError(f"{message}, which overlap; expected disjoint or nested ones")
        if start < end:
            around.append(len(nested))
        nested.append(NestedSpan(start, end, parent))
    _check_links(links, source, target)
    projected = dict(zip(order, project_nested(nested, links, source, target), strict=True))
    return [projected[index][0] for index in range(len(spans))]


def project_nested(
    spans: Sequence[NestedSpan],
    links: Alignment,
    source: Sequence[object],
    target: Sequence[object],
    known: Sequence[Span] = (),
) -> list[Sequence[Span]]:
    """Project a tree of spans, each after its parent; ``known`` are the targets of the first, all in the sentence."""
    # A place at an edge of its parent stays at that edge; one beside a word goes to that word's translation.
    linked: list[list[int]] = [[] for _ in target]
    for left, right in links:
        linked[right].append(left)
    children: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        children.setdefault(span.parent, []).append(index)
    projected: dict[int, Sequence[Span]] = {index: [span] for index, span in enumerate(known)}
    projected[SENTENCE] = [(0, len(target))]
    for parent in (*(() if known else (SENTENCE,)), *range(len(spans))):
        if parent in children:
            enclosing = NestedSpan(0, len(source)) if parent == SENTENCE else spans[parent]
            siblings = [spans[index] for index in children[parent]]
            targets = _project_siblings(enclosing, siblings, projected[parent][0], linked)
            projected.update(zip(children[parent], targets, strict=True))
    return [projected[index] for index in range(len(spans))]


def _check_links(links: Alignment, source: Sequence[object], target: Sequence[object]) -> None:
    for left, right in links:
        if left >= len(source) or right >= len(target):
            message = f"got the link {left}-{right} of {len(source)} source and {len(target)} target words"
            raise InvalidInputError(f"{message}; expected links between words, counted from 0")


def _project_siblings(
    parent: NestedSpan, spans: Sequence[NestedSpan], room: Span, linked: Sequence[Sequence[int]]
) -> list[Sequence[Span]]:
    """Choose disjoint target spans, within that of their parent, for the spans that have the same parent."""

    def inside(word: int, span: NestedSpan) -> int:
        """The number of links between a target word and a span."""
        return sum(span.start <= source < span.end for source in linked[word])

    # For each linked target word, how many fewer links cross a span if its projection holds the word.
    words = [word for word in range(*room) if linked[word]]
    gains = [
        {word: 2 * inside(word, span) - len(linked[word]) for word in words} if span.start < span.end else {}
        for span in spans
    ]
    # A word with more links into a span than elsewhere is held by no other span.
    held = [{word for word, gain in gain_of.items() if gain > 0} for gain_of in gains]
    holders = {word: index for index, words_of_span in enumerate(held) for word in words_of_span}
    projected: dict[int, Sequence[Span]] = {}
    for index, span in enumerate(spans):
        if span.start < span.end and (span.start, span.end) == (parent.start, parent.end):
            projected[index] = [room]
        elif held[index] and span.split:
            runs = groupby(filter(gains[index].get, words), held[index].__contains__)
            pieces = [list(run) for inside, run in runs if inside]
            projected[index] = [(piece[0], piece[-1] + 1) for piece in pieces]
        elif held[index]:
            barred = {word for word, holder in holders.items() if holder != index}
            projected[index] = [_best_span(room, gains[index], held[index], barred)]
    taken = {word for targets in projected.values() for target in targets for word in range(*target)}
    for index, span in enumerate(spans):
        if index not in projected:
            edges = {word for word in gains[index] if word not in taken and inside(word, span)}
            if edges:
                projected[index] = [_best_span(room, gains[index], edges, taken)]
                taken.update(range(*projected[index][0]))
    closed = {place for targets in projected.values() for start, end in targets for place in range(start + 1, end)}
    return [
        projected[index] if index in projected else [_best_place(parent, span, room, linked, closed)]
        for index, span in enumerate(spans)
    ]


def _best_span(room: Span, gains: Mapping[int, int], edges: Container[int], barred: Container[int]) -> Span:
    """The longest target span between two edges, without barred words, that the fewest links cross."""
    best = (-math.inf, 0, 0)  # its gain, its length, its end
    start, before, total = 0, math.inf, 0
    for word in range(*room):
        if word in barred:
            before = math.inf
        if word in edges and total < before:
            start, before = word, total
        total += gains.get(word, 0)
        if word in edges:
            best = max(best, (total - before, word + 1 - start, -word))
    _, length, end = best
    return 1 - end - length, 1 - end


def _best_place(
    parent: NestedSpan, span: NestedSpan, room: Span, linked: Sequence[Sequence[int]], closed: Container[int]
) -> Span:
    """The place, none of the closed ones, that keeps the most links on their side."""
    first, last = room
    if span.start == parent.start:
        return first, first
    if span.end == parent.end:
        return last, last
    neighbour = span.start - 1 if span.beside == "left" else span.end
    words = [word for word in range(first, last) if neighbour in linked[word]] if span.beside else []
    preferred = None if not words else words[-1] + 1 if span.beside == "left" else words[0]
    share = (span.start - parent.start) / (parent.end - parent.start)
    crossing = 0
    best = (True, 0, math.inf, first)
    for place in range(first, last + 1):
        if place > first:
            crossing += sum(1 if source >= span.start else -1 for source in linked[place - 1])
        if place not in closed:
            best = min(best, (place != preferred, crossing, abs(place - first - share * (last - first)), place))
    return best[-1], best[-1]


def transfer_tags(
    source: Markup,
    target: str,
    links: Alignment,
    source_words: Sequence[TextWord],
    target_words: Sequence[TextWord],
    *,
    cuts: Sequence[int] | None = None,
    split: bool = False,
) -> str:
    """Insert the tags of a source sentence into its translation: each once, nested as in the source.

    A pair of tags goes around the words that the fewest links cross, and a single tag where the fewest links lead from
    one side to the other (:func:`alignment.project_spans`). A pair around all words of its block or of its parent
    stays around all of them; a single tag at an edge of either stays there, and one that touches a word goes beside the
    word that this is linked to. White space between a tag and a word stays between them. A word that a tag splits is
    inside the pair, unless its translation is the same word, which is then split, too.

    Blocks (:data:`alignment.markup.BLOCKS`) keep their order. Each gets a part of the translation, and its tags stay in
    that part; a space that stands for the boundary of two blocks is removed. Where an element's content stays as it is
    (:data:`alignment.markup.KEPT`), it replaces the same words in the translation, or else those that are linked to it
    alone.

    The translation has no tags and is otherwise kept character for character; words are such as
    :func:`~alignment.split_text` finds in ``source.text`` and ``target``.

    Args:
        source: the source sentence.
        target: its translation; several blocks are beside each other in it, divided by white space.
        links: the alignment of the words.
        source_words: the words of ``source.text``.
        target_words: the words of ``target``.
        cuts: the first target word of each block (:meth:`alignment.markup.Markup.blocks`) after the first one. By
            default the translation is cut where the fewest links lead from one block to another.
        split: write a pair around each run of words that belong to it, rather than once. Pairs with others inside are
            written once, and so are those with an id (:attr:`alignment.markup.Element.copyable`). A copy of XLIFF 2's
            ``<pc>`` has an id of its own, and names the first in ``copyOf`` unless original data do.

    Raises:
        InvalidInputError: the target has tags, a link is not between words, or ``cuts`` are not as many places between
            words as there are boundaries between blocks, in order.

    >>> from alignment import parse_markup, split_text
    >>> source = parse_markup("la <b>petite</b> maison<br/>")
    >>> target = "the small house"
    >>> links = Alignment([(0, 0), (1, 1), (2, 2)])
    >>> transfer_tags(source, target, links, split_text(source.text, "fr"), split_text(target, "en"))
    'the <b>small</b> house<br/>'
    """
    check_plain(target, source.syntax)
    _check_links(links, source_words, target_words)
    sources, targets, linked = _refined(source, target, links, source_words, target_words)
    blocks = source.blocks(sources)
    if cuts is None:
        cut = _cut(blocks, linked, targets)
    else:
        places = [0, *cuts, len(target_words)]
        if len(cuts) != max(len(blocks) - 1, 0) or places != sorted(places):
            message = f"got cuts={list(cuts)} of {len(target_words)} target words for {len(blocks)} blocks"
            raise InvalidInputError(f"{message}; expected the first target word of each block but the first, in order")
        starts = [word.start for word in targets]
        cut = [
            bisect_left(starts, target_words[place].start) if place < len(target_words) else len(targets)
            for place in places
        ]
    spans, projected = _projected(source, blocks, cut, linked, sources, targets, split=split)
    return _inserted(source, sources, _pieces(source.elements, spans, projected), target, targets)


_Links = set[tuple[int, int]]


def _refined(
    source: Markup, target: str, links: Alignment, source_words: Sequence[TextWord], target_words: Sequence[TextWord]
) -> tuple[list[TextWord], list[TextWord], _Links]:
    """Words, split where tags may go, and their links; what is kept is linked to the same words."""
    sources, parts = _fragments(source.text, source_words, source.breaks)
    linked = {(part, right) for left, right in links for part in parts[left]}
    starts = [word.start for word in sources]
    kept = [
        (bisect_left(starts, element.start), bisect_left(starts, element.end), element)
        for element in source.elements
        if element.content is not None
    ]
    edges = set[int]()
    for first, last, element in kept:
        beside = source.text[max(element.start - 1, 0) : element.start] + source.text[element.end : element.end + 1]
        content = re.escape(source.text[element.start : element.end].strip())
        pattern = re.compile(content if beside.strip() else rf"(?<!\w){content}(?!\w)")
        for word in {target_words[right] for left, right in linked if first <= left < last}:
            if match := pattern.search(target, word.start, word.end):
                edges.update(match.span())
    targets, parts = _fragments(target, target_words, edges)
    linked = {(left, part) for left, right in linked for part in parts[right]}
    raw = [source.text[word.start : word.end] for word in sources], [target[word.start : word.end] for word in targets]
    taken = set[int]()
    for first, last, _ in kept:
        linked = _kept_links(linked, first, last, *raw, taken)
    # A word that is the same in the translation is split by the same tags.
    numbers = Counter(left for left, _ in linked), Counter(right for _, right in linked)
    same = [
        (sources[left], targets[right])
        for left, right in linked
        if numbers[0][left] == numbers[1][right] == 1 and raw[0][left] == raw[1][right]
    ]
    tags = sorted({place for element in source.elements for place in (element.start, element.end)})
    within = [
        (place, right.start + place - left.start)
        for left, right in same
        for place in tags[bisect_right(tags, left.start) : bisect_left(tags, left.end)]
    ]
    sources, lefts = _fragments(source.text, sources, [place for place, _ in within])
    targets, rights = _fragments(target, targets, [place for _, place in within])
    return sources, targets, {pair for left, right in linked for pair in zip(lefts[left], rights[right], strict=True)}


def _fragments(
    text: str, words: Sequence[TextWord], places: Iterable[int]
) -> tuple[list[TextWord], list[Sequence[int]]]:
    """Words, split at places of their text, and the indices of each one's fragments."""
    ordered = sorted(set(places))
    fragments: list[TextWord] = []
    indices: list[Sequence[int]] = []
    for word in words:
        inside = ordered[bisect_right(ordered, word.start) : bisect_left(ordered, word.end)]
        edges = list(pairwise((word.start, *inside, word.end)))
        indices.append(range(len(fragments), len(fragments) + len(edges)))
        fragments += [TextWord(text[start:end], start, end) for start, end in edges] if inside else [word]
    return fragments, indices


def _kept_links(
    linked: _Links, first: int, last: int, source: Sequence[str], target: Sequence[str], taken: set[int]
) -> _Links:
    """Links in which kept words are linked to the same words, not yet taken, or to those linked to nothing else."""
    number = last - first
    votes = Counter(right for left, right in linked if first <= left < last)
    same = [
        place
        for place in range(len(target) - number + 1 if number else 0)
        if target[place : place + number] == source[first:last] and taken.isdisjoint(range(place, place + number))
    ]
    others = {link for link in linked if not first <= link[0] < last}
    if same:
        expected = first * len(target) / len(source)
        place = max(same, key=lambda place: (sum(votes[place + n] for n in range(number)), -abs(place - expected)))
        taken.update(range(place, place + number))
        others = {link for link in others if not place <= link[1] < place + number}
        return others | {(first + n, place + n) for n in range(number)}
    alone = sorted(votes.keys() - {right for _, right in others})
    runs = [[right for _, right in run] for _, run in groupby(enumerate(alone), lambda item: item[1] - item[0])]
    longest = max(map(set, runs), key=len, default=set[int]())
    return others | {link for link in linked if link[1] in longest}


def _cut(blocks: Sequence[Span], linked: _Links, words: Sequence[TextWord]) -> list[int]:
    """The first target word of each block, and the number of words: the fewest links lead from one block to another."""
    # Of equal cuts, those at white space, before no punctuation mark, and in proportion to the blocks' words.
    count = len(words)
    if len(blocks) < 2:
        return [0, count]
    starts = [start for start, _ in blocks]
    inside = [[0] * (count + 1) for _ in blocks]  # how many links lead from each block to the word before a place
    for left, right in linked:
        inside[bisect_right(starts, left) - 1][right + 1] += 1
    glued = [0, *(2 * (a.end == b.start) + (not any(map(str.isalnum, b))) for a, b in pairwise(words)), 0][: count + 1]
    best = [0.0, *[-math.inf] * count]  # the most links inside of the blocks so far if they end at each place
    chosen: list[list[int]] = []
    for (_, end), numbers in zip(blocks, inside, strict=True):
        sums = list(accumulate(numbers))
        gains = list(map(sub, best, sums))
        chosen.append([last for _, last in accumulate(zip(gains, range(count + 1), strict=True), max)])
        for place, start in enumerate(chosen[-1]):
            distance = abs(place - count * end / blocks[-1][1]) / (count + 1)
            best[place] = gains[start] + sums[place] - (glued[place] + distance) / (4 * len(blocks))
    cut = [count]
    for last in reversed(chosen):
        cut.append(last[cut[-1]])
    return cut[::-1]


def _projected(
    source: Markup,
    blocks: Sequence[Span],
    cut: Sequence[int],
    linked: _Links,
    sources: Sequence[TextWord],
    targets: Sequence[TextWord],
    *,
    split: bool,
) -> tuple[list[NestedSpan], list[Sequence[Span]]]:
    """The words inside of each element in the source, and in the target."""
    starts, ends = [word.start for word in sources], [word.end for word in sources]
    firsts = [first for first, _ in blocks]
    runs = word_runs(source.elements, [sources[first] for first in firsts])
    block_of = {run: index for index, run in enumerate(runs)}
    nested = [NestedSpan(*block) for block in blocks]
    free = dict(enumerate(firsts))  # the first word of each nested span that no child before holds
    spans: list[NestedSpan] = []
    places: list[int | Span] = []  # in the target, or in ``nested``
    parents = {element.parent for element in source.elements}
    for index, (element, run) in enumerate(zip(source.elements, element_runs(source.elements), strict=True)):
        left = source.text[max(element.start - 1, 0) : element.start].strip()
        right = source.text[element.end : element.end + 1].strip()
        beside: Literal["left", "right"] | None = "left" if left else "right" if right else None
        if element.block or run not in block_of:
            start, end = bisect_left(starts, element.start), bisect_left(starts, element.end)
            places.append((cut[bisect_left(firsts, start)], cut[bisect_left(firsts, end)]))
            spans.append(NestedSpan(start, end, beside=beside))
            continue
        around = SENTENCE if element.parent == SENTENCE else places[element.parent]
        parent = around if isinstance(around, int) and around != SENTENCE else block_of[run]
        last = nested[parent].end
        start = min(max(bisect_right(ends, element.start), free[parent]), last)
        end = min(max(bisect_left(starts, element.end), start), last) if element.start < element.end else start
        if element.start == element.end and start < last and starts[start] < element.start:
            start = end = start + 1  # a tag within a word goes behind it
        free[parent], free[len(nested)] = end, start
        places.append(len(nested))
        spans.append(NestedSpan(start, end, parent, beside, split and element.copyable and index not in parents))
        nested.append(spans[-1])
    within = Alignment(
        (left, right)
        for left, right in linked
        if cut[block := bisect_right(firsts, left) - 1] <= right < cut[block + 1]
    )
    projected = project_nested(nested, within, sources, targets, list(pairwise(cut))) if blocks else []
    return spans, [projected[place] if isinstance(place, int) else [place] for place in places]


class _Piece(NamedTuple):
    """An element, or one of several of its kind, and the words inside of it."""

    element: Element
    run: int  # the number of tags of blocks before it
    span: NestedSpan
    projected: Span


def _pieces(
    elements: Sequence[Element], spans: Sequence[NestedSpan], projected: Sequence[Sequence[Span]]
) -> list[_Piece]:
    """All elements, each around the first of its target spans, and copies around the others."""
    runs = element_runs(elements)
    firsts = [first for first, *_ in projected]
    pieces = list(map(_Piece, elements, runs, spans, firsts))
    used = {match["id"] for element in elements for match in _ID.finditer(element.opening)}
    for piece, (_, *others) in zip(pieces[:], projected, strict=True):
        number = 2
        for other in others:
            opening = piece.element.opening
            if match := _ID.search(opening):
                while (identifier := f"{match['id']}-{number}") in used:
                    number += 1
                used.add(identifier)
                base = "" if _ORIGINAL.search(opening) else f' copyOf="{match["id"]}"'
                opening = f'{opening[: match.start()]} id="{identifier}"{base}{opening[match.end() :]}'
            pieces.append(piece._replace(element=replace(piece.element, opening=opening), projected=other))
    return pieces


def _inserted(
    source: Markup, sources: Sequence[TextWord], pieces: Sequence[_Piece], target: str, words: Sequence[TextWord]
) -> str:
    """The target with each element's tags around its words, as far from them as in the source."""
    # A place within a character reference is moved to its start.
    starts = {place: m.start() for m in CHARACTER.finditer(target) for place in range(m.start() + 1, m.end())}
    places: dict[int, Span] = {SENTENCE: (0, len(target))}
    children: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, (element, run, span, around) in enumerate(pieces):
        first, last = places[element.parent]
        pair = _places(source, sources, element, span, around, target, words)
        opening, closing = (min(max(starts.get(place, place), first), last) for place in pair)
        places[index] = opening, max(opening, closing)
        # Blocks keep their order.
        children.setdefault(element.parent, []).append((2 * run + element.block, *places[index], index))
    parts: list[str] = []
    position = 0
    left = [(index, True) for *_, index in sorted(children.get(SENTENCE, ()), reverse=True)]
    while left:
        index, opens = left.pop()
        element, _, span, around = pieces[index]
        place = max(position, places[index][not opens])
        between, position = target[position:place], place
        # What is kept, and not in the translation, is divided from its words by spaces, as in the source.
        added = element.content is not None and span.start < span.end and around[0] == around[1]
        if opens:
            spaced = source.text[max(element.start - 1, 0) : element.start].isspace() and target[:place][-1:].strip()
            parts += between, " " if added and spaced else "", element.opening
            left.append((index, False))
            left += [(child, True) for *_, child in sorted(children.get(index, ()), reverse=True)]
        elif element.content is not None:
            spaced = source.text[element.end : element.end + 1].isspace() and target[place : place + 1].strip()
            parts += element.content, element.closing, " " if added and spaced else ""
        elif element.opening or between != " ":
            parts += between, element.closing
    parts.append(target[position:])
    return "".join(parts if source.syntax == "xml" else _delimited(parts))


def _delimited(parts: Iterable[str]) -> Iterator[str]:
    """Markers of USFM and text, with a space where a marker without one is in front of text."""
    undelimited = False
    for part in filter(None, parts):
        if undelimited and not part.startswith("\\") and not part[0].isspace():
            yield " "
        yield part
        undelimited = part.startswith("\\") and not (part[-1].isspace() or part.endswith("*"))


def _places(
    source: Markup,
    sources: Sequence[TextWord],
    element: Element,
    span: NestedSpan,
    projected: Span,
    target: str,
    words: Sequence[TextWord],
) -> Span:
    """Where the tags of an element go in the target: into white space as far from a word as in the source."""
    first, last = projected

    def gap(place: int, words: Sequence[TextWord], text: str) -> Span:
        """The white space before a word."""
        return words[place - 1].end if place else 0, words[place].start if place < len(words) else len(text)

    start, end = gap(first, words, target)
    if first < last:
        after, before = sources[span.start].start - element.start, element.end - sources[span.end - 1].end
        close, limit = gap(last, words, target)
        return max(start, end - max(after, 0)), min(limit, close + max(before, 0))
    if span.start < span.end:
        place = start if first == len(words) or (first > 0 and span.beside == "left") else end
        return place, place
    left, right = gap(span.start, sources, source.text)
    length = element.end - element.start
    opening = end + element.start - right if span.beside == "right" else start + element.start - left
    return min(max(opening, start), end), min(max(opening + length, start), end)
