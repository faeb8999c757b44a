"""Word ids of pieces, by hand and from real tokenizers, and word maps of piece maps."""

import unicodedata
from collections.abc import Callable

import pytest

from alignment.subwords import sentencepiece_text, word_ids_from_offsets, word_ids_from_pieces
from captum_norm import InvalidInputError

# Mark, pieces, words, word ids.
BY_HAND = [
    ("▁", "▁die ▁H äus er", "die Häuser", [0, 1, 1, 1]),
    ("▁", "die ▁H äus er", "die Häuser", [0, 1, 1, 1]),  # no dummy prefix
    ("▁", "▁ die ▁ Häuser ▁", "die Häuser", [0, 0, 1, 1, 1]),  # lone marks
    ("▁", "die▁ H äuser▁", "die Häuser", [0, 1, 1]),  # white space as suffix
    ("▁", "▁a <0xE2> <0x98> <0x83> b ▁c", "a☃b c", [0, 0, 0, 0, 0, 1]),  # byte fallback
    ("▁", "▁a <unk> b ▁ <unk>", "a☃☃b ☃", [0, 0, 0, 1, 1]),
    ("▁", "", "", []),
    ("@@", "die H@@ äus@@ er", "die Häuser", [0, 1, 1, 1]),
    ("@@", "a@@ @@@ b", "a@ b", [0, 0, 1]),
    ("</w>", "die</w> H äus er</w>", "die Häuser", [0, 1, 1, 1]),
]


def text_of(mark: str) -> Callable[[str], bytes]:
    return sentencepiece_text if mark == "▁" else lambda piece: piece.removesuffix(mark).encode()


@pytest.mark.parametrize(("mark", "pieces", "words", "expected"), BY_HAND)
def test_word_ids_by_hand(mark: str, pieces: str, words: str, expected: list[int]) -> None:
    assert word_ids_from_pieces(words.split(), pieces.split(), text_of(mark)) == expected


def test_words_are_compared_after_the_tokenizers_normalisation() -> None:
    def normalize(word: str) -> str:
        return unicodedata.normalize("NFKC", word).lower()

    words = ["Ｈａｕｓ", "\u200a", "½", "…", "1\u00a0000"]
    pieces = ["▁haus", "▁1", "⁄", "2", "▁...", "▁1", "▁000"]
    ids = word_ids_from_pieces(words, pieces, sentencepiece_text, normalize=normalize)
    assert ids == [0, 2, 2, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ("▁die ▁Maus", r"got the piece '▁Maus', expected 'Häuser' of word 1 \('Häuser'\)"),
        ("▁die ▁Häu ▁sse", r"got the piece '▁sse', expected 'ser' of word 1"),
        ("▁die ▁Häuser ▁am", "got the piece '▁am' after the last word"),
        ("▁die ▁Häu", "got no more piece, expected 'ser' of word 1"),
        ("▁dieHäuser", "got the piece '▁dieHäuser', expected 'die' of word 0"),
        ("▁die <unk> ▁Häuser", "got the piece '▁Häuser', expected 'äuser' of word 1"),
        ("", "got no more piece, expected 'die' of word 0"),
    ],
)
def test_word_where_the_texts_part_is_named(pieces: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        word_ids_from_pieces(["die", "Häuser"], pieces.split(), sentencepiece_text)


def test_offsets_with_spaces_on_either_side() -> None:
    words = ["ab", "c", "de"]
    assert word_ids_from_offsets(words, [(0, 3), (3, 5), (5, 7)], [0, 0, 0]) == [0, 1, 2]
    assert word_ids_from_offsets(words, [(0, 2), (2, 3), (3, 4), (4, 7), (7, 7)], [0, 0, 0, 0, 0]) == [0, 1, 1, 2, 2]
    assert word_ids_from_offsets(words, [(0, 0), (0, 2), (2, 4), (4, 7)], [True, False, False, False])[0] is None


@pytest.mark.parametrize(
    ("offsets", "mask", "message"),
    [
        ([(0, 2)], [0, 0], "got 1 offsets and 2 mask entries"),
        ([(0, 9)], [0], "got offsets 0 to 9 in a text of 7 characters"),
        ([(0, 4)], [0], "got the piece 'ab c', which spans words 0 to 1"),
        ([(0, 2), (0, 0)], [0, 1], r"got no piece from word 1 \('c'\) on"),
        ([(0, 2), (2, 4), (4, 6)], [0, 0, 0], r"got no piece from word 2 \('de'\) on"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets: list[tuple[int, int]], mask: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        word_ids_from_offsets(["ab", "c", "de"], offsets, mask)
