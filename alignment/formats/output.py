"""Formats the alignments that a run writes, line by line or as arrays."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, get_args

from alignment.formats.matrices import encoded, write_npz
from alignment.formats.text import write_parts
from alignment.scored import ScoredAlignment
from captum_norm import InvalidInputError

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
    >>> found = ScoredAlignment(Alignment([(0, 0), (1, 1)]), [[0.5, 0.1], [0.1, 0.9]])
    >>> Output(scores=True).text(1, ["a", "b"], ["c", "d"], found)
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

    def text(self, number: int, source: Sequence[str], target: Sequence[str], found: ScoredAlignment) -> str:
        """Return the text for the sentence pair of a line, with line ends; for npz, what :meth:`write` makes arrays of.

        Args:
            number: the number of the line, from 1.
            source: the source words.
            target: the target words.
            found: the alignment, without links that are too improbable.
        """
        scored = list(found.scored_links()) if self.scored else [(link, 1.0) for link in found.links]
        if self.style == "matrix":
            assert found.probabilities is not None
            record = {
                "source": source,
                "target": target,
                "links": [[*link, round(score, _DIGITS)] for link, score in scored],
                "probabilities": [[round(float(p), _DIGITS) for p in row] for row in found.probabilities],
                "corpus_statistics": found.corpus_statistics,
            }
            return f"{json.dumps(record, ensure_ascii=False)}\n"
        if self.style == "npz":
            assert found.probabilities is not None
            arrays = {
                "shape": found.probabilities.shape,
                "probabilities": encoded(found.probabilities),
                "links": [[*link, score] for link, score in scored],
                "corpus_statistics": found.corpus_statistics,
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
        """Return the text for a line that has no alignment."""
        return {"naacl": "", "tsv": "\t\t\n", "matrix": "null\n", "npz": "null\n"}.get(self.style, "\n")

    def write(self, file: BinaryIO, suffix: str, parts: Iterable[bytes]) -> None:
        """Write the texts of all lines to an open file, compressed as its suffix says."""
        if self.style == "npz":
            write_npz(file, parts)
        else:
            write_parts(file, suffix, parts)
