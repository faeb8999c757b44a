"""Defines the alignment of a sentence pair with the probabilities of its links."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from alignment.links import Alignment, Link
from alignment.word_maps import WordMap

CALIBRATION = 1.4
"""What :func:`calibrated` adds to log-odds, fitted to the links of three stories with gold alignments."""


def calibrated(probabilities: ArrayLike) -> WordMap:
    """How often links of these probabilities are right: the log-odds plus 1.4.

    The probabilities of :func:`alignment.link_probabilities` are geometric means of both directions, and too low. The
    offset was fitted by maximum likelihood to the links of both shipped models together, right meaning possible or
    sure, with a lexicon of the text and without.

    >>> calibrated([0.0, 0.3, 0.5, 0.9, 1.0]).round(2).tolist()
    [0.0, 0.63, 0.8, 0.97, 1.0]
    """
    given = np.asarray(probabilities, np.float64)
    with np.errstate(divide="ignore"):
        odds = np.log(given) - np.log1p(-given) + CALIBRATION
    found: WordMap = 0.5 * (1 + np.tanh(odds / 2))
    return found


@dataclass(frozen=True, eq=False)
class ScoredAlignment:
    """The links of a sentence pair, and how probable they are.

    Attributes:
        links: the links.
        probabilities: (T, S), the probability of every possible link under the recipe's model, not calibrated; None if
            the recipe computes none.
        corpus_statistics: whether counts of other sentences took part, not only the model's maps of this one.

    >>> list(ScoredAlignment(Alignment([(1, 0)]), np.array([[0.1, 0.9]])).scored_links())
    [((1, 0), 0.973...)]
    """

    links: Alignment
    probabilities: WordMap | None = None
    corpus_statistics: bool = False

    def scored_links(self) -> Iterator[tuple[Link, float]]:
        """Yield each link and its :func:`calibrated` probability, in ascending order.

        Raises:
            ValueError: the recipe computes no probabilities.
        """
        if self.probabilities is None:
            raise ValueError("the recipe computes no probabilities")
        scores = calibrated(self.probabilities)
        for source, target in self.links:
            yield (source, target), float(scores[target, source])

    def at_least(self, score: float) -> "ScoredAlignment":
        """Leave out the links whose :func:`calibrated` probability is lower; at 0, none.

        Raises:
            ValueError: the score is not 0, and the recipe computes no probabilities.
        """
        if not score:
            return self
        links = Alignment(link for link, found in self.scored_links() if found >= score)
        return ScoredAlignment(links, self.probabilities, self.corpus_statistics)
