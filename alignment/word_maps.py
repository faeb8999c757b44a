"""Transforms word maps before an alignment is read off them.

A word map is a float array (T, S + 1): one row per target word, one column per source word and, last, the null column
for what belongs to no source word. With ``null=False`` it has no null column and is (T, S). Maps are finite and, unless
it is said, not negative; others raise :class:`~captum_norm.errors.InvalidInputError`, as do numbers that are not as
described. Functions return maps of the same shape, in float64.
"""

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


def smoothed_product(first: ArrayLike, second: ArrayLike, *, null: bool = True) -> WordMap:
    """The entrywise product of two maps, each first mixed half and half with a uniform map; rows normalised.

    A product of experts [Hinton 2002]: where one map is undecided, the other decides; smoothing keeps either from
    vetoing an entry. A row of zeros counts as undecided; it stays zeros only if it is zeros in both maps.

    >>> smoothed_product([[1, 0]], [[0.5, 0.5]], null=False).tolist()
    [[0.75, 0.25]]
    """
    matrices = [normalize_rows(word_map, null=null) for word_map in (first, second)]
    if matrices[0].shape != matrices[1].shape:
        raise InvalidInputError(f"got maps of shapes {matrices[0].shape} and {matrices[1].shape}, expected one shape")
    columns = matrices[0].shape[1]
    product = (1 + columns * matrices[0]) * (1 + columns * matrices[1])
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
