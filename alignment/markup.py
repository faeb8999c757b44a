"""Reads text with tags of XML and HTML or markers of USFM: its words, its elements, and the blocks that divide it."""

import html
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, Self

from captum_norm import InvalidInputError
from captum_norm.checks import quoted

_Kind = Literal["letter", "ideograph", "sign", "space"]

Syntax = Literal["xml", "usfm"]
"""Tags of XML, HTML, TMX and XLIFF, or markers of USFM."""

CHARACTER = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});|.", re.DOTALL)
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
    matches = [(html.unescape(match[0]), *match.span()) for match in CHARACTER.finditer(text)]
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

PAIRED_CODES = {"bpt": "ept", "bx": "ex", "sc": "ec", "sm": "em"}
"""Elements of TMX and XLIFF that mark the start of a span, and those that mark its end."""

STYLES = frozenset(
    (
        "add", "addpn", "bd", "bdit", "bk", "dc", "em", "it", "jmp", "k", "nd", "no", "ord", "pn", "png", "pro", "qac",
        "qs", "qt", "rb", "sc", "sig", "sls", "sup", "tl", "w", "wa", "wg", "wh", "wj"
    )
)  # fmt: skip
"""USFM's markers that must have an end marker. Others are those of paragraphs if the line does not end them."""

NOTES = frozenset(("ca", "cat", "ef", "ex", "f", "fe", "fig", "rq", "va", "vp", "x"))
"""USFM's markers whose content is not of the sentence: footnotes, cross-references, figures, other numbers."""

# A character < in front of anything else is text, as in HTML.
_OPENING = re.compile(r"<(?=/?[^\W\d]|!--|!\[CDATA\[|![^\W\d]|\?)")
_TAG = re.compile(
    r"""
    <!--.*?--> | <!\[CDATA\[.*?\]\]> | <\?.*?\?> | <![^\W\d][^>]*>
    | <(?P<end>/?) (?P<name>[^\s/>"'=<]++) (?P<attributes>(?:[^"'<>]|"[^"]*"|'[^']*')*+) >
    """,
    re.VERBOSE | re.DOTALL,
)
# Attributes, as in \w word|lemma="w"\w*, belong to the end; numbers and what is no text to their marker.
_MARKER = re.compile(
    r"""
    \\ (?P<milestone>[A-Za-z] [\w-]*) \s* (?:\| [^\\]*)? \\\*
    | (?:\| [^\\|]*)? \\ (?P<end>\+? [A-Za-z] [\w-]*) \*
    | \\ (?: [cv] \s+ [^\s\\]+ (?: \s* \\(?:[cv]a|vp) \s [^\\]* \\[cv][ap]\* )*) \s?
    | \\ (?:ide?|rem|sts|usfm) (?![\w-]) .*
    | \\ (?P<start>\+? [A-Za-z] [\w-]*) \s?
    | \\
    """,
    re.VERBOSE,
)
_EXPECTED = {
    "xml": "expected tags in pairs, nested, and &lt; for the character <",
    "usfm": r"expected markers in pairs, nested, such as \nd and \nd*",
}
_NUMBER = re.compile(r"""\s(rid|i|startRef|id)\s*=\s*("[^"]*"|'[^']*')""")
_NUMBERS = ("rid", "i", "startRef", "id")  # those that say most first
_END_NAME = re.compile(r"""</([^\s/>"'=<]+)""")
_NOT_TRANSLATED = re.compile(r"""\s(?:translate\s*=\s*["']?no|mtype\s*=\s*["']protected)\b""", re.IGNORECASE)
_ISOLATED = re.compile(r"""\sisolated\s*=\s*["']yes\b""")
_IDENTIFIED = re.compile(r"[\s|](?:(?:xml:)?id|mid|rid|i)\s*=", re.IGNORECASE)
_COPIED = re.compile(r"""<pc(?=\s)(?!.*\scanCopy\s*=\s*["']no)""", re.DOTALL)
_UNSEEN = ("<!--", "<?", "<wbr")  # within a word, these do not end it


