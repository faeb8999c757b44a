"""Reads inline tags of XML and HTML, and transfers them to a translation by the links between words."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from alignment.links import Alignment
from alignment.spans import SENTENCE, NestedSpan, Span, project_nested
from alignment.words import TextWord
from captum_norm import InvalidInputError
from captum_norm.text.lines import quoted

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
    """A pair of tags, or a single one: an empty element, a comment, a processing instruction, a code.

    Attributes:
        opening: the start tag, or the single one.
        closing: the end tag; empty for a single tag.
        start: where the text inside starts, in the text without tags.
        end: where it ends.
        parent: the index of the element around it, -1 for none.
    """

    opening: str
    closing: str
    start: int
    end: int
    parent: int


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
    (:data:`alignment.markup.VOID`) without an end tag, and whole elements whose content is no text
    (:data:`alignment.markup.CODES`, ``it`` only with ``pos``). The names of the two tags of a pair are equal but for
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
    rows: list[list[Any]] = []
    opened: list[tuple[int, _Tag]] = []
    position = length = 0
    for tag in _tags(text):
        parts.append(text[position : tag.start])
        length += len(parts[-1])
        position = tag.end
        if tag.kind != "end":
            parent = opened[-1][0] if opened else SENTENCE
            if tag.kind == "start":
                opened.append((len(rows), tag))
            rows.append([tag.text, "", length, length, parent])
        elif not opened:
            raise InvalidInputError(f"got {tag}, which nothing opens; {_EXPECTED}")
        elif opened[-1][1].key != tag.key:
            raise InvalidInputError(f"got {tag} inside {opened[-1][1]}; {_EXPECTED}")
        else:
            index, _ = opened.pop()
            rows[index][1], rows[index][3] = tag.text, length
    if opened:
        raise InvalidInputError(f"got {opened[-1][1]}, which nothing closes; {_EXPECTED}")
    return Markup("".join(parts) + text[position:], tuple(Element(*row) for row in rows))


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

    Args:
        source: the source sentence.
        target: its translation, without tags; it is kept character for character.
        links: the links between the words.
        source_words: the words of ``source.text``, such as :func:`~alignment.split_text` finds.
        target_words: the words of ``target``.

    Raises:
        InvalidInputError: the target has tags, or a link is not between words.

    >>> from alignment.words import split_text
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
