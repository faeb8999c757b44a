"""Explanations of tokens become explanations of words."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_norm.checks import one_of
from captum_norm.errors import InvalidInputError
from captum_norm.text.words import WORD_MEASURES, Words, WordScore, words_of


def words_of_texts(tokenizer: Any, ids: Tensor, real: Tensor, texts: Sequence[str], virtual: int = 0) -> list[Words]:
    """Find the words of each text's tokens without padding, virtual tokens first, each a word of its own.

    Args:
        tokenizer: the tokenizer.
        ids: the token ids, (B, S).
        real: False at padding, (B, S).
        texts: the B texts.
        virtual: the number of virtual tokens.
    """
    names = [f"[virtual {place}]" for place in range(1, virtual + 1)]
    rows = zip(ids.cpu(), real, texts, strict=True)
    return [words_of(tokenizer, row[kept].tolist(), text).behind(names) for row, kept, text in rows]


def by_words(explanation: Any, score: WordScore) -> Any:
    """Return the explanation of words, whose scores and maps come from those of their tokens."""
    one_of("score", score, WORD_MEASURES[:3])
    parts = list(zip(explanation.words_of_tokens, explanation, strict=True))
    scores = [own.scores(one.scores[0], score) for own, one in parts]
    squares = [None if one.squares is None else own.maps(one.squares, score) for own, one in parts]
    return with_words(explanation, scores, [square for square in squares if square is not None])


def with_words(explanation: Any, scores: Sequence[Tensor], squares: Sequence[Tensor]) -> Any:
    """Replace tokens by words.

    Args:
        explanation: the :class:`captum_norm.Explanation`.
        scores: the scores of each text's words, (W,).
        squares: the maps of each text's words, (1, L, [H,] W, W); none if the method has no maps.
    """
    words, maps = explanation.words_of_tokens, explanation.maps
    size = max(len(own.texts) for own in words)
    real = torch.stack([torch.arange(size) < len(own.texts) for own in words])
    tokens = [[*own.texts, *[""] * (size - len(own.texts))] for own in words]
    position = explanation.position
    if isinstance(position, int) and len(words) == 1:
        position = words[0].numbers[position]
    if maps is not None and squares:
        padded = (pad(one, (0, size - one.shape[-1], 0, size - one.shape[-1])) for one in squares)
        own = {"encoder" if maps.decoder is None else "decoder": torch.cat(list(padded))}
        maps = replace(maps, **own, real=real.to(maps.real.device), mixing_ratio=None, tokens=tokens, virtual=0)
    return replace(
        explanation,
        position=position,
        tokens=tokens,
        real=real,
        scores=torch.stack([pad(own, (0, size - len(own))) for own in scores]),
        maps=maps,
        graphs=(),
        words_of_tokens=[Words(own.texts, tuple(range(len(own.texts))), own.texts) for own in words],
    )


def norms_of_words(
    method: Any, inputs: Any, words: Words, layers: Sequence[int], position: Any, *, one_layer: bool
) -> tuple[Tensor, Tensor]:
    """Score the words of one text by the norms of their tokens' vectors added.

    Args:
        method: a method whose maps are of vectors.
        inputs: the text's inputs, without padding.
        words: its words.
        layers: the layers.
        position: the output position; a word's row is the mean of its tokens' rows.
        one_layer: whether a single layer is explained.

    Returns:
        the scores, (W,), and the maps of words, (1, L, W, W).

    Raises:
        InvalidInputError: the method adds no vectors.
    """
    if not getattr(method, "segmented", False) or not getattr(method, "decomposes", False):
        name = getattr(method, "name", type(method).__name__)
        raise InvalidInputError(f"the method {name} has no vectors to add; score words by sum, mean or max")
    found = method.maps(inputs, layers=layers, segments=words.segments())
    name = "encoder" if found.decoder is None else "decoder"
    count, real = len(words.texts), torch.ones(1, len(words.texts), dtype=torch.bool, device=found.real.device)
    square = words.rows(found.self_attention)
    maps = replace(found, **{name: square}, real=real, mixing_ratio=None, tokens=[words.texts], segmented=False)
    if isinstance(position, int):
        if not -len(words.numbers) <= position < len(words.numbers):
            raise InvalidInputError(
                f"got position {position}; the sequence has {len(words.numbers)} positions, 0 to "
                f"{len(words.numbers) - 1}"
            )
        position = words.numbers[position]
    scores = method.scores(maps, position, aggregate=not one_layer)
    return scores[0, :count].cpu(), square
