"""Transforms word maps before an alignment is read off them.

A word map is a float array (T, S + 1): one row per target word, one column per source word and, last, the null column
for what belongs to no source word. With ``null=False`` it has no null column and is (T, S). Maps are finite and, unless
it is said, not negative; others raise :class:`~captum_norm.errors.InvalidInputError`, as do numbers that are not as
described. Functions return maps of the same shape, in float64.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captum_norm import InvalidInputError

WordMap = NDArray[np.float64]
"""(T, S + 1) with the null column last, or (T, S) without one."""

_LEAST = 1e-300  # what a sum is divided by at least: its entries stay finite, and zeros stay zeros


def normalize_rows(word_map: ArrayLike, *, null: bool = True) -> WordMap:
    """Divide each row by its sum, null column included; rows of zeros stay zeros.

    >>> normalize_rows([[3, 1], [0, 0]]).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    matrix = checked_map(word_map, null=null)
    sums = matrix.sum(1, keepdims=True)
    normalized: WordMap = np.divide(matrix, sums, out=np.zeros_like(matrix), where=sums > 0)
    return normalized


def sinkhorn(word_map: ArrayLike, *, iterations: int = 100, tolerance: float = 1e-9, null: bool = True) -> WordMap:
    """Normalise rows and columns in turn until both have their sums [Sinkhorn 1967].

    Rows are first normalised to sum to 1, null column included; the null column then stays fixed. The remaining mass
    is shared equally by the source columns: each sums to (T − sum of the null column) / S. Rows and columns of zeros
    stay zeros and get no share. It stops when the Euclidean norm of the columns' deviations is at most ``tolerance``;
    zeros in the map can make the sums unattainable, and the columns then come as close as ``iterations`` allow.

    >>> sinkhorn([[2.0, 1.0], [1.0, 2.0]], null=False).round(3).tolist()
    [[0.667, 0.333], [0.333, 0.667]]
    """
    result = normalize_rows(word_map, null=null)
    words = np.ascontiguousarray(split_null(result, null=null)[0])
    # Small maps: dot() with ones is faster than sums along an axis, one factor per line than dividing each entry.
    of_rows, of_columns = map(np.ones, words.shape)
    row_sums = words.dot(of_columns)
    live = words.any(0)
    column_sums = np.where(live, row_sums.sum() / max(1, live.sum()), 0.0)
    for _ in range(iterations):
        reached = of_rows.dot(words)
        deviation = reached - column_sums
        if deviation.dot(deviation) <= tolerance**2:
            break
        words *= column_sums / np.maximum(reached, _LEAST)
        words *= (row_sums / np.maximum(words.dot(of_columns), _LEAST))[:, None]
    result[:, : words.shape[1]] = words
    return result


def diagonal_prior(word_map: ArrayLike, *, strength: float, null_factor: float = 1.0, null: bool = True) -> WordMap:
    """Multiply the map by a diagonal prior, ``exp(−strength · |t/T − s/S|)``, t and s from 1 [Dyer et al. 2013].

    fast_align starts from a strength of 4. The null column is multiplied by ``null_factor``; 1 treats it like the
    diagonal. Rows are not normalised.

    >>> diagonal_prior([[1, 1, 1], [1, 1, 1]], strength=2).round(3).tolist()
    [[1.0, 0.368, 1.0], [0.368, 1.0, 1.0]]
    """
    check_factor("strength", strength)
    check_factor("null_factor", null_factor)
    words, null_column = split_null(checked_map(word_map, null=null), null=null)
    rows, columns = (np.arange(1, size + 1) / max(1, size) for size in words.shape)
    prior = np.exp(-strength * np.abs(rows[:, None] - columns))
    return np.column_stack([words * prior, *([null_column * null_factor] if null else [])])


def weighted_sum(word_maps: Sequence[ArrayLike], weights: Sequence[float]) -> WordMap:
    """Σ_i weights[i] · word_maps[i], for example the AWI map plus a quarter of the AWO map.

    Maps have one shape, with or without null columns, and may be negative; ``normalize_rows`` brings them to one scale.

    >>> weighted_sum([[[1.0, 0.0]], [[0.0, 1.0]]], [1, 0.25]).tolist()
    [[1.0, 0.25]]
    """
    matrices = [checked_map(word_map, null=False, signed=True) for word_map in word_maps]
    _check_alike(matrices, weights)
    terms = (weight * matrix for weight, matrix in zip(weights, matrices, strict=True))
    return sum(terms, np.zeros(matrices[0].shape))


def smoothed_product(word_maps: Sequence[ArrayLike], weights: Sequence[float], *, null: bool = True) -> WordMap:
    """The entrywise product of maps, each first mixed with a uniform map in the proportion weight : 1; rows normalised.

    A product of experts [Hinton 2002]: where one map is undecided, the others decide; smoothing keeps any map from
    vetoing an entry. A row of zeros counts as undecided; it stays zeros only if it is zeros in every map. A weight of 0
    makes a map uniform.

    >>> smoothed_product([[[1, 0]], [[0.5, 0.5]]], [1, 1], null=False).tolist()
    [[0.75, 0.25]]
    """
    matrices = [normalize_rows(word_map, null=null) for word_map in word_maps]
    _check_alike(matrices, weights)
    for weight in weights:
        check_factor("weight", weight)
    product = np.ones_like(matrices[0])
    for weight, matrix in zip(weights, matrices, strict=True):
        product *= 1 + weight * matrix.shape[1] * matrix
    product[~np.any([matrix.any(1) for matrix in matrices], axis=0)] = 0.0
    return normalize_rows(product, null=null)


def checked_map(word_map: ArrayLike, *, null: bool, signed: bool = False) -> WordMap:
    """The map in float64, checked to be a finite matrix with any null column and, unless ``signed``, not negative."""
    matrix = np.asarray(word_map, np.float64)
    if matrix.ndim != 2 or matrix.shape[1] < null:
        raise InvalidInputError(
            f"got a map of shape {matrix.shape}, expected (target words, source words{' + 1' * null})"
        )
    if not np.isfinite(matrix).all():
        raise InvalidInputError("got a map with NaN or infinity; find the layer or sentence that it comes from")
    if not signed and (matrix < 0).any():
        raise InvalidInputError(f"got a map with the negative entry {matrix.min()}; take absolute values or clip first")
    return matrix


def split_null(matrix: WordMap, *, null: bool) -> tuple[WordMap, WordMap]:
    """The source words' columns, (T, S), and the null column, (T,), zeros if there is none."""
    return (matrix[:, :-1], matrix[:, -1]) if null else (matrix, np.zeros(len(matrix)))


def check_factor(name: str, value: float) -> None:
    """Refuse a number that is negative, infinite or NaN."""
    if not 0 <= value < np.inf:
        raise InvalidInputError(f"got {name} {value}, expected a finite number ≥ 0")


def _check_alike(matrices: Sequence[WordMap], weights: Sequence[float]) -> None:
    shapes = [matrix.shape for matrix in matrices]
    if not matrices or len(matrices) != len(weights) or len(set(shapes)) > 1:
        message = f"got maps of shapes {shapes} and {len(weights)} weights"
        raise InvalidInputError(f"{message}, expected at least one map, all of one shape, and a weight for each")
