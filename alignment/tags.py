"""Transfers tags of XML and HTML to a translation: words of raw text, spans projected by links, markup."""

import html
import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import sub
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
    spans: Sequence[NestedSpan],
    links: Alignment,
    source: Sequence[object],
    target: Sequence[object],
    known: Sequence[Span] = (),
) -> list[Span]:
    """Project a tree of spans, each after its parent, by the rule of :func:`alignment.project_spans`.

    A place at an edge of its parent stays at that edge; one beside a word goes to that word's translation. ``known``
    are the target spans of the first spans, whose parent is the sentence, as all such spans are then.
    """
    _check_links(links, source, target)
    linked: list[list[int]] = [[] for _ in target]
    for left, right in links:
        linked[right].append(left)
    children: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        children.setdefault(span.parent, []).append(index)
    projected: dict[int, Span] = {SENTENCE: (0, len(target)), **dict(enumerate(known))}
    for parent in (*(() if known else (SENTENCE,)), *range(len(spans))):
        if parent in children:
            enclosing = NestedSpan(0, len(source)) if parent == SENTENCE else spans[parent]
            siblings = [spans[index] for index in children[parent]]
            targets = _project_siblings(enclosing, siblings, projected[parent], linked)
            projected.update(zip(children[parent], targets, strict=True))
    return [projected[index] for index in range(len(spans))]


def _check_links(links: Alignment, source: Sequence[object], target: Sequence[object]) -> None:
    for left, right in links:
        if left >= len(source) or right >= len(target):
            message = f"got the link {left}-{right} of {len(source)} source and {len(target)} target words"
            raise InvalidInputError(f"{message}; expected links between words, counted from 0")


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

BLOCKS = frozenset(
    (
        "address", "article", "aside", "blockquote", "body", "caption", "center", "col", "colgroup", "dd", "details",
        "dialog", "dir", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "frame", "frameset",
        "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hgroup", "hr", "html", "legend", "li", "listing",
        "main", "menu", "nav", "noframes", "ol", "optgroup", "option", "p", "plaintext", "pre", "search", "section",
        "select", "summary", "table", "tbody", "td", "textarea", "tfoot", "th", "thead", "title", "tr", "ul", "xmp"
    )
)  # fmt: skip
"""HTML's elements that end a sentence: all but the inline ones. Browsers show elements of other names inline."""

KEPT = frozenset(("code", "kbd", "pre"))
"""Elements whose content stays as it is, as that of elements with ``translate="no"``."""

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
_NOT_TRANSLATED = re.compile(r"""\stranslate\s*=\s*["']?no\b""", re.IGNORECASE)
_UNSEEN = ("<!--", "<?", "<wbr")  # within a word, these do not end it


@dataclass(frozen=True, slots=True)
class Element:
    """A pair of tags, or a single one: an empty element, a comment, a processing instruction, a code.

    Without tags it is the space of the text that stands for a boundary of blocks.
    """

    opening: str
    closing: str
    """Empty for a single tag."""
    start: int
    """Where the text inside starts, in the text without tags."""
    end: int
    parent: int
    """The index of the element around it, -1 for none."""
    block: bool = False
    """Whether sentences end at it: it is one of :data:`alignment.tags.BLOCKS`, or contains one."""
    content: str | None = None
    """What stays as it is between its tags, with the tags in there; None if it is translated."""


@dataclass(frozen=True, slots=True)
class Markup:
    """A text and its tags.

    Attributes:
        text: the text without tags; character references such as ``&lt;`` are left as they are. Where a block or
            ``<br>`` divides two words without white space, there is a space.
        elements: the tags in their order, each after the element around it.
    """

    text: str
    elements: tuple[Element, ...]

    @property
    def breaks(self) -> set[int]:
        """The places where a word ends, at single tags, blocks, and elements whose content stays as it is."""
        return {
            place
            for element in self.elements
            if element.block
            or element.content is not None
            or not (element.closing or element.opening.lower().startswith(_UNSEEN))
            for place in (element.start, element.end)
        }

    def blocks(self, words: Sequence[TextWord]) -> list[Span]:
        """The words of each block of text, such as :func:`~alignment.split_text` finds them, in order.

        >>> source = parse_markup("<td>a b</td><td>c</td>")
        >>> source.blocks(split_text(source.text, breaks=source.breaks))
        [(0, 2), (2, 3)]
        """
        runs = _runs(self.elements, words)
        starts = [index for index, run in enumerate(runs) if index == 0 or run != runs[index - 1]]
        return list(pairwise([*starts, len(words)])) if words else []


