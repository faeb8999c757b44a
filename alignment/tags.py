"""Transfers inline tags of XML and HTML to a translation: words of raw text, spans projected by links, markup."""

import html
import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from alignment.links import Alignment
from captum_norm import InvalidInputError
from captum_norm.checks import quoted

_Kind = Literal["letter", "ideograph", "sign", "space"]

_CHARACTER = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});|.", re.DOTALL)
_APOSTROPHES = "'\u2019"
_JOINING = f"{_APOSTROPHES}-\u2010\u2011._\u00b7"
# Han, and the two kana.
_IDEOGRAPH = re.compile(
    "[\u3005\u3006\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_ELIDING = ("fr", "it", "ca")


class TextWord(str):
    """A word of a text, with HTML's character references resolved.

    Attributes:
        start: the place of its first character in the text.
        end: the place after its last character.

    >>> word = TextWord("AT&T", 4, 12)  # of "the AT&amp;T"
    >>> word, word.start, word.end
    ('AT&T', 4, 12)
    """

    start: int
    end: int

    def __new__(cls, word: str, start: int, end: int) -> Self:
        """Make a word with its place."""
        self = super().__new__(cls, word)
        self.start, self.end = start, end
        return self


def split_text(text: str, language: str | None = None, *, breaks: Container[int] = ()) -> list[TextWord]:
    """Split raw text into words, at white space and around punctuation marks and symbols.

    Apostrophes, hyphens, full stops and underscores between letters, and commas between digits, do not end a word,
    except that an apostrophe begins a word in English (``John`` and ``'s``) and ends one in French, Italian and Catalan
    (``l'`` and ``heure``). Each Chinese character and kana is a word.

    HTML's character references, such as ``&amp;``, count as the characters that they stand for.

    Args:
        text: the text.
        language: a code that begins like that of ISO 639-1, such as ``"fr"`` or ``"fra_Latn"``; None if unknown.
        breaks: places in the text where a word ends in any case.

    >>> split_text("C'est l'heure&nbsp;: 3,5 km.", "fr")
    ["C'", 'est', "l'", 'heure', ':', '3,5', 'km', '.']
    """
    matches = [(html.unescape(match[0]), *match.span()) for match in _CHARACTER.finditer(text)]
    characters = [character for character, _, _ in matches]
    kinds: list[_Kind] = []
    for character in characters:
        kinds.append(_kind(character, kinds[-1] if kinds else "space"))
    begins, ends = (language or "")[:2] == "en", (language or "")[:2] in _ELIDING
    words: list[TextWord] = []
    for index, (character, start, end) in enumerate(matches):
        if kinds[index] == "space":
            continue
        last = words[-1] if words and words[-1].end == start and start not in breaks else None
        if last is not None and _continues(characters, kinds, index, begins=begins, ends=ends):
            words[-1] = TextWord(last + character, last.start, end)
        else:
            words.append(TextWord(character, start, end))
    return words


def _continues(characters: list[str], kinds: list[_Kind], index: int, *, begins: bool, ends: bool) -> bool:
    """Whether a character belongs to the same word as the one before it."""
    before, here = characters[index - 1], characters[index]
    if _is_mark(here):
        return True
    if _joins(characters, kinds, index):
        return not (begins and here in _APOSTROPHES)
    if _joins(characters, kinds, index - 1):
        return not (ends and before in _APOSTROPHES)
    if kinds[index - 1] == kinds[index] == "letter":
        return True
    return kinds[index] == "sign" and before == here


def _joins(characters: list[str], kinds: list[_Kind], index: int) -> bool:
    """Whether a sign between two letters or digits does not end their word."""
    if not 0 < index < len(characters) - 1:
        return False
    if characters[index] == ",":
        return characters[index - 1].isdecimal() and characters[index + 1].isdecimal()
    return characters[index] in _JOINING and kinds[index - 1] == kinds[index + 1] == "letter"


def _kind(character: str, before: _Kind) -> _Kind:
    """The kind of a character; what changes the one before it is of the same kind."""
    if _is_mark(character):
        alone: _Kind = "space" if unicodedata.category(character[0]) == "Cf" else "letter"
        return alone if before == "space" else before
    if not character or character.isspace() or unicodedata.category(character[0]) in ("Cc", "Zs"):
        return "space"
    if _IDEOGRAPH.match(character):
        return "ideograph"
    return "sign" if unicodedata.category(character[0])[0] in "PS" else "letter"


def _is_mark(character: str) -> bool:
    """Whether a character changes the one before it: combining marks, joiners, soft hyphens."""
    return bool(character) and unicodedata.category(character[0]) in ("Mn", "Mc", "Me", "Cf")


Span = tuple[int, int]
"""The first word of a span and the one after its last; equal for a place between two words."""

SENTENCE = -1
"""The parent of spans that only the sentence encloses."""


@dataclass(frozen=True, slots=True)
class NestedSpan:
    """A span of source words in a tree of spans."""

    start: int
    end: int
    """The word after its last; ``start`` for a place between two words."""
    parent: int = SENTENCE
    """The index of the span that encloses it."""
    beside: Literal["left", "right"] | None = None
    """The neighbour that it stays beside if it becomes a place."""


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
    projected = dict(zip(order, project_nested(nested, links, source, target), strict=True))
    return [projected[index] for index in range(len(spans))]


def project_nested(
    spans: Sequence[NestedSpan], links: Alignment, source: Sequence[object], target: Sequence[object]
) -> list[Span]:
    """Project a tree of spans, each after its parent, by the rule of :func:`alignment.project_spans`.

    A place at an edge of its parent stays at that edge; one beside a word goes to that word's translation.
    """
    linked: list[list[int]] = [[] for _ in target]
    for left, right in links:
        if left >= len(source) or right >= len(target):
            message = f"got the link {left}-{right} of {len(source)} source and {len(target)} target words"
            raise InvalidInputError(f"{message}; expected links between words, counted from 0")
        linked[right].append(left)
    children: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        children.setdefault(span.parent, []).append(index)
    projected: dict[int, Span] = {SENTENCE: (0, len(target))}
    for parent in (SENTENCE, *range(len(spans))):
        if parent in children:
            enclosing = NestedSpan(0, len(source)) if parent == SENTENCE else spans[parent]
            siblings = [spans[index] for index in children[parent]]
            targets = _project_siblings(enclosing, siblings, projected[parent], linked)
            projected.update(zip(children[parent], targets, strict=True))
    return [projected[index] for index in range(len(spans))]


def _project_siblings(
    parent: NestedSpan, spans: Sequence[NestedSpan], room: Span, linked: Sequence[Sequence[int]]
) -> list[Span]:
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
    projected: dict[int, Span] = {}
    for index, span in enumerate(spans):
        if span.start < span.end and (span.start, span.end) == (parent.start, parent.end):
            projected[index] = room
        elif held[index]:
            barred = {word for word, holder in holders.items() if holder != index}
            projected[index] = _best_span(room, gains[index], held[index], barred)
    taken = {word for target in projected.values() for word in range(*target)}
    for index, span in enumerate(spans):
        if index not in projected:
            edges = {word for word in gains[index] if word not in taken and inside(word, span)}
            if edges:
                projected[index] = _best_span(room, gains[index], edges, taken)
                taken.update(range(*projected[index]))
    closed = {place for start, end in projected.values() for place in range(start + 1, end)}
    return [
        projected[index] if index in projected else _best_place(parent, span, room, linked, closed)
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


VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
)
"""HTML's elements without an end tag."""

CODES = frozenset(("bpt", "ept", "it", "ph", "script", "style"))
"""Elements whose content is no text: the native codes of TMX and XLIFF, and HTML's scripts and styles."""

PAIRED_CODES = {"bpt": "ept", "bx": "ex", "sc": "ec"}
"""Elements of TMX and XLIFF that mark the start of a span, and those that mark its end."""

# A character < in front of anything else is text, as in HTML.
_OPENING = re.compile(r"<(?=/?[^\W\d]|!--|!\[CDATA\[|![^\W\d]|\?)")
_TAG = re.compile(
    r"""
    <!--.*?--> | <!\[CDATA\[.*?\]\]> | <\?.*?\?> | <![^\W\d][^>]*>
    | <(?P<end>/?) (?P<name>[^\s/>"'=<]++) (?P<attributes>(?:[^"'<>]|"[^"]*"|'[^']*')*+) >
    """,
    re.VERBOSE | re.DOTALL,
)
_EXPECTED = "expected tags in pairs, nested, and &lt; for the character <"
_NUMBER = re.compile(r"""\s(rid|i|startRef|id)\s*=\s*("[^"]*"|'[^']*')""")
_NUMBERS = ("rid", "i", "startRef", "id")  # those that say most first
_END_NAME = re.compile(r"""</([^\s/>"'=<]+)""")


@dataclass(frozen=True, slots=True)
class Element:
    """A pair of tags, or a single one: an empty element, a comment, a processing instruction, a code."""

    opening: str
    closing: str
    """Empty for a single tag."""
    start: int
    """Where the text inside starts, in the text without tags."""
    end: int
    parent: int
    """The index of the element around it, -1 for none."""


@dataclass(frozen=True, slots=True)
class Markup:
    """A text and its tags.

    Attributes:
        text: the text without tags; character references such as ``&lt;`` are left as they are.
        elements: the tags in their order, each after the element around it.
    """

    text: str
    elements: tuple[Element, ...]

    @property
    def breaks(self) -> set[int]:
        """The places of single tags, which end a word."""
        return {element.start for element in self.elements if not element.closing}


def parse_markup(text: str) -> Markup:
    """Read the tags in a line of XML or HTML.

    Single tags are comments, CDATA sections, processing instructions, tags that end with ``/>``, HTML's void elements
    (:data:`alignment.tags.VOID`) without an end tag, and whole elements whose content is no text
    (:data:`alignment.tags.CODES`, ``it`` only with ``pos``). The names of the two tags of a pair are equal but for
    case; ``bpt`` and ``ept``, ``bx`` and ``ex``, ``sc`` and ``ec`` form pairs if their numbers are equal (``rid``,
    ``i``, ``startRef`` or ``id``).

    Args:
        text: a line; a ``<`` that no tag follows, as in ``a < b``, is text.

    Raises:
        InvalidInputError: a tag does not end, has no partner, or crosses another pair; its place in the line is named.

    >>> parse_markup("the <b>big</b> house").text
    'the big house'
    """
    parts: list[str] = []
    elements: list[Element] = []
    opened: list[tuple[int, _Tag]] = []
    position = length = 0
    for tag in _tags(text):
        parts.append(text[position : tag.start])
        length += len(parts[-1])
        position = tag.end
        if tag.kind != "end":
            parent = opened[-1][0] if opened else SENTENCE
            if tag.kind == "start":
                opened.append((len(elements), tag))
            elements.append(Element(tag.text, "", length, length, parent))
        elif not opened:
            raise InvalidInputError(f"got {tag}, which nothing opens; {_EXPECTED}")
        elif opened[-1][1].key != tag.key:
            raise InvalidInputError(f"got {tag} inside {opened[-1][1]}; {_EXPECTED}")
        else:
            index, _ = opened.pop()
            elements[index] = replace(elements[index], closing=tag.text, end=length)
    if opened:
        raise InvalidInputError(f"got {opened[-1][1]}, which nothing closes; {_EXPECTED}")
    return Markup("".join(parts) + text[position:], tuple(elements))


def check_plain(text: str) -> None:
    """Raise :class:`captum_norm.errors.InvalidInputError` if a translation has tags."""
    for tag in _tags(text):
        raise InvalidInputError(
            f"got {tag} of the translation, expected text without tags, and &lt; for the character <"
        )


class _Tag(NamedTuple):
    """A tag in a line: where it is, and its key, which is equal for both tags of a pair."""

    text: str
    start: int
    end: int
    kind: Literal["start", "end", "single"]
    key: str

    def __str__(self) -> str:
        return f"{quoted(self.text)} at character {self.start + 1}"


def _tags(text: str) -> Iterator[_Tag]:
    """Find the tags of a line."""
    ended = {name.lower() for name in _END_NAME.findall(text)}
    position = 0
    while opening := _OPENING.search(text, position):
        start = opening.start()
        match = _TAG.match(text, start)
        if match is None:
            raise InvalidInputError(
                f"got {quoted(text[start:])} at character {start + 1}, a tag that does not end; {_EXPECTED}"
            )
        tag = _classified(text, match, ended)
        yield tag
        position = tag.end


def _classified(text: str, match: re.Match[str], ended: Container[str]) -> _Tag:
    """The tag of a match, in a line with the end tags of some names."""
    name, attributes = (match["name"] or "").lower(), match["attributes"] or ""
    start, end = match.span()
    if match["end"]:
        return _Tag(match[0], start, end, "end", name)
    single = not name or attributes.endswith("/") or (name in VOID and name not in ended)
    if name in CODES and not single and (name != "it" or "pos" in attributes):
        closing = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, end)
        if closing is None:
            raise InvalidInputError(
                f"got {quoted(match[0])} at character {start + 1}, which nothing closes; {_EXPECTED}"
            )
        end, single = closing.end(), True
    numbers = dict(_NUMBER.findall(attributes))
    number = next((numbers[attribute][1:-1] for attribute in _NUMBERS if attribute in numbers), None)
    kind: Literal["start", "end", "single"] = "single" if single else "start"
    if single and number is not None and name in PAIRED_CODES:
        kind, name = "start", f"{PAIRED_CODES[name]} {number}"
    elif single and number is not None and name in PAIRED_CODES.values():
        kind, name = "end", f"{name} {number}"
    return _Tag(text[start:end], start, end, kind, name)


