"""Defines the interface that word alignment needs from a tokenizer, independent of its library."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from captum_norm import InvalidInputError
from captum_norm.checks import quoted

Languages = tuple[str | None, str | None]
"""Source and target language; None for one that is unknown."""


@dataclass(frozen=True, slots=True)
class EncodedSentence:
    """The pieces of one sentence.

    Attributes:
        ids: the ids of pieces and special tokens, as the model reads (source) or emits (target) them.
        word_ids: the index of each piece's word, None for special tokens.
        types: the type of each piece that a model of sentence pairs reads; empty if it reads none.
    """

    ids: list[int]
    word_ids: list[int | None]
    types: list[int] = field(default_factory=list, repr=False)

    def after(self, words: int) -> "EncodedSentence":
        """The same pieces, of words that come after others."""
        return replace(self, word_ids=[None if index is None else words + index for index in self.word_ids])


def check_words(sentences: Sequence[Sequence[str]]) -> None:
    """Refuse a text in place of sentences or of the words of one."""
    for text in (sentences, *sentences):
        if isinstance(text, str):
            raise InvalidInputError(f"got the string {quoted(text)}; expected a list of sentences, [text.split()]")


class TranslationTokenizer(Protocol):
    """Encodes words as a translation model's pieces, and decodes pieces into words.

    Sentences are sequences of words; pieces that cannot be attributed to them raise an InvalidInputError. Callers add
    padding and the decoder's start token.
    """

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode source sentences: what the encoder reads, for example the pieces and ``</s>``."""
        ...

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode target sentences: what the decoder emits (the labels), for example the pieces and ``</s>``."""
        ...

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """Decode emitted ids into words, without special tokens."""
        ...


class IdentifiedTokenizer(TranslationTokenizer, Protocol):
    """A tokenizer with a digest, as all tokenizers of this package have."""

    def digest(self) -> str:
        """A hash of everything that determines the pieces."""
        ...


def languages_of(tokenizer: object) -> Languages:
    """The source and target language that a tokenizer names; None for one that it does not know."""
    named: tuple[str, str] | None = getattr(tokenizer, "languages", None)
    return named or (getattr(tokenizer, "source_language", None), getattr(tokenizer, "target_language", None))


def digest_of(*parts: str) -> str:
    """A hash of strings."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
