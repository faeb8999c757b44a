"""Formats the alignments that a run writes: lines of links, lines of JSON, or arrays in NumPy's npz format."""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import BinaryIO, Literal, get_args
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from alignment.formats.text import write_parts
from alignment.links import ScoredAlignment
from captum_norm import InvalidInputError

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
    record = json.loads(line)
    if record is None:
        return {"shapes": (0, 0), "corpus_statistics": False}
    shape = tuple(record["shape"])
    return {
        "shapes": shape,
        "probabilities": decoded(record["probabilities"], shape),
        "links": [(number, source, target) for source, target, _ in record["links"]],
        "scores": [score for *_, score in record["links"]],
        "corpus_statistics": record["corpus_statistics"],
    }


OutputStyle = Literal["pharaoh", "naacl", "tsv", "matrix", "npz"]
"""The formats of links that :class:`Output` writes."""

_DIGITS = 4


@dataclass(frozen=True)
class Output:
    r"""What a run writes of each sentence pair.

    Attributes:
        style: ``"pharaoh"``, a line ``i-j …`` for each pair; ``"naacl"``, a line ``pair i j S`` for each link;
            ``"tsv"``, source words, target words and links, separated by tabs; ``"matrix"``, a line of JSON with words,
            links and the probability of every possible link, or ``null`` where there is no alignment; ``"npz"``, the
            latter's numbers in one file of arrays (:func:`alignment.formats.write_npz`).
        base: the index of the first word; None for 1 in naacl and 0 elsewhere.
        scores: whether links have their probabilities (:func:`alignment.calibrated`): ``i-j:p``, or a last column in
            naacl. Matrices have them always, and beside them all probabilities, not calibrated.
        min_score: links with lower probabilities are left out.

    Raises:
        InvalidInputError: the style is unknown, the base is not the style's, or the score is not between 0 and 1.

    >>> from alignment import Alignment
    >>> scored = ScoredAlignment(Alignment([(0, 0), (1, 1)]), [[0.5, 0.1], [0.1, 0.9]])
    >>> Output(scores=True).text(1, ["a", "b"], ["c", "d"], scored)
    '0-0:0.8022 1-1:0.9733\n'
    """

    style: OutputStyle = "pharaoh"
    base: Literal[0, 1] | None = None
    scores: bool = False
    min_score: float = 0.0

    def __post_init__(self) -> None:
        if self.style not in get_args(OutputStyle):
            raise InvalidInputError(
                f"got the format {self.style!r}, expected one of {', '.join(get_args(OutputStyle))}"
            )
        if self.base not in (None, 0, 1):
            raise InvalidInputError(f"got base {self.base}, expected 0 or 1")
        usual = {"naacl": 1, "matrix": 0, "npz": 0}.get(self.style)
        if None not in (usual, self.base) and self.base != usual:
            raise InvalidInputError(f"got base {self.base} for {self.style}, which counts from {usual}; leave it out")
        if not 0 <= self.min_score <= 1:
            raise InvalidInputError(f"got min_score {self.min_score}, expected 0 ≤ min_score ≤ 1")

    @property
    def scored(self) -> bool:
        """Whether alignments must have probabilities."""
        return self.scores or self.min_score > 0 or self.style in ("matrix", "npz")

    def text(self, number: int, source: Sequence[str], target: Sequence[str], alignment: ScoredAlignment) -> str:
        """The lines for a sentence pair, whose number is from 1; for npz, what :meth:`write` makes arrays of."""
        scored = list(alignment.scored_links()) if self.scored else [(link, 1.0) for link in alignment.links]
        if self.style == "matrix":
            record = {
                "source": source,
                "target": target,
                "links": [[*link, round(score, _DIGITS)] for link, score in scored],
                "probabilities": [[round(float(p), _DIGITS) for p in row] for row in alignment.all_probabilities()],
                "corpus_statistics": alignment.corpus_statistics,
            }
            return f"{json.dumps(record, ensure_ascii=False)}\n"
        if self.style == "npz":
            probabilities = alignment.all_probabilities()
            arrays = {
                "shape": probabilities.shape,
                "probabilities": encoded(probabilities),
                "links": [[*link, score] for link, score in scored],
                "corpus_statistics": alignment.corpus_statistics,
            }
            return f"{json.dumps(arrays)}\n"
        base = (1 if self.style == "naacl" else 0) if self.base is None else self.base
        places = [(source_index + base, target_index + base) for (source_index, target_index), _ in scored]
        ends = [f"{score:.{_DIGITS}f}" if self.scores else "" for _, score in scored]
        if self.style == "naacl":
            rows = zip(places, ends, strict=True)
            return "".join(f"{number} {i} {j} S{end and ' '}{end}\n" for (i, j), end in rows)
        links = " ".join(f"{i}-{j}{end and ':'}{end}" for (i, j), end in zip(places, ends, strict=True))
        return f"{' '.join(source)}\t{' '.join(target)}\t{links}\n" if self.style == "tsv" else f"{links}\n"

    def nothing(self) -> str:
        """The text for a line that has no alignment."""
        return {"naacl": "", "tsv": "\t\t\n", "matrix": "null\n", "npz": "null\n"}.get(self.style, "\n")

    def write(self, file: BinaryIO, suffix: str, parts: Iterable[bytes]) -> None:
        """Write the texts of all lines to an open file, compressed as its suffix says."""
        if self.style == "npz":
            write_npz(file, parts)
        else:
            write_parts(file, suffix, parts)