def transfer_tags(
    source: Markup, target: str, links: Alignment, source_words: Sequence[TextWord], target_words: Sequence[TextWord]
) -> str:
    """Insert the tags of a source sentence into its translation: each once, nested as in the source.

    A pair of tags goes around the words that the fewest links cross, and a single tag where the fewest links lead from
    one side to the other (:func:`alignment.project_spans`). A pair around all words of the sentence or of its parent
    stays around all of them; a single tag at an edge of either stays there, and one that touches a word goes beside the
    word that this is linked to. A word that a tag splits is inside the pair.

    The translation, which is kept character for character, has no tags; words are such as
    :func:`~alignment.split_text` finds in ``source.text`` and ``target``.

    Raises:
        InvalidInputError: the target has tags, or a link is not between words.

    >>> source = parse_markup("la <b>petite</b> maison<br/>")
    >>> target = "the small house"
    >>> links = Alignment([(0, 0), (1, 1), (2, 2)])
    >>> transfer_tags(source, target, links, split_text(source.text, "fr"), split_text(target, "en"))
    'the <b>small</b> house<br/>'
    """
    check_plain(target)
    spans = _source_spans(source, source_words)
    projected = project_nested(spans, links, source_words, target_words)
    return _inserted(source.elements, spans, projected, target, target_words)


