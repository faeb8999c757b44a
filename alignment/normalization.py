"""Brings French and English words into the normal form of the shipped models.

Gold alignments count words of a tokenised sentence, so everything here that changes a word is a pure function of that
one word: ``normalize_word`` turns it into the tokens which the models read, and an alignment of these tokens goes back
to the words they came from. Training text is tokenised first, with ``tokenize``, then treated word by word alike.

The form is that of the WPT03 French, which undoes elision and contraction whatever the gender of what follows
(``l'`` is ``le``, ``s'`` is ``se``, ``du`` is ``de le``), separates hyphens and leaves out the ``-t-`` of an inversion.
Accents are kept: both gold sets write them, and ``à`` and ``a``, ``où`` and ``ou`` are different words.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

from alignment.tokenization import EncodedSentence, IdentifiedTokenizer, digest_of

if TYPE_CHECKING:
    from sacremoses import MosesTokenizer

Language = Literal["en", "fr"]

# NFKC would turn some of these into a space and a combining mark, others it leaves as they are.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4`\u02bc", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        # Invisible: soft hyphen, zero-width space, direction marks, byte order mark.
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\ufeff", ""),
        # The mark of SentencePiece for a space.
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

# A part of Europarl lost its œ, and with it the word; only what cannot be another French word is restored.
_LOST_LIGATURE = re.compile(r"(man|)u(?=vr)|(ch|c|ranc)u(?=rs?$)|(b|)u(?=fs?$)|(n)u(?=ds?$)|(s)u(?=rs$)|(v)u(?=x$)")

_ABBREVIATION = re.compile(r"[^\W\d_]+\.")


def clean(text: str) -> str:
    """``text`` in Unicode form NFKC, with one kind of apostrophe, of quotation mark and of dash, and without œ."""
    return unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)


def normalize_word(word: str, language: Language) -> list[str]:
    """The tokens that stand for one word of a tokenised sentence: usually one, and none if nothing of it is visible.

    >>> normalize_word("Mr.", "en"), normalize_word("two-thirds", "en")
    (['mr'], ['two', '-', 'thirds'])
    >>> normalize_word("L'", "fr"), normalize_word("des", "fr"), normalize_word("prendra-t-il", "fr")
    (['le'], ['de', 'les'], ['prendra', 'il'])
    """
    tokens: list[str] = []
    for part in clean(word).lower().split():
        if _ABBREVIATION.fullmatch(part):
            # Europarl mostly writes Mr, the gold sets Mr.; in tokenised text, no other word keeps its full stop.
            tokens.append(part[:-1])
        else:
            tokens.extend(_split(part, language))
    return tokens


def normalize_words(words: list[str], language: Language) -> list[str]:
    """The tokens of all words of a tokenised sentence, in a row."""
    return [token for word in words for token in normalize_word(word, language)]


class NormalizedWords:
    """A tokenizer for words that are not yet in the normal form its model was trained on.

    Each word goes through :func:`normalize_word`; the pieces of all tokens that come of it are this word's.

    Args:
        tokenizer: the model's own.
        source: language of the source.
        target: language of the target.
    """

    def __init__(self, tokenizer: IdentifiedTokenizer, source: Language, target: Language) -> None:
        self._tokenizer = tokenizer
        self.source_language, self.target_language = source, target

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """What the encoder reads, with the index of the given word for each piece."""
        return _encode(self._tokenizer.encode_source, sentences, self.source_language)

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """What the decoder emits, with the index of the given word for each piece."""
        return _encode(self._tokenizer.encode_target, sentences, self.target_language)

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """The words that emitted ids stand for, in normal form."""
        return self._tokenizer.decode_target(ids)

    def digest(self) -> str:
        """A hash of all that decides the pieces."""
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
        EncodedSentence(pieces.ids, [None if place is None else sentence[place][1] for place in pieces.word_ids])
        for pieces, sentence in zip(encoded, tokens, strict=True)
    ]


def tokenize(text: str, language: Language) -> list[str]:
    """The words of raw ``text`` as Moses separates them, a French apostrophe ending the elided word.

    >>> tokenize("C’est l’heure.", "fr")
    ["C'", 'est', "l'", 'heure', '.']
    """
    words: list[str] = []
    for word in _moses(language).tokenize(clean(text), aggressive_dash_splits=False, escape=False):
        # Moses separates an apostrophe that no letter follows, as in l'"Europe" and l' Europe.
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
