"""Defines what word alignment asks of a translation model's tokenizer, whatever library it comes from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EncodedSentence:
    """The pieces of one sentence.

    Attributes:
        ids: the pieces' ids with the special tokens, as the model reads (source) or emits (target) them.
        word_ids: the index of each piece's word, None for special tokens.
    """

    ids: list[int]
    word_ids: list[int | None]


class TranslationTokenizer(Protocol):
    """Turns words into the pieces of a translation model, and pieces into words.

    Sentences are sequences of words. Padding, the decoder's start token and batching are not its business.
    """

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """What the encoder reads, for example the pieces and ``</s>``.

        Raises:
            InvalidInputError: the pieces of a sentence cannot be attributed to its words.
        """
        ...

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """What the decoder emits (the labels), for example the pieces and ``</s>``.

        Raises:
            InvalidInputError: the pieces of a sentence cannot be attributed to its words.
        """
        ...

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """The words that emitted ids stand for; special tokens stand for nothing."""
        ...


class IdentifiedTokenizer(TranslationTokenizer, Protocol):
    """One that can be told from others: all that come with this package."""

    def digest(self) -> str:
        """A hash of all that decides the pieces."""
        ...


def digest_of(*parts: str) -> str:
    """A hash of texts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
