"""Maps of words from maps of tokens, one example after the other; and examples joined to a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.results.map_layers import STACKS
from captum_norm.text.words import Words, WordScore, words_of_tokens


def words_of_side(
    side: str, tokens: Sequence[Sequence[str]] | None, words: Sequence[Words] | None, count: int
) -> Sequence[Words]:
    """Return the words of each example, given or found by the marks of its tokens.

    Args:
        side: what they are the words of, for messages.
        tokens: the tokens of each example without padding.
        words: the words; None to find them.
        count: the number of examples.

    Raises:
        InvalidInputError: neither is known, or there are not as many.
    """
    if words is None and tokens is None:
        raise InvalidInputError(
            f"got {side} without tokens; give them by with_tokens(...), or create the method with tokenizer="
        )
    found = [words_of_tokens(row) for row in tokens or ()] if words is None else words
    if len(found) != count:
        raise InvalidInputError(f"got the words of {len(found)} examples for {side} of {count}; expected as many")
    return found


def columns_of(words: Words, maps: Tensor, score: WordScore) -> Tensor:
    """Score the columns of words: (..., K) -> (..., W).

    Raises:
        InvalidInputError: the words are of another number of tokens.
    """
    count, keys = len(words.numbers), maps.shape[-1]
    if count != keys:
        raise InvalidInputError(f"got the words of {count} tokens for maps of {keys} keys; expected as many")
    return words.scores(maps, score)


def words_from(words: Words, first: int) -> Words:
    """Return the words of the tokens from one on."""
    own = words.numbers[first:]
    return Words(words.texts[own[0] :], tuple(number - own[0] for number in own), words.pieces[first:])


def first_row(maps: Any, tokens: int, queries: int) -> int | None:
    """Return the first of so many tokens that has a row; None if the only row is of all together."""
    first = tokens - queries
    return None if maps.segmented and first not in (0, maps.cached, maps.before) else first


def words_of_maps(maps: Any, source: Words, target: Words | None, score: WordScore) -> Any:
    """Return the maps of one example's words.

    Args:
        maps: its :class:`captum_norm.AttributionMaps`, without padding.
        source: the words of its tokens.
        target: the words of its decoder's tokens in an encoder–decoder model.
        score: how a column comes from those of its tokens; segments stay.
    """
    changed: dict[str, Any] = {}
    own, first = source, None
    for name in STACKS:
        stack = getattr(maps, name)
        if stack is not None:
            own, keys = (
                source if target is None or side else target for side in (name == "encoder", name != "decoder")
            )
            first = first_row(maps, len(own.numbers), stack.shape[-2])
            found = stack if maps.segmented else columns_of(keys, stack, score)
            changed[name] = found if first is None else words_from(own, first).rows(found)
            queries = changed[name].shape[-2]
    if not changed:
        raise InvalidInputError(f"got maps of {', '.join(maps.towers)} alone, whose positions have no words")
    if maps.mixing_ratio is not None and first is not None:
        changed["mixing_ratio"] = words_from(own, first).scores(maps.mixing_ratio, "mean")
    ones = maps.real.new_ones
    if target is None:
        changed["real"] = ones(1, queries)
    else:
        changed |= {"real": ones(1, len(source.texts)), "decoder_real": ones(1, queries)}
        changed["decoder_tokens"] = [list(target.texts)]
    # A word across the border has a row.
    before = () if first is None else own.numbers[first - maps.cached : first]
    cached = len({*before} - {own.numbers[first or 0]})
    return replace(maps, **changed, tokens=[list(source.texts)], cached=cached, modality=None, patches=(), towers={})


def joined(parts: Sequence[Any]) -> Any:
    """Join maps of single examples, of as many layers, to a batch padded on the right.

    Raises:
        InvalidInputError: rows begin at different columns.
    """
    first = parts[0]
    if len(parts) == 1:
        return first

    def all_of(name: str, axes: int) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else stacked(found, axes)

    if not first.segmented:
        expect_same_start(part.before for part in parts)
    return replace(
        first,
        encoder=all_of("encoder", 2),
        decoder=all_of("decoder", 2),
        cross=all_of("cross", 2),
        mixing_ratio=all_of("mixing_ratio", 1),
        convergence_delta=all_of("convergence_delta", 0),
        real=all_of("real", 1),
        decoder_real=all_of("decoder_real", 1),
        tokens=joined_texts([part.tokens for part in parts]),
        decoder_tokens=joined_texts([part.decoder_tokens for part in parts]),
    )


def expect_same_start(counts: Iterable[int]) -> None:
    """Check that as many columns come before the first row in all examples.

    Raises:
        InvalidInputError: they do not.
    """
    found = sorted(set(counts))
    if len(found) > 1:
        raise InvalidInputError(
            f"got examples with {' and '.join(map(str, found))} words before the first row; take one at a time: "
            "maps[0].words()"
        )


def joined_texts(parts: Sequence[Sequence[Sequence[str]] | None]) -> list[list[str]] | None:
    """Join the texts of single examples, padded with empty ones."""
    rows = [row for part in parts for row in part or ()]
    width = max(map(len, rows), default=0)
    return [[*row, *[""] * (width - len(row))] for row in rows] if rows else None


def stacked(parts: Sequence[Tensor], axes: int) -> Tensor:
    """Concatenate examples, (1, ...) each, padded with zeros at the end of the last axes."""
    most = [max(part.shape[-axis] for part in parts) for axis in range(1, axes + 1)]
    return torch.cat(
        [
            torch.nn.functional.pad(
                part, [pad for axis, size in enumerate(most, 1) for pad in (0, size - part.shape[-axis])]
            )
            for part in parts
        ]
    )