def _runs(elements: Sequence[Element], words: Sequence[TextWord]) -> list[int]:
    """The number of tags of blocks before each word."""
    edges = sorted(place for element in elements if element.block for place in (element.start, element.end))
    return [bisect_right(edges, word.start) for word in words]


def _element_runs(elements: Sequence[Element]) -> list[int]:
    """The number of tags of blocks before each element."""
    runs: list[int] = []
    opened: list[int] = []
    run = 0
    for index, element in enumerate(elements):
        while opened and opened[-1] != element.parent:
            run += elements[opened.pop()].block
        runs.append(run)
        run += element.block
        opened.append(index)
    return runs


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
    >>> parse_markup("<li>one</li><li>two</li>").text
    'one two'
    """
    tags = list(_tags(text))
    edges = [0, *(edge for tag in tags for edge in (tag.start, tag.end)), len(text)]
    first, *pieces = (text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    parts, length = [first], len(first)
    elements: list[Element] = []
    opened: list[tuple[int, _Tag]] = []
    kept: int | None = None  # how many elements are around the one whose content stays as it is
    for tag, piece in _divided(tags, first, pieces):
        parent = opened[-1][0] if opened else SENTENCE
        if tag.kind == "end":
            index, start = _closed(tag, opened)
            if kept in (None, len(opened)):
                content = None if kept is None else text[start.end : tag.start]
                elements[index] = replace(elements[index], closing=tag.text, end=length, content=content)
                kept = None
        else:
            if tag.block:
                _mark_blocks(elements, parent)
            if kept is None:
                elements.append(Element(tag.text, "", length, length + (not tag.text), parent, tag.block))
            if tag.kind == "start":
                kept = len(opened) if kept is None and tag.kept else kept
                opened.append((len(elements) - 1, tag))
        parts.append(piece)
        length += len(piece)
    if opened:
        raise InvalidInputError(f"got {opened[-1][1]}, which nothing closes; {_EXPECTED}")
    return Markup("".join(parts), tuple(elements))


def _divided(tags: Sequence["_Tag"], first: str, pieces: Sequence[str]) -> Iterator[tuple["_Tag", str]]:
    """Each tag and the text behind it, and a space as a tag of its own where one divides two words of a text.

    ``first`` is the text before all tags.
    """
    begins = [False]  # from the last tag to the first, whether a word follows without white space
    for piece in reversed(pieces):
        begins.append(not html.unescape(piece)[:1].isspace() if piece else begins[-1])
    ended = bool(first) and not html.unescape(first)[-1:].isspace()
    for tag, piece, begun in zip(tags, pieces, reversed(begins[1:]), strict=True):
        divides = (tag.block or tag.key == "br") and ended and begun
        if divides and tag.kind == "start":
            yield from ((_SPACE, " "), (tag, piece))
        elif divides:
            yield from ((tag, ""), (_SPACE, f" {piece}"))
        else:
            yield tag, piece
        ended = not html.unescape(piece)[-1:].isspace() if piece else ended and not divides


def _closed(tag: "_Tag", opened: list[tuple[int, "_Tag"]]) -> tuple[int, "_Tag"]:
    """Remove and return the element that an end tag closes."""
    if not opened:
        raise InvalidInputError(f"got {tag}, which nothing opens; {_EXPECTED}")
    if opened[-1][1].key != tag.key:
        raise InvalidInputError(f"got {tag} inside {opened[-1][1]}; {_EXPECTED}")
    return opened.pop()


def _mark_blocks(elements: list[Element], index: int) -> None:
    """Mark the elements around a block as blocks."""
    while index != SENTENCE and not elements[index].block:
        elements[index] = replace(elements[index], block=True)
        index = elements[index].parent


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
    block: bool
    kept: bool

    def __str__(self) -> str:
        return f"{quoted(self.text)} at character {self.start + 1}"


_SPACE = _Tag("", 0, 0, "single", "", block=False, kept=False)


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
        return _Tag(match[0], start, end, "end", name, name in BLOCKS, kept=False)
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
    kept = name in KEPT or _NOT_TRANSLATED.search(attributes) is not None
    return _Tag(text[start:end], start, end, kind, name, name in BLOCKS, kept)


def transfer_tags(
    source: Markup,
    target: str,
    links: Alignment,
    source_words: Sequence[TextWord],
    target_words: Sequence[TextWord],
    *,
    cuts: Sequence[int] | None = None,
) -> str:
    """Insert the tags of a source sentence into its translation: each once, nested as in the source.

    A pair of tags goes around the words that the fewest links cross, and a single tag where the fewest links lead from
    one side to the other (:func:`alignment.project_spans`). A pair around all words of its block or of its parent
    stays around all of them; a single tag at an edge of either stays there, and one that touches a word goes beside the
    word that this is linked to. White space between a tag and a word stays between them. A word that a tag splits is
    inside the pair, unless its translation is the same word, which is then split, too.

    Blocks (:data:`alignment.tags.BLOCKS`) keep their order. Each gets a part of the translation, and its tags stay in
    that part; a space that stands for the boundary of two blocks is removed. Where an element's content stays as it is
    (:data:`alignment.tags.KEPT`), it replaces the same words in the translation, or else those that are linked to it
    alone.

    The translation has no tags and is otherwise kept character for character; words are such as
    :func:`~alignment.split_text` finds in ``source.text`` and ``target``.

    Args:
        source: the source sentence.
        target: its translation; several blocks are beside each other in it, divided by white space.
        links: the alignment of the words.
        source_words: the words of ``source.text``.
        target_words: the words of ``target``.
        cuts: the first target word of each block (:meth:`alignment.Markup.blocks`) after the first one. By default the
            translation is cut where the fewest links lead from one block to another.

    Raises:
        InvalidInputError: the target has tags, a link is not between words, or ``cuts`` are not as many places between
            words as there are boundaries between blocks, in order.

    >>> source = parse_markup("la <b>petite</b> maison<br/>")
    >>> target = "the small house"
    >>> links = Alignment([(0, 0), (1, 1), (2, 2)])
    >>> transfer_tags(source, target, links, split_text(source.text, "fr"), split_text(target, "en"))
    'the <b>small</b> house<br/>'
    """
    check_plain(target)
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
    spans, projected = _projected(source, blocks, cut, linked, sources, targets)
    return _inserted(source, sources, spans, projected, target, targets)


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
    """Links in which kept words are linked to the same words, or else to those that are linked to nothing else.

    ``taken`` are the target words that are the same as other kept ones, and then as these.
    """
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
    """The first target word of each block, and the number of words: the fewest links lead from one block to another.

    Of equal cuts, those at white space, before no punctuation mark, and in proportion to the blocks' words.
    """
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
) -> tuple[list[NestedSpan], list[Span]]:
    """The words inside of each element in the source, and in the target."""
    starts, ends = [word.start for word in sources], [word.end for word in sources]
    firsts = [first for first, _ in blocks]
    block_of = {run: index for index, run in enumerate(_runs(source.elements, [sources[first] for first in firsts]))}
    nested = [NestedSpan(*block) for block in blocks]
    free = dict(enumerate(firsts))  # the first word of each nested span that no child before holds
    spans: list[NestedSpan] = []
    places: list[int | Span] = []  # in the target, or in ``nested``
    for element, run in zip(source.elements, _element_runs(source.elements), strict=True):
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
        spans.append(NestedSpan(start, end, parent, beside))
        nested.append(spans[-1])
    within = Alignment(
        (left, right)
        for left, right in linked
        if cut[block := bisect_right(firsts, left) - 1] <= right < cut[block + 1]
    )
    projected = project_nested(nested, within, sources, targets, list(pairwise(cut))) if blocks else []
    return spans, [projected[place] if isinstance(place, int) else place for place in places]


def _inserted(
    source: Markup,
    sources: Sequence[TextWord],
    spans: Sequence[NestedSpan],
    projected: Sequence[Span],
    target: str,
    words: Sequence[TextWord],
) -> str:
    """The target with each element's tags around its words, as far from them as in the source."""
    references = {place for match in _CHARACTER.finditer(target) for place in range(match.start() + 1, match.end())}
    runs = _element_runs(source.elements)
    places: dict[int, Span] = {SENTENCE: (0, len(target))}
    children: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, (element, span, around) in enumerate(zip(source.elements, spans, projected, strict=True)):
        first, last = places[element.parent]
        pair = _places(source, sources, element, span, around, target, words)
        opening, closing = (min(max(_snapped(place, references), first), last) for place in pair)
        places[index] = opening, max(opening, closing)
        # Blocks keep their order.
        children.setdefault(element.parent, []).append((2 * runs[index] + element.block, *places[index], index))
    parts: list[str] = []
    position = 0
    left = [(index, True) for *_, index in sorted(children.get(SENTENCE, ()), reverse=True)]
    while left:
        index, opens = left.pop()
        element, place = source.elements[index], max(position, places[index][not opens])
        between, position = target[position:place], place
        # What is kept, and not in the translation, is divided from its words by spaces, as in the source.
        added = (
            element.content is not None and spans[index].start < spans[index].end and len(set(projected[index])) == 1
        )
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
    return "".join(parts) + target[position:]


def _snapped(place: int, references: Container[int]) -> int:
    """The place, or the start of the reference that it is within."""
    while place in references:
        place -= 1
    return place


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
