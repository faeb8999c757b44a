"""Words of raw text: where languages end them, and that each lies where it says."""

import html
import random
import unicodedata

import pytest

from alignment import split_text, split_words
from alignment.tags import split_spaces
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
def test_cases(text: str, language: str | None, words: str) -> None:
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
        spaced = split_spaces(text)
        assert [text[word.start : word.end] for word in spaced] == split_words(text)
