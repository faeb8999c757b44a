"""Writes arrays as text for a page: exactly if they are small, in half precision or 127 steps if they are large."""

import base64
import math
import zlib
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

Precision = Literal["f4", "f2", "i1"]

# Entries of all maps of a page: at most 4 MB, 8 MB, and for 50 examples of 12 layers, 12 heads and 64 tokens 14 MB.
_MOST_EXACT = 1_000_000
_MOST_HALF = 4_000_000


class EncodedArray(TypedDict):
    """An array as text.

    ``data`` is base64 of zlib of the little-endian, row-major bytes: first the first byte of every entry, then the
    second ... (neighbouring entries share their leading bytes, which compresses better).

    ``dtype`` is ``f4`` (float32, exact; ``max`` is empty), ``f2`` (float16 of the share of the array's largest absolute
    value, the one number in ``max``), or ``i1``: each byte, from -127 to 127, is so many 127ths of the largest absolute
    value of its map, i.e. of the last two axes; ``max`` has one number for each map, and each map is written column by
    column, since keys that much is drawn from make columns alike.
    """

    shape: list[int]
    dtype: Precision
    max: list[float]
    data: str


def precision_of(shapes: Iterable[tuple[int, ...]]) -> Precision:
    """Choose the precision of all maps of a page, whose shapes these are.

    Example:
        >>> precision_of([(6, 12, 64, 64)]), precision_of([(12, 12, 64, 64)] * 50)
        ('f4', 'i1')
    """
    entries = sum(math.prod(shape) for shape in shapes)
    return "f4" if entries <= _MOST_EXACT else "f2" if entries <= _MOST_HALF else "i1"


def encode(values: npt.NDArray[np.float32], precision: Precision = "f4") -> EncodedArray:
    """Encode an array of finite numbers.

    Args:
        values: the array.
        precision: ``f4``: exact; ``f2``: to 1/2048 of each entry, or 3e-8 of the largest; ``i1``: to 1/254 of the
            largest of its map, the last two axes.

    Returns:
        What the page's script decodes.

    Example:
        >>> encode(np.array([1.0, 2.0], dtype=np.float32))["shape"]
        [2]
    """
    shape = list(values.shape)
    if precision == "f4":
        return {"shape": shape, "dtype": "f4", "max": [], "data": _text(values.astype("<f4"))}
    largest = np.abs(values).max(axis=(-2, -1) if precision == "i1" else None, keepdims=True, initial=0.0)
    shares = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)
    entries = shares.astype("<f2") if precision == "f2" else np.rint(127 * shares).astype("i1").swapaxes(-1, -2)
    tops = [float(f"{top:.7g}") for top in largest.ravel().tolist()]
    return {"shape": shape, "dtype": precision, "max": tops, "data": _text(entries)}


def _text(entries: npt.NDArray[Any]) -> str:
    planes = np.ascontiguousarray(entries).view("u1").reshape(-1, entries.dtype.itemsize).T
    # Numbers compress better without a search for what repeats at length, and levels above 6 take far longer.
    compressor = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_FILTERED)
    return base64.b64encode(compressor.compress(planes.tobytes()) + compressor.flush()).decode("ascii")
