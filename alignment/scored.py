"""Defines the alignment of a sentence pair with the probabilities of its links."""

from dataclasses import dataclass

from alignment.links import Alignment
from alignment.word_maps import WordMap


@dataclass(frozen=True, eq=False)
class ScoredAlignment:
    """The links of a sentence pair, and how probable they are.

    Attributes:
        links: the links.
        probabilities: (T, S), the probability of every possible link; None if the recipe computes none.
        corpus_statistics: whether counts of other sentences took part, not only the model's maps of this one.

    >>> ScoredAlignment(Alignment([(1, 0)])).links
    Alignment([(1, 0)])
    """

    links: Alignment
    probabilities: WordMap | None = None
    corpus_statistics: bool = False
