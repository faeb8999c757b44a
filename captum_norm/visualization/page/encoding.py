"""Writes arrays as text for a page: exactly if they are small, in half precision or 8 bits if they are large."""

import base64
import math
import zlib
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

Precision = Literal["f4", "f2", "u1"]

# Entries of all maps of a page. Maps of attention compress to about a third: 8 MB, 8 MB, and a quarter of what half
# precision would need.
_MOST_EXACT = 2_000_000
_MOST_HALF = 4_000_000


class EncodedArray(TypedDict):
    """An array as text.

    ``data`` is base64 of zlib of the bytes: first the first byte of every entry, then the second ... (neighbouring
    entries share their leading bytes, which compresses better); little-endian, row-major.

    ``dtype`` is ``f4`` (float32, exact; ``max`` is empty), ``f2`` (float16 of the share of the array's largest absolute
    value, the one number in ``max``), or ``u1`` (8 bits). With ``u1``, ``max`` has the largest absolute value of each
    map, i.e. of the last two axes. An entry is 1/255 of it, or, where the array has negative entries, ``i1``: a signed
    byte, 1/127 of it.
    """

    shape: list[int]
    dtype: str
    max: list[float]
    data: str


def precision_of(shapes: Iterable[tuple[int, ...]]) -> Precision:
    """Choose the precision of all maps of a page, whose shapes these are.

    Example:
        >>> precision_of([(6, 12, 64, 64)]), precision_of([(12, 12, 64, 64)] * 50)
        ('f4', 'u1')
    """
    entries = sum(math.prod(shape) for shape in shapes)
    return "f4" if entries <= _MOST_EXACT else "f2" if entries <= _MOST_HALF else "u1"


def encode(values: npt.NDArray[np.float32], precision: Precision = "f4") -> EncodedArray:
    """Encode an array of finite numbers.

    Args:
        values: the array.
        precision: ``f4``: exact; ``f2``: to 1/2048 of each entry, or 3e-8 of the largest; ``u1``: to 1/510 of the
            largest of its map (the last two axes), 1/254 if entries are negative.

    Returns:
        What the page's script decodes.

    Example:
        >>> encode(np.array([1.0, 2.0], dtype=np.float32))["shape"]
        [2]
    """
    if precision == "f4":
        return _encoded(values.astype("<f4"), values.shape, "f4", [])
    largest = np.abs(values).max(axis=(-2, -1) if precision == "u1" else None, keepdims=True, initial=0.0)
    shares = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)
    tops = [float(f"{top:.7g}") for top in largest.ravel().tolist()]
    if precision == "f2":
        return _encoded(shares.astype("<f2"), values.shape, "f2", tops)
    if (values < 0).any():
        return _encoded(np.rint(shares * 127).astype("i1"), values.shape, "i1", tops)
    return _encoded(np.rint(shares * 255).astype("u1"), values.shape, "u1", tops)


def _encoded(entries: npt.NDArray[Any], shape: tuple[int, ...], dtype: str, tops: list[float]) -> EncodedArray:
    planes = np.ascontiguousarray(entries).view("u1").reshape(-1, entries.dtype.itemsize).T
    data = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode("ascii")
    return {"shape": list(shape), "dtype": dtype, "max": tops, "data": data}