@dataclass(frozen=True, slots=True)
class Element:
    """A pair of tags, or a single one: an empty element, a comment, a processing instruction, a code.

    Without tags it is the space of the text that stands for a boundary of blocks.
    """

    opening: str
    closing: str  # empty for a single tag
    start: int  # where the text inside starts, in the text without tags
    end: int
    parent: int  # the index of the element around it, -1 for none
    block: bool = False  # whether sentences end at it: it is one of BLOCKS, or contains one
    content: str | None = None  # what stays as it is between its tags, with the tags in there; None if translated

    @property
    def copyable(self) -> bool:
        """Whether a pair may be written twice, having no id, or as XLIFF 2's ``<pc>``, whose copies get new ones."""
        pair = self.closing and not self.block and self.content is None
        return bool(pair and (_COPIED.match(self.opening) or not _IDENTIFIED.search(self.opening + self.closing)))


@dataclass(frozen=True, slots=True)
class Markup:
    """A text and its tags.

    Attributes:
        text: the text without tags; character references such as ``&lt;`` are left as they are. Where a block or
            ``<br>`` divides two words without white space, there is a space.
        elements: the tags in their order, each after the element around it.
        syntax: what was read.
    """

    text: str
    elements: tuple[Element, ...]
    syntax: Syntax = "xml"

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
        runs = word_runs(self.elements, words)
        starts = [index for index, run in enumerate(runs) if index == 0 or run != runs[index - 1]]
        return list(pairwise([*starts, len(words)])) if words else []


def word_runs(elements: Sequence[Element], words: Sequence[TextWord]) -> list[int]:
    """The number of tags of blocks before each word."""
    edges = sorted(place for element in elements if element.block for place in (element.start, element.end))
    return [bisect_right(edges, word.start) for word in words]


def element_runs(elements: Sequence[Element]) -> list[int]:
    """The number of tags of blocks before each element: two of each block before it, one of each around it."""
    runs: list[int] = []
    around: list[int] = []  # for each element, how many blocks are
    begun = 0
    for element in elements:
        around.append(0 if element.parent == SENTENCE else around[element.parent] + elements[element.parent].block)
        runs.append(2 * begun - around[-1])
        begun += element.block
    return runs