def _source_spans(source: Markup, words: Sequence[TextWord]) -> list[NestedSpan]:
    """The words inside of each element."""
    starts, ends = [word.start for word in words], [word.end for word in words]
    spans: list[NestedSpan] = []
    free = {SENTENCE: 0}  # the first word of each element that no child before holds
    for index, element in enumerate(source.elements):
        parent = element.parent
        last = len(words) if parent == SENTENCE else spans[parent].end
        start = min(max(bisect_right(ends, element.start), free[parent]), last)
        end = min(max(bisect_left(starts, element.end), start), last) if element.start < element.end else start
        if element.start == element.end and start < last and starts[start] < element.start:
            start = end = start + 1  # a tag within a word goes behind it
        free[parent], free[index] = end, start
        left = source.text[max(element.start - 1, 0) : element.start].strip()
        right = source.text[element.end : element.end + 1].strip()
        beside: Literal["left", "right"] | None = "left" if left else "right" if right else None
        spans.append(NestedSpan(start, end, parent, beside))
    return spans


def _inserted(
    elements: Sequence[Element],
    spans: Sequence[NestedSpan],
    projected: Sequence[Span],
    target: str,
    words: Sequence[TextWord],
) -> str:
    """The target with each element's tags around its words."""
    places: dict[int, Span] = {SENTENCE: (words[0].start, words[-1].end) if words else (0, 0)}
    children: dict[int, list[int]] = {}
    for index, (start, end) in enumerate(projected):
        first, last = places[elements[index].parent]
        if start < end:
            places[index] = words[start].start, words[end - 1].end
        else:
            follows = start == len(words) or (start > 0 and spans[index].beside == "left")
            place = first if not words else words[start - 1].end if follows else words[start].start
            places[index] = (min(max(place, first), last),) * 2
        children.setdefault(elements[index].parent, []).append(index)
    parts: list[str] = []
    position = 0
    left = [(index, True) for index in _ordered(children, SENTENCE, places)]
    while left:
        index, opens = left.pop()
        place = places[index][0 if opens else 1]
        parts += target[position:place], elements[index].opening if opens else elements[index].closing
        position = place
        if opens:
            left.append((index, False))
            left += [(child, True) for child in _ordered(children, index, places)]
    return "".join(parts) + target[position:]


def _ordered(children: Mapping[int, Sequence[int]], parent: int, places: Mapping[int, Span]) -> list[int]:
    """The children of an element, the last in the target first."""
    return sorted(children.get(parent, ()), key=lambda index: (*places[index], index), reverse=True)
