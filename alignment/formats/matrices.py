"""Writes matrices of probabilities: as text in lines of JSON, and of a whole run as arrays in NumPy's npz format."""

import base64
import json
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_ARRAYS = {
    "shapes": ("<i4", (2,)),
    "probabilities": ("<f4", ()),
    "links": ("<i4", (3,)),
    "scores": ("<f4", ()),
    "corpus_statistics": ("|b1", ()),
}
"""The type of each array, and the shape of its entries."""

_COPIED = 1 << 20


def encoded(matrix: Matrix) -> str:
    """A matrix as text, in float32."""
    return base64.b64encode(zlib.compress(matrix.astype("<f4").tobytes(), 1)).decode()


def decoded(text: str, shape: tuple[int, int]) -> Matrix:
    """The matrix that :func:`encoded` wrote."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").astype(np.float64).reshape(shape)


def write_npz(file: BinaryIO, parts: Iterable[bytes]) -> None:
    r"""Write the arrays of sentence pairs to an open file; those of one pair at a time are in memory.

    ``shapes`` (N, 2) has the numbers of target and source words of each line, zeros where there is no alignment;
    ``probabilities`` the entries of all matrices, row by row, one after the other; ``links`` (L, 3) a line, a source
    and a target index, all from 0; ``scores`` (L,) the probability of each; ``corpus_statistics`` (N,) whether counts
    of other sentences took part. Equal lines give equal bytes.

    Args:
        file: the file.
        parts: lines of JSON as :meth:`alignment.Output.text` writes them in the style npz.

    >>> import io
    >>> line = {"shape": [1, 2], "probabilities": encoded(np.array([[0.5, 0.25]])), "links": [[0, 0, 0.75]]}
    >>> file = io.BytesIO()
    >>> write_npz(file, [b"null\n", json.dumps({**line, "corpus_statistics": False}).encode()])
    >>> arrays = np.load(io.BytesIO(file.getvalue()))
    >>> [arrays[name].tolist() for name in ("shapes", "probabilities", "links", "scores")]
    [[[0, 0], [1, 2]], [0.5, 0.25], [[1, 0, 0]], [0.75]]
    """
    with ExitStack() as stack:
        spools = {name: stack.enter_context(TemporaryFile()) for name in _ARRAYS}
        lines = (line for part in parts for line in part.splitlines())
        for number, line in enumerate(lines):
            for name, entries in _entries(number, line).items():
                spools[name].write(np.asarray(entries, _ARRAYS[name][0]).tobytes())
        with ZipFile(file, "w", ZIP_DEFLATED) as archive:
            for name, spool in spools.items():
                info = ZipInfo(f"{name}.npy")  # has the same date always
                info.compress_type = ZIP_DEFLATED
                dtype, inner = np.dtype(_ARRAYS[name][0]), _ARRAYS[name][1]
                count = spool.tell() // (dtype.itemsize * int(np.prod(inner)))
                described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count, *inner)}
                spool.seek(0)
                with archive.open(info, "w", force_zip64=True) as member:
                    npy.write_array_header_1_0(member, described)
                    while copied := spool.read(_COPIED):
                        member.write(copied)


def _entries(number: int, line: bytes) -> dict[str, object]:
    found = json.loads(line)
    if found is None:
        return {"shapes": (0, 0), "corpus_statistics": False}
    shape = tuple(found["shape"])
    return {
        "shapes": shape,
        "probabilities": decoded(found["probabilities"], shape),
        "links": [(number, source, target) for source, target, _ in found["links"]],
        "scores": [score for *_, score in found["links"]],
        "corpus_statistics": found["corpus_statistics"],
    }