def parse_markup(text: str, syntax: Syntax = "xml") -> Markup:
    r"""Read the tags in a line of XML or HTML, or the markers in a line of USFM.

    Single tags are comments, CDATA sections, processing instructions, tags that end with ``/>``, HTML's void elements
    (:data:`alignment.markup.VOID`) without an end tag, and whole elements whose content is no text
    (:data:`alignment.markup.CODES`, ``it`` only with ``pos``). The names of the two tags of a pair are equal but for
    case; ``bpt`` and ``ept``, ``bx`` and ``ex``, ``sc`` and ``ec`` form pairs if their numbers are equal (``rid``,
    ``i``, ``startRef`` or ``id``).

    Pairs of USFM are markers that end within the line, and those of :data:`alignment.markup.STYLES`, which must.
    Attributes belong to the end. Single ones are milestones and whole notes (:data:`alignment.markup.NOTES`). All other
    markers, such as ``\p`` and ``\v 1``, are blocks. The first white space after a marker is part of it.

    Args:
        text: a line; in XML, a ``<`` that no tag follows, as in ``a < b``, is text.
        syntax: ``"xml"`` for tags of XML, HTML, TMX and XLIFF, ``"usfm"`` for markers of USFM.

    Raises:
        InvalidInputError: a tag does not end, has no partner, or crosses another pair; its place in the line is named.

    >>> parse_markup("the <b>big</b> house").text
    'the big house'
    >>> parse_markup("<li>one</li><li>two</li>").text
    'one two'
    >>> parse_markup(r"\v 1 the \nd Lord\nd*\f + \ft Or: God\f* spoke", "usfm").text
    'the Lord spoke'
    """
    tags = list(_TAGS[syntax](text))
    edges = [0, *(edge for tag in tags for edge in (tag.start, tag.end)), len(text)]
    first, *pieces = (text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    parts, length = [first], len(first)
    elements: list[Element] = []
    opened: list[tuple[int, _Tag]] = []
    kept: int | None = None  # how many elements are around the one whose content stays as it is
    for tag, piece in _divided(tags, first, pieces):
        parent = opened[-1][0] if opened else SENTENCE
        if tag.kind == "end":
            index, start = _closed(tag, opened, syntax)
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
        raise InvalidInputError(f"got {opened[-1][1]}, which nothing closes; {_EXPECTED[syntax]}")
    return Markup("".join(parts), tuple(elements), syntax)


def _divided(tags: Sequence["_Tag"], first: str, pieces: Sequence[str]) -> Iterator[tuple["_Tag", str]]:
    """Each tag and the text behind it, and a space as a tag of its own where it divides words; ``first`` before."""
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


def _closed(tag: "_Tag", opened: list[tuple[int, "_Tag"]], syntax: Syntax) -> tuple[int, "_Tag"]:
    """Remove and return the element that an end tag closes."""
    if not opened:
        raise InvalidInputError(f"got {tag}, which nothing opens; {_EXPECTED[syntax]}")
    if opened[-1][1].key != tag.key:
        raise InvalidInputError(f"got {tag} inside {opened[-1][1]}; {_EXPECTED[syntax]}")
    return opened.pop()


def _mark_blocks(elements: list[Element], index: int) -> None:
    """Mark the elements around a block as blocks."""
    while index != SENTENCE and not elements[index].block:
        elements[index] = replace(elements[index], block=True)
        index = elements[index].parent


def check_plain(text: str, syntax: Syntax = "xml") -> None:
    """Raise :class:`captum_norm.errors.InvalidInputError` if a translation has tags."""
    for tag in _TAGS[syntax](text):
        expected = "text without tags, and &lt; for the character <" if syntax == "xml" else "text without markers"
        raise InvalidInputError(f"got {tag} of the translation, expected {expected}")


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


def _xml_tags(text: str) -> Iterator[_Tag]:
    """Find the tags of a line."""
    ended = {name.lower() for name in _END_NAME.findall(text)}
    position = 0
    while opening := _OPENING.search(text, position):
        start = opening.start()
        match = _TAG.match(text, start)
        if match is None:
            raise InvalidInputError(
                f"got {quoted(text[start:])} at character {start + 1}, a tag that does not end; {_EXPECTED['xml']}"
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
                f"got {quoted(match[0])} at character {start + 1}, which nothing closes; {_EXPECTED['xml']}"
            )
        end, single = closing.end(), True
    numbers = {} if _ISOLATED.search(attributes) else dict(_NUMBER.findall(attributes))
    if name == "em" and "startRef" not in numbers:  # HTML's
        numbers = {}
    number = next((numbers[attribute][1:-1] for attribute in _NUMBERS if attribute in numbers), None)
    kind: Literal["start", "end", "single"] = "single" if single else "start"
    if single and number is not None and name in PAIRED_CODES:
        kind, name = "start", f"{PAIRED_CODES[name]} {number}"
    elif single and number is not None and name in PAIRED_CODES.values():
        kind, name = "end", f"{name} {number}"
    kept = name in KEPT or _NOT_TRANSLATED.search(attributes) is not None
    return _Tag(text[start:end], start, end, kind, name, name in BLOCKS, kept)


def _usfm_tags(text: str) -> Iterator[_Tag]:
    """Find the markers of a line of USFM."""
    ended = {match["end"] for match in _MARKER.finditer(text)}
    position = 0
    while match := _MARKER.search(text, position):
        start, position = match.span()
        name = match["end"] or match["start"]
        kind: Literal["start", "end", "single"] = "end" if match["end"] else "single"
        wrong = "which is no marker" if match[0] == "\\" else "which has no number" if name in ("c", "v") else None
        if match["start"] and name in NOTES:
            position = text.find(f"\\{name}*", position) + len(name) + 2
            wrong = "which nothing closes" if position < match.end() else None
        elif match["start"] and (name in ended or name.removeprefix("+") in STYLES):
            kind = "start"
        if wrong:
            raise InvalidInputError(f"got {quoted(match[0])} at character {start + 1}, {wrong}; {_EXPECTED['usfm']}")
        block = kind == "single" and not match["milestone"] and name not in NOTES
        yield _Tag(text[start:position], start, position, kind, name or "", block, kept=False)


_TAGS = {"xml": _xml_tags, "usfm": _usfm_tags}
