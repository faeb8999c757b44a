"""Words to ids and back."""

from collections.abc import Sequence

from alignment.fairseq import FairseqTokenizer
from alignment.fairseq.tokenizer import SPECIAL, Dictionary, Segmenter
from alignment.subwords import encode_words
from alignment.tokenization import EncodedSentence, TranslationTokenizer


class Letters(Segmenter):
    """One piece a letter; counts what it is asked."""

    by_word = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cut(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        self.asked += words
        return encode_words(words, list)

    def join(self, pieces: Sequence[str]) -> list[str]:
        return "".join(pieces).split("_")

    def digest(self) -> str:
        return type(self).__name__


class Whole(Letters):
    """Knows whole sentences only: a mark before every word but the first."""

    by_word = False

    def cut(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        pieces = [[*"_" * (index > 0), *word] for index, word in enumerate(words)]
        return encode_words(words, lambda _: pieces.pop(0))


def dictionary(*pieces: str) -> Dictionary:
    symbols = (*SPECIAL, *pieces)
    return Dictionary(symbols, {symbol: index for index, symbol in enumerate(symbols)})


def test_sides_have_their_own_dictionaries_and_segmenters() -> None:
    tokenizer: TranslationTokenizer = FairseqTokenizer(
        ("fr", dictionary("a", "b"), Letters()), ("en", dictionary("ab", "c"), Segmenter())
    )
    words = ["ab", "c"]
    assert tokenizer.encode_source([words, []]) == [
        EncodedSentence([4, 5, 3, 2], [0, 0, 1, None]),
        EncodedSentence([2], [None]),
    ]
    assert tokenizer.encode_target([words]) == [EncodedSentence([4, 5, 2], [0, 1, None])]


def test_languages() -> None:
    tokenizer = FairseqTokenizer(("fr", dictionary(), Segmenter()), ("en", dictionary(), Segmenter()))
    assert (tokenizer.source_language, tokenizer.target_language) == ("fr", "en")


def test_words_are_cut_once() -> None:
    letters = Letters()
    tokenizer = FairseqTokenizer(("fr", dictionary("a"), letters), ("en", dictionary(), Letters()))
    first, second = tokenizer.encode_source([["a", "aa"], ["aa", "a", "a"]])
    assert (first.ids, second.ids) == ([4, 4, 4, 2], [4, 4, 4, 4, 2])
    assert letters.asked == ["a", "aa"]


def test_sentences_of_segmenters_that_need_them_whole() -> None:
    side = ("fr", dictionary("_", "a", "b"), Whole())
    [sentence] = FairseqTokenizer(side, side).encode_source([["ab", "b", "ab"]])
    assert sentence == EncodedSentence([5, 6, 4, 6, 4, 5, 6, 2], [0, 0, 1, 1, 2, 2, 2, None])


def test_ids_become_words() -> None:
    tokenizer = FairseqTokenizer(("fr", dictionary(), Segmenter()), ("en", dictionary("a", "b", "_"), Letters()))
    assert tokenizer.decode_target([2, 4, 5, 6, 3, 4, 2, 1, 1, 0]) == ["ab", "<unk>a"]
