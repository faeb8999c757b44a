"""Word ids of pieces, by hand and from real tokenizers, and word maps of piece maps."""

import unicodedata

import numpy as np
import pytest

from alignment import (
    PIECE_SCHEMES,
    PieceScheme,
    merge_pieces,
    word_ids_from_offsets,
    word_ids_from_pieces,
)
from captum_norm import InvalidInputError

# Scheme, pieces, words, word ids. S is the special piece </s>.
S = "</s>"
BY_HAND: list[tuple[str, str, str, list[int | None]]] = [
    ("sentencepiece", "▁die ▁H äus er </s>", "die Häuser", [0, 1, 1, 1, None]),
    ("sentencepiece", "die ▁H äus er </s>", "die Häuser", [0, 1, 1, 1, None]),  # no dummy prefix
    ("sentencepiece", "▁ die ▁ Häuser ▁", "die Häuser", [0, 0, 1, 1, 1]),  # lone marks
    ("sentencepiece", "die▁ H äuser▁", "die Häuser", [0, 1, 1]),  # white space as suffix
    ("sentencepiece", "▁a <0xE2> <0x98> <0x83> b ▁c", "a☃b c", [0, 0, 0, 0, 0, 1]),  # byte fallback
    ("sentencepiece", "▁a <unk> b ▁ <unk> </s>", "a☃☃b ☃", [0, 0, 0, 1, 1, None]),
    ("subword-nmt", "die H@@ äus@@ er </s>", "die Häuser", [0, 1, 1, 1, None]),
    ("subword-nmt", "a@@ @@@ b", "a@ b", [0, 0, 1]),
    ("end-of-word", "die</w> H äus er</w>", "die Häuser", [0, 1, 1, 1]),
    ("wordpiece", "die H ##äus ##er [UNK] .", "die Häuser ☃☃☃ .", [0, 1, 1, 1, 2, 3]),
    ("wordpiece", "[UNK] [UNK]", "☃☃ ☃☃", [0, 1]),
    ("byte-level", "die ĠH Ã ¤ us er", "die Häuser", [0, 1, 1, 1, 1, 1]),
    ("byte-level", "die Ġ Häuser".replace("ä", "Ã¤"), "die Häuser", [0, 1, 1]),
]


@pytest.mark.parametrize(("scheme", "pieces", "words", "expected"), BY_HAND)
def test_word_ids_by_hand(scheme: str, pieces: str, words: str, expected: list[int | None]) -> None:
    assert word_ids_from_pieces(words.split(), pieces.split(), PIECE_SCHEMES[scheme], special={S}) == expected


def test_words_are_compared_after_the_tokenizers_normalisation() -> None:
    def normalize(word: str) -> str:
        return unicodedata.normalize("NFKC", word).lower()

    words = ["Ｈａｕｓ", "\u200a", "½", "…", "1\u00a0000"]
    pieces = ["▁haus", "▁1", "⁄", "2", "▁...", "▁1", "▁000"]
    ids = word_ids_from_pieces(words, pieces, PIECE_SCHEMES["sentencepiece"], normalize=normalize)
    assert ids == [0, 2, 2, 2, 3, 4, 4]


def test_a_scheme_of_ones_own() -> None:
    scheme = PieceScheme(lambda piece: piece.strip("|").encode())
    assert word_ids_from_pieces(["ab", "c"], ["|a", "b|", "|c|"], scheme) == [0, 0, 1]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ("▁die ▁Maus", r"got the piece '▁Maus', expected 'Häuser' of word 1 \('Häuser'\)"),
        ("▁die ▁Häu ▁sse", r"got the piece '▁sse', expected 'ser' of word 1"),
        ("▁die ▁Häuser ▁am", "got the piece '▁am' after the last word"),
        ("▁die ▁Häuser </s>", "got the piece '</s>' after the last word, expected the end; name the special pieces"),
        ("▁die ▁Häu", "got no more piece, expected 'ser' of word 1"),
        ("▁dieHäuser", "got the piece '▁dieHäuser', expected 'die' of word 0"),
        ("▁die <unk> ▁Häuser", "got the piece '▁Häuser', expected 'äuser' of word 1"),
        ("", "got no more piece, expected 'die' of word 0"),
    ],
)
def test_word_where_the_texts_part_is_named(pieces: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        word_ids_from_pieces(["die", "Häuser"], pieces.split(), PIECE_SCHEMES["sentencepiece"])


def test_piece_of_another_tokenizer_is_named() -> None:
    with pytest.raises(InvalidInputError, match="got '▁' in the piece '▁die', which byte-level BPE never writes"):
        word_ids_from_pieces(["die"], ["▁die"], PIECE_SCHEMES["byte-level"])


def test_sentence_without_words() -> None:
    assert word_ids_from_pieces([], [S], PIECE_SCHEMES["sentencepiece"], special={S}) == [None]
    assert word_ids_from_pieces([], [], PIECE_SCHEMES["sentencepiece"]) == []
    assert word_ids_from_offsets([], [(0, 0)], [1]) == [None]


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


@pytest.mark.parametrize("leading", [(), (3,), (2, 4)])
def test_merging_sums_over_source_and_averages_over_target_pieces(leading: tuple[int, ...]) -> None:
    source_ids, target_ids = (
        [None, 0, 0, 2, None],
        [None, 1, 1, 0, 1, None],
    )  # source word 1 and target word 2: no piece
    maps = np.random.default_rng(0).random((*leading, 6, 5))
    merged = merge_pieces(maps, target_ids, source_ids, target_words=3, source_words=3)
    assert merged.shape == (*leading, 3, 4)
    for index in np.ndindex(*leading):
        for target in range(3):
            rows = [row for row, word in zip(maps[index].tolist(), target_ids, strict=True) if word == target]
            for column, source in enumerate([0, 1, 2, None]):
                sums = [sum(x for x, word in zip(row, source_ids, strict=True) if word == source) for row in rows]
                mean = sum(sums) / len(sums) if sums else 0
                assert merged[(*index, target, column)] == pytest.approx(mean, rel=1e-14)


@pytest.mark.parametrize(
    ("target_ids", "source_ids", "message"),
    [
        ([0], [0, 1], r"got a map of shape \(2, 2\), expected \(\.\.\., 1, 2\)"),
        ([0, 2], [0, 1], r"got word ids \[0, 2\], expected indices of 2 words"),
        ([0, 1], [-1, 1], r"got word ids \[-1, 1\]"),
    ],
)
def test_ids_that_do_not_fit_are_refused(target_ids: list[int], source_ids: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        merge_pieces(np.ones((2, 2)), target_ids, source_ids, target_words=2, source_words=2)
