"""Formats the alignments that a run writes: lines of links, or lines of JSON."""

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from alignment.links import ScoredAlignment
from captum_norm import InvalidInputError
from captum_norm.checks import check_choice

Matrix = NDArray[np.float64]


def encoded(matrix: Matrix) -> str:
    """A matrix as text, in float32."""
    return base64.b64encode(zlib.compress(matrix.astype("<f4").tobytes(), 1)).decode()


def decoded(text: str, shape: tuple[int, int]) -> Matrix:
    """The matrix that :func:`encoded` wrote."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").astype(np.float64).reshape(shape)


OutputStyle = Literal["pharaoh", "naacl", "tsv", "matrix"]
"""The formats of links that :class:`Output` writes."""

Cut = Callable[[Sequence[str]], tuple[Sequence[str], Sequence[int | None]]]
"""Cuts the words of a sentence into pieces, and says which word each is of."""

_DIGITS = 4


@dataclass(frozen=True)
class Output:
    r"""What a run writes of each sentence pair.

    Attributes:
        style: ``"pharaoh"``, a line ``i-j …`` for each pair; ``"naacl"``, a line ``pair i j S`` for each link;
            ``"tsv"``, source words, target words and links, separated by tabs; ``"matrix"``, a line of JSON with words,
            links and the probability of every possible link, or ``null`` where there is no alignment. Words are
            counted from 1 in naacl, from 0 elsewhere.
        scores: whether links have their probabilities (:func:`alignment.links.calibrated`): ``i-j:p``, or a last column
            in naacl. Matrices have them always, and beside them all probabilities, not calibrated.
        min_score: links with lower probabilities are left out.
        pieces: what cuts the words of both sides; links are then written between all pieces of linked words.

    Raises:
        InvalidInputError: the style is unknown or has no pieces, or the score is not between 0 and 1.

    >>> from alignment import Alignment
    >>> scored = ScoredAlignment(Alignment([(0, 0), (1, 1)]), [[0.5, 0.1], [0.1, 0.9]])
    >>> Output(scores=True).text(1, ["a", "b"], ["c", "d"], scored)
    '0-0:0.8022 1-1:0.9733\n'
    """

    style: OutputStyle = "pharaoh"
    scores: bool = False
    min_score: float = 0.0
    pieces: tuple[Cut, Cut] | None = None

    def __post_init__(self) -> None:
        check_choice("style", self.style, get_args(OutputStyle))
        if not 0 <= self.min_score <= 1:
            raise InvalidInputError(f"got min_score {self.min_score}, expected 0 ≤ min_score ≤ 1")
        if self.pieces is not None and self.style == "matrix":
            raise InvalidInputError("got pieces and the style matrix, which is of words; choose another one")

    @property
    def scored(self) -> bool:
        """Whether alignments must have probabilities."""
        return self.scores or self.min_score > 0 or self.style == "matrix"

    def text(self, number: int, source: Sequence[str], target: Sequence[str], alignment: ScoredAlignment) -> str:
        """The lines for a sentence pair, whose number is from 1."""
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
        if self.pieces is not None:
            (source, owners), (target, others) = self.pieces[0](source), self.pieces[1](target)
            scores: dict[Any, float] = dict(scored)
            sides = product(enumerate(owners), enumerate(others))
            scored = [((i, j), scores[word, other]) for (i, word), (j, other) in sides if (word, other) in scores]
        rows = [(i, j, f"{score:.{_DIGITS}f}" if self.scores else "") for (i, j), score in scored]
        if self.style == "naacl":
            return "".join(f"{number} {i + 1} {j + 1} S{end and ' '}{end}\n" for i, j, end in rows)
        links = " ".join(f"{i}-{j}{end and ':'}{end}" for i, j, end in rows)
        return f"{' '.join(source)}\t{' '.join(target)}\t{links}\n" if self.style == "tsv" else f"{links}\n"

    def nothing(self) -> str:
        """The text for a line that has no alignment."""
        return {"naacl": "", "tsv": "\t\t\n", "matrix": "null\n"}.get(self.style, "\n")
