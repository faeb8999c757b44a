"""Words of raw text, and what tags of XML and HTML say of it."""

import html
import random
import re
import unicodedata

import pytest

from alignment import parse_markup, split_text
from alignment.markup import Markup
from captum_norm import InvalidInputError
from tests.fuzzing import FACTOR

CHARACTERS = [*"aZ9é'’-–._,:;!?()[]{}<>&%/\\@#\"· \t\n\u00a0\u200b\u00ad\u0301\u202e\x1b\ufeff"]
CHARACTERS += [*"ßΩяшال\u093fनก\u0e47한\u1100\u1161中かカ。😀🇫𠮷²&", "👨\u200d👩\u200d👧"]
CHARACTERS += ["&amp;", "&lt;", "&nbsp;", "&#39;", "&#x4e2d;", "&eacute;", "&#0;", "&#xD800;", "&foo;", "&"]
CHARACTERS += ["...", "--"]


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        ("Hello, world!", None, "Hello|,|world|!"),
        ("John's dog doesn't bark.", "en", "John|'s|dog|doesn|'t|bark|."),
        ("L’heure, aujourd'hui", "fra_Latn", "L’|heure|,|aujourd'|hui"),
        ("dell'arte", "it_IT", "dell'|arte"),
        ("l'heure, don't", None, "l'heure|,|don't"),
        ("'quoted' rock 'n' roll", "en", "'|quoted|'|rock|'|n|'|roll"),
        ("e-mail at 1,000.50 a.m., foo,bar", "en", "e-mail|at|1,000.50|a.m|.|,|foo|,|bar"),
        ("wait... -- what?!", "en", "wait|...|--|what|?|!"),
        ("AT&amp;T &lt;3 caf&eacute;&nbsp;!", None, "AT|&|T|<|3|café|!"),
        ("50% of {name}: %s", None, "50|%|of|{|name|}|:|%|s"),
        ("नमस्ते दुनिया।", "hi", "नमस्ते|दुनिया|।"),
        ("今日は晴れ。OK", "ja", "今|日|は|晴|れ|。|OK"),
        ("كتابٌ جديد؟", "ar", "كتابٌ|جديد|؟"),
        ("cafe\u0301 co\u00adop\u200b \u200b", None, "cafe\u0301|co\u00adop\u200b"),
        (" \t\n", None, ""),
        ("", None, ""),
    ],
)
def test_words_of_texts(text: str, language: str | None, words: str) -> None:
    assert "|".join(split_text(text, language)) == words


def test_breaks_end_words() -> None:
    assert split_text("foobar", breaks={3}) == ["foo", "bar"]
    assert split_text("l'heure", "fr", breaks={0, 1, 7}) == ["l", "'", "heure"]


@pytest.mark.fuzz
def test_words_lie_where_they_say_and_hold_all_that_is_seen() -> None:
    draw = random.Random(0)
    for _ in range(1000 * FACTOR):
        text = "".join(draw.choices(CHARACTERS, k=draw.randrange(30)))
        for language in ("en", "fr", None):
            words = split_text(text, language)
            covered = set[int]()
            for word in words:
                assert word
                assert html.unescape(text[word.start : word.end]) == word
                assert not any(character.isspace() for character in word)
                assert covered.isdisjoint(range(word.start, word.end))
                covered.update(range(word.start, word.end))
            rest = "".join(" " if place in covered else character for place, character in enumerate(text))
            unseen = html.unescape(rest.replace("&#0;", " "))
            assert all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in unseen)
            assert words == sorted(words, key=lambda word: word.start)


REFUSED = [
    ("a <b>b", r"got '<b>' at character 3, which nothing closes; expected tags in pairs, nested, and &lt; for"),
    ("a</b>", "got '</b>' at character 2, which nothing opens"),
    ("<b><i>a</b></i>", "got '</b>' at character 8 inside '<i>' at character 4"),
    ("a <b", "got '<b' at character 3, a tag that does not end"),
    ("a <b <i>c</i>", "got '<b <i>c</i>' at character 3, a tag that does not end"),
    ('<a href="x>a</a>', "a tag that does not end"),
    ("<!-- a", "got '<!-- a' at character 1, a tag that does not end"),
    ("<ph>a", "got '<ph>' at character 1, which nothing closes"),
    ('<bpt i="1"/>a<ept i="2"/>', "got '<ept i=\"2\"/>' at character 14 inside"),
    ('<g id="1"><bx id="2"/>a</g>b<ex id="2"/>', "got '</g>' at character 24 inside '<bx id=\"2\"/>' at character 11"),
    ('<pc id="1">a', "got '<pc id=\"1\">' at character 1, which nothing closes"),
    ('<sc id="1"/>a', "got '<sc id=\"1\"/>' at character 1, which nothing closes"),
    ('a<ec startRef="1"/>', "got '<ec startRef=\"1\"/>' at character 2, which nothing opens"),
    ("<p>a<li>b</p>", "got '</p>' at character 10 inside '<li>' at character 5"),
    ("mail <me@example.org>", "got '<me@example.org>' at character 6, which nothing closes"),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_markup_that_is_refused(source: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_markup(source)


REFUSED_USFM = [
    (
        r"a \nd b",
        r"got '\\nd ' at character 3, which nothing closes; expected markers in pairs, nested, such as \nd and",
    ),
    (r"a\nd*", r"got '\\nd*' at character 2, which nothing opens"),
    (r"\add a \+nd b\add* c\+nd*", r"got '\\add*' at character 14 inside '\\+nd ' at character 8"),
    (r"\nd a \add b\add*", r"got '\\nd ' at character 1, which nothing closes"),
    (r"a\f + \ft b", r"got '\\f ' at character 2, which nothing closes"),
    (r"a \ b", r"got '\\' at character 3, which is no marker"),
    (r"\p \v", r"got '\\v' at character 4, which has no number"),
    (r"\add a \v 2 b", r"got '\\add ' at character 1, which nothing closes"),
]


@pytest.mark.parametrize(("source", "message"), REFUSED_USFM)
def test_markers_that_are_refused(source: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        parse_markup(source, "usfm")


def test_elements_say_what_they_hold() -> None:
    markup = parse_markup('a <b x="1">c <br/>d</b>')
    assert markup.text == "a c d"
    assert [(e.opening, e.closing, e.start, e.end, e.parent) for e in markup.elements] == [
        ('<b x="1">', "</b>", 2, 5, -1),
        ("<br/>", "", 4, 4, 0),
    ]
    assert markup.breaks == {4}
    assert parse_markup("a") == Markup("a", ())
