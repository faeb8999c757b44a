"""The normal form, written down by hand, and whose word each piece of it is."""

import re
from typing import Any

import pytest

from alignment.normalization import Language, NormalizedWords, clean, normalize_word, normalize_words, tokenize
from alignment.tokenization import EncodedSentence
from tests.alignment.data import lines, needs

# The words that lost their œ, and words of their own that look like them, are among the last.
FRENCH = {
    "maison": "maison", "École": "école", "L'": "le", "l’": "le", "s'": "se", "J'": "je", "Qu'": "que",
    "lorsqu'": "lorsque", "entr'": "entre", "aujourd'": "aujourd'", "du": "de le", "Des": "de les", "au": "à le",
    "AUX": "à les", "dû": "dû", "l'heure": "le heure", "c'est-à-dire": "ce est - à - dire",
    "prendra-t-il": "prendra il", "Y-a-t-elle": "y - a elle", "dit-il": "dit - il", "t-il": "t - il",
    "-t-il": "- t - il", "a-t-": "a - t -", "celui-ci": "celui - ci", "M.": "m", "MM.": "mm", "...": "...",
    "1.": "1.", "3,5": "3,5", "-": "-", "—": "-", "--": "-", "«": '"', "œuvre": "oeuvre", "Sœurs": "soeurs",
    "uvre": "oeuvre", "manuvres": "manoeuvres", "cur": "coeur", "chur": "choeur", "rancur": "rancoeur",
    "bufs": "boeufs", "uf": "oeuf", "nud": "noeud", "surs": "soeurs", "vux": "voeux", "sur": "sur", "mur": "mur",
    "vu": "vu", "couvre": "couvre", "nu": "nu", "curé": "curé", "à": "à", "a": "a", "où": "où",
    "va\u00a0bien": "va bien", "mai\u00adson\u200b": "maison", "\u200b": "", "": "", "▁": "_",
}  # fmt: skip
ENGLISH = {
    "House": "house", "Mr.": "mr", "U.S.": "u.s.", "don't": "don 't", "'s": "'s", "boys'": "boys '",
    "two-thirds": "two - thirds", "--": "-", "du": "du", "des": "des", "l'": "l '", "uvre": "uvre",
    "a-t-il": "a - t - il", "ﬁne": "fine", "“": '"', "’ll": "'ll", "90s": "90s", "\ufeff": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("language", "word", "tokens"),
    [
        (language, word, tokens)
        for language, words in (("fr", FRENCH), ("en", ENGLISH))
        for word, tokens in words.items()
    ],
)
def test_words(language: Language, word: str, tokens: str) -> None:
    assert normalize_word(word, language) == tuple(tokens.split())


@pytest.mark.parametrize("language", ["fr", "en"])
def test_the_normal_form_keeps_its_length(language: Language) -> None:
    """Its tokens can be cut at spaces, and a token that is alone stays as it is if it is treated again."""
    words = FRENCH if language == "fr" else ENGLISH
    for word in words:
        for token in normalize_word(word, language):
            assert token
            assert not re.search(r"\s", token)
            assert token == token.lower()
            assert normalize_word(token, language) == (token,)


def test_sentences_are_their_words_in_a_row() -> None:
    words = ["Mr.", "Smith", "\u200b", "'s", "mother-in-law"]
    assert normalize_words(words, "en") == ["mr", "smith", "'s", "mother", "-", "in", "-", "law"]
    assert normalize_words([], "en") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("l’«Œuvre» – ½", 'l\'"OEuvre" - 1⁄2'),
        ("a\u00a0b\u2009c", "a b c"),
        ("co\u00adop\u200bé\ufeff", "coopé"),
        ("e\u0301 ﬃ ² …", "é ffi 2 ..."),
        ("´`‘", "'''"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert clean(text) == expected
    assert clean(expected) == expected


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        (
            "fr",
            "L’heure d'aujourd'hui, c'est l' « Europe » (M. Dupont).",
            "L' heure d' aujourd' hui , c' est l' \" Europe \" ( M. Dupont ) .",
        ),
        ("fr", "Qu’est-ce que c’est ? Y a-t-il 3,5 % ?", "Qu' est-ce que c' est ? Y a-t-il 3,5 % ?"),
        ("fr", 'dit-il: lorsqu\' "on" part', 'dit-il : lorsqu\' " on " part'),
        ("fr", "le rock ' n", "le rock ' n"),
        ("fr", 'donne-m\' "en"', 'donne-m\' " en "'),
        ("en", "Don't the boys' mother-in-law's Mr. Smith go?", "Don 't the boys ' mother-in-law 's Mr. Smith go ?"),
        ("en", "“Two-thirds” -- etc.", '" Two-thirds " -- etc .'),
        ("en", "  ", ""),
    ],
)
def test_tokenize(language: Language, text: str, words: str) -> None:
    assert tokenize(text, language) == words.split()


class Letters:
    """A piece for each letter, and a special token on both ends."""

    source_language, target_language = "fr", "en"

    def encode_source(self, sentences: list[list[str]]) -> list[EncodedSentence]:
        return [
            EncodedSentence(
                [1, *(ord(letter) for word in words for letter in word), 2],
                [None, *(index for index, word in enumerate(words) for _ in word), None],
            )
            for words in sentences
        ]

    def encode_target(self, sentences: list[list[str]]) -> list[EncodedSentence]:
        return [EncodedSentence(e.ids[1:], e.word_ids[1:]) for e in self.encode_source(sentences)]

    def decode_target(self, ids: list[int]) -> list[str]:
        return ["".join(chr(index) for index in ids if index > 2)]


def test_pieces_belong_to_the_word_that_was_given() -> None:
    tokenizer: Any = NormalizedWords(Letters(), "fr", "en")  # type: ignore[arg-type]
    source, nothing = tokenizer.encode_source([["L'", "an", "\u200b", "des", "a-t-il"], []])
    text = "leandelesail"
    assert source.ids == [1, *map(ord, text), 2]
    assert source.word_ids == [None, *[0] * 2, *[1] * 2, *[3] * 5, *[4] * 3, None]
    assert nothing == EncodedSentence([1, 2], [None, None])
    [target] = tokenizer.encode_target([["des", "Mr.", "a-b"]])
    assert target.ids == [*map(ord, "desmra-b"), 2]
    assert target.word_ids == [*[0] * 3, *[1] * 2, *[2] * 3, None]
    assert (tokenizer.source_language, tokenizer.target_language) == ("fr", "en")
    assert tokenizer.decode_target([ord("h"), ord("i"), 2]) == ["hi"]


@needs("wpt03-en-fr")
def test_the_gold_sets_french_is_in_the_normal_form_already() -> None:
    """The WPT03 French separates what the normal form does, so that nearly every word stays one token."""
    words = [word for line in lines("wpt03-en-fr/test.src-tgt") for word in line.partition("|||")[2].split()]
    changed = [word for word in words if normalize_word(word, "fr") != (word.lower(),)]
    assert len(words) > 7000
    assert len(changed) < 0.05 * len(words), sorted(set(changed))
