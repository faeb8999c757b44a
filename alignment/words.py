"""Splits raw text into words that know their places in it."""

import html
import re
import unicodedata
from collections.abc import Container
from typing import Literal, Self

_Kind = Literal["letter", "ideograph", "sign", "space"]

_CHARACTER = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});|.", re.DOTALL)
_WORD = re.compile(r"[^ \t]+")
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

    Args:
        text: the text; HTML's character references, such as ``&amp;``, count as the characters that they stand for.
        language: a code that begins like that of ISO 639-1, such as ``"fr"`` or ``"fra_Latn"``; None if unknown.
        breaks: places in the text where a word ends in any case.

    >>> split_text("C'est l'heure&nbsp;: 3,5 km.", "fr")
    ["C'", 'est', "l'", 'heure', ':', '3,5', 'km', '.']
    """
    found = [(html.unescape(match[0]), *match.span()) for match in _CHARACTER.finditer(text)]
    characters = [character for character, _, _ in found]
    kinds: list[_Kind] = []
    for character in characters:
        kinds.append(_kind(character, kinds[-1] if kinds else "space"))
    begins, ends = (language or "")[:2] == "en", (language or "")[:2] in _ELIDING
    words: list[TextWord] = []
    for index, (character, start, end) in enumerate(found):
        if kinds[index] == "space":
            continue
        last = words[-1] if words and words[-1].end == start and start not in breaks else None
        if last is not None and _continues(characters, kinds, index, begins=begins, ends=ends):
            words[-1] = TextWord(last + character, last.start, end)
        else:
            words.append(TextWord(character, start, end))
    return words


def split_spaces(text: str) -> list[TextWord]:
    """Split tokenised text at spaces and tabs, as :func:`alignment.split_words` does.

    >>> split_spaces("l' heure .")[1].start
    3
    """
    return [TextWord(html.unescape(match[0]), *match.span()) for match in _WORD.finditer(text)]


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
