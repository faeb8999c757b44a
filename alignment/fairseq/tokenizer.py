"""Encodes words as ids and decodes ids into words, for a fairseq model."""

from collections.abc import Sequence
from functools import lru_cache

from alignment.fairseq.dictionary import EOS, UNK, Dictionary
from alignment.fairseq.segmentation import Segmenter
from alignment.subwords import encode_words
from alignment.tokenization import EncodedSentence, digest_of

_CACHED_WORDS = 100_000


class FairseqTokenizer:
    """The tokenizer of a fairseq translation model; a :class:`~alignment.tokenization.TranslationTokenizer`.

    Words are split one by one if their pieces do not depend on the sentence; pieces that are not in the dictionary
    become ``<unk>``. Both sides end with ``</s>``.

    Args:
        source: language, dictionary and segmenter of the source.
        target: language, dictionary and segmenter of the target.

    Attributes:
        source_language: the source language, as named in fairseq, such as ``fr``.
        target_language: the target language.

    >>> from alignment.fairseq.dictionary import SPECIAL
    >>> from alignment.fairseq.segmentation import NoSegmenter
    >>> symbols = (*SPECIAL, "das", "Haus")
    >>> dictionary = Dictionary(symbols, {symbol: index for index, symbol in enumerate(symbols)})
    >>> tokenizer = FairseqTokenizer(("de", dictionary, NoSegmenter()), ("en", dictionary, NoSegmenter()))
    >>> tokenizer.encode_source([["das", "alte", "Haus"]])
    [EncodedSentence(ids=[4, 3, 5, 2], word_ids=[0, 1, 2, None])]
    >>> tokenizer.decode_target([4, 3, 5, 2])
    ['das', '<unk>', 'Haus']
    """

    def __init__(self, source: tuple[str, Dictionary, Segmenter], target: tuple[str, Dictionary, Segmenter]) -> None:
        self.source_language, self.target_language = source[0], target[0]
        self._source, self._target = _Side(*source[1:]), _Side(*target[1:])

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode source sentences: the pieces that the encoder reads, and ``</s>``.

        Raises:
            InvalidInputError: the pieces of a sentence cannot be attributed to its words.
        """
        return [self._source.encode(words) for words in sentences]

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode target sentences: the pieces that the decoder emits, and ``</s>``.

        Raises:
            InvalidInputError: the pieces of a sentence cannot be attributed to its words.
        """
        return [self._target.encode(words) for words in sentences]

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """Decode emitted ids into words; ``<unk>`` is kept, other special symbols are dropped."""
        return self._target.decode(ids)

    def digest(self) -> str:
        """A hash of everything that determines the pieces: languages, dictionaries and segmenters."""
        sides = (self._source, self._target)
        parts = [part for side in sides for part in (side.segmenter.digest(), *side.dictionary.symbols)]
        return digest_of(self.source_language, self.target_language, *parts)


class _Side:
    """The tokenizer of one language."""

    def __init__(self, dictionary: Dictionary, segmenter: Segmenter) -> None:
        self.dictionary, self.segmenter = dictionary, segmenter
        self.encode_word = lru_cache(_CACHED_WORDS)(lambda word: self._ids(segmenter.cut([word])[0]))

    def __reduce__(self) -> tuple[type["_Side"], tuple[Dictionary, Segmenter]]:
        return _Side, (self.dictionary, self.segmenter)  # without the cache, which cannot be pickled

    def encode(self, words: Sequence[str]) -> EncodedSentence:
        if self.segmenter.by_word:
            ids, owners = encode_words(words, self.encode_word)
            return EncodedSentence([*ids, EOS], [*owners, None])
        pieces, word_ids = self.segmenter.cut(words)
        return EncodedSentence([*self._ids(pieces), EOS], [*word_ids, None])

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self.segmenter.join([self.dictionary.symbols[index] for index in ids if index >= UNK])

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [self.dictionary.index(piece) for piece in pieces]
