"""Brings French and English words into the normal form of the shipped models.

Gold alignments index the words of a tokenised sentence, so words are normalised one at a time: ``normalize_word`` turns
a word into the tokens that the models read, and links of these tokens map back to the word. Training text was first
tokenised with ``tokenize``, then normalised in the same way.

The form is that of the WPT03 French, which undoes elision and contraction regardless of gender (``l'`` is ``le``,
``s'`` is ``se``, ``du`` is ``de le``), separates hyphens and drops the ``-t-`` of an inversion. Accents are kept: both
gold sets have them, and ``à`` and ``a``, ``où`` and ``ou`` are different words.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

from alignment.tokenization import EncodedSentence, IdentifiedTokenizer, digest_of

if TYPE_CHECKING:
    from sacremoses import MosesTokenizer

Language = Literal["en", "fr"]

# NFKC would turn some of these into a space and a combining mark, and leave others unchanged.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4`\u02bc", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        # Invisible: soft hyphen, zero-width space, direction marks, byte order mark.
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\ufeff", ""),
        # SentencePiece's mark for a space.
        "\u2581": "_",
        "\u0153": "oe",
        "\u0152": "OE",
    }
)

_ELIDED = {
    "c'": "ce",
    "d'": "de",
    "entr'": "entre",
    "j'": "je",
    "jusqu'": "jusque",
    "l'": "le",
    "lorsqu'": "lorsque",
    "m'": "me",
    "n'": "ne",
    "presqu'": "presque",
    "puisqu'": "puisque",
    "qu'": "que",
    "quelqu'": "quelque",
    "quoiqu'": "quoique",
    "s'": "se",
    "t'": "te",
}

_CONTRACTED = {"au": ("à", "le"), "aux": ("à", "les"), "des": ("de", "les"), "du": ("de", "le")}

# A part of Europarl lost its œ; it is restored where the rest is no other French word.
_LOST_LIGATURE = re.compile(r"(man|)u(?=vr)|(ch|c|ranc)u(?=rs?$)|(b|)u(?=fs?$)|(n)u(?=ds?$)|(s)u(?=rs$)|(v)u(?=x$)")

_ABBREVIATION = re.compile(r"[^\W\d_]+\.")


def clean(text: str) -> str:
    """Return ``text`` in Unicode form NFKC, with one kind of apostrophe, quotation mark and dash, and oe for œ."""
    return unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)


# Most words of a text come again.
@lru_cache(maxsize=1 << 16)
def normalize_word(word: str, language: Language) -> tuple[str, ...]:
    """The tokens for one word of a tokenised sentence: usually one, none for invisible characters.

    >>> normalize_word("Mr.", "en"), normalize_word("two-thirds", "en")
    (('mr',), ('two', '-', 'thirds'))
    >>> normalize_word("L'", "fr"), normalize_word("des", "fr"), normalize_word("prendra-t-il", "fr")
    (('le',), ('de', 'les'), ('prendra', 'il'))
    """
    tokens: list[str] = []
    for part in clean(word).lower().split():
        if _ABBREVIATION.fullmatch(part):
            # Europarl mostly has Mr, the gold sets Mr.; other words of tokenised text have no full stop.
            tokens.append(part[:-1])
        else:
            tokens.extend(_split(part, language))
    return tuple(tokens)


def normalize_words(words: list[str], language: Language) -> list[str]:
    """The tokens of all words of a tokenised sentence, as one list."""
    return [token for word in words for token in normalize_word(word, language)]


class NormalizedWords:
    """A model's tokenizer, which first turns each word into tokens by :func:`normalize_word`."""

    def __init__(self, tokenizer: IdentifiedTokenizer, source: Language, target: Language) -> None:
        self._tokenizer = tokenizer
        self.source_language, self.target_language = source, target

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode source sentences; word ids refer to the words before normalisation."""
        return _encode(self._tokenizer.encode_source, sentences, self.source_language)

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode target sentences; word ids refer to the words before normalisation."""
        return _encode(self._tokenizer.encode_target, sentences, self.target_language)

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """Decode emitted ids into words in normal form."""
        return self._tokenizer.decode_target(ids)

    def digest(self) -> str:
        """A hash of everything that determines the pieces."""
        return digest_of("normal form", self.source_language, self.target_language, self._tokenizer.digest())


def _encode(
    encode: Callable[[Sequence[Sequence[str]]], list[EncodedSentence]],
    sentences: Sequence[Sequence[str]],
    language: Language,
) -> list[EncodedSentence]:
    tokens = [
        [(token, index) for index, word in enumerate(words) for token in normalize_word(word, language)]
        for words in sentences
    ]
    encoded = encode([[token for token, _ in sentence] for sentence in tokens])
    return [
        EncodedSentence(pieces.ids, [None if token is None else sentence[token][1] for token in pieces.word_ids])
        for pieces, sentence in zip(encoded, tokens, strict=True)
    ]


def tokenize(text: str, language: Language) -> list[str]:
    """Split raw ``text`` into words as Moses does; a French apostrophe stays with the elided word.

    >>> tokenize("C’est l’heure.", "fr")
    ["C'", 'est', "l'", 'heure', '.']
    """
    words: list[str] = []
    for word in _moses(language).tokenize(clean(text), aggressive_dash_splits=False, escape=False):
        # Moses splits off an apostrophe that is not followed by a letter, as in l'"Europe" and l' Europe.
        if language == "fr" and word == "'" and words and f"{words[-1].lower().rpartition('-')[2]}'" in _ELIDED:
            words[-1] += "'"
        else:
            words.append(word)
    return words


def _split(part: str, language: Language) -> list[str]:
    if set(part) == {"-"}:
        return ["-"]
    if language == "fr":
        part = re.sub(r"(?<=\w)-t-(?=\w)", " ", part)
        pieces = re.findall(r"-|\s|[^\s'-]+'?|'", part)
        return [token for piece in pieces if not piece.isspace() for token in _french(piece)]
    return re.findall(r"-|[^'-]+|'[^'-]*", part)


def _french(word: str) -> tuple[str, ...]:
    if word in _ELIDED:
        return (_ELIDED[word],)
    if word in _CONTRACTED:
        return _CONTRACTED[word]
    lost = _LOST_LIGATURE.match(word)
    return (f"{word[: lost.end() - 1]}oe{word[lost.end() - 1 :]}" if lost else word,)


@cache
def _moses(language: Language) -> "MosesTokenizer":
    from sacremoses import MosesTokenizer

    return MosesTokenizer(language)
