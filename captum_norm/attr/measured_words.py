"""Measurements of words from measurements of tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from captum_norm.results.map_words import (
    columns_of,
    expect_same_start,
    joined_texts,
    stacked,
    words_from,
    words_of_side,
)
from captum_norm.text.words import Words, WordScore


def words_of_measurements(
    measured: Any, words: Sequence[Words] | None, query_words: Sequence[Words] | None, score: WordScore
) -> Any:
    """Return :class:`captum_norm.Measurements` of words; see there."""
    examples = list(measured)
    keys = words_of_side("measurements", _texts(examples, "tokens"), words, len(examples))
    queries = keys
    if measured.crosses:
        queries = words_of_side("the queries", _texts(examples, "query_tokens"), query_words, len(examples))
    parts = [_of_words(*part, score) for part in zip(examples, keys, queries, strict=True)]
    if not measured.crosses:
        expect_same_start(len(part.tokens[0]) - part.real.shape[1] for part in parts)
    columns = zip(*map(_tensors, parts), strict=True)
    found = replace(
        parts[0],
        **parts[0].changed(lambda _, axes: stacked(next(columns), len({*axes} & {"Q", "K"}))),
        tokens=joined_texts([part.tokens for part in parts]),
        query_tokens=joined_texts([part.query_tokens for part in parts]),
    )
    return replace(found, real_keys=None) if found.real_keys.all() else found


def _texts(examples: Sequence[Any], name: str) -> list[Sequence[str]] | None:
    """The tokens of each example, if they are known."""
    texts = [getattr(one, name) for one in examples]
    return None if None in texts else [row for (row,) in texts]


def _of_words(measured: Any, keys: Words, queries: Words, score: WordScore) -> Any:
    """One example's measurements of words."""
    first = len(queries.numbers) - measured.real.shape[1]
    rows = words_from(queries, first)

    def own(values: Tensor, axes: str) -> Tensor:
        if axes in ("BQ", "BK"):
            return values.new_ones(1, len((rows if axes == "BQ" else keys).texts))
        if "K" in axes:
            values = columns_of(keys, values, score)
        if "Q" in axes:
            axis = axes.index("Q")
            values = rows.scores(values.movedim(axis, -1), "mean").movedim(-1, axis)
        return values

    # A word across the border has a row.
    before = {*queries.numbers[first - measured.cached : first]} - {queries.numbers[first]}
    real_keys = measured.real.new_ones(1, len(keys.numbers))
    return replace(
        measured,
        **replace(measured, real_keys=real_keys).changed(own),
        tokens=[keys.texts],
        query_tokens=[queries.texts] if measured.crosses else None,
        cached=len(before),
        modality=None,
        patches=(),
    )


def _tensors(measured: Any) -> list[Tensor]:
    """All tensors, in the order of the fields."""
    found: list[Tensor] = []

    def noted(values: Tensor, _: str) -> Tensor:
        found.append(values)
        return values

    measured.changed(noted)
    return found
