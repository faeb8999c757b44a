"""Defines word alignments: links between the words of two sentences, gold ones, links with probabilities."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import ArrayLike

from alignment.word_maps import WordMap
from captum_norm import InvalidInputError

Link = tuple[int, int]
"""The source index and the target index of a link, both from 0."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Alignment:
    """An immutable set of links, iterated in ascending order.

    ``&``, ``|``, ``-`` and ``<=`` work as for sets.

    Args:
        links: (source index, target index) pairs, indices from 0; numpy integers become ``int``.

    Raises:
        InvalidInputError: a link is not a pair of integers, or an index is negative.

    >>> alignment = Alignment([(1, 0), (0, 0)])
    >>> alignment | Alignment([(2, 1)])
    Alignment([(0, 0), (1, 0), (2, 1)])
    >>> (1, 0) in alignment, len(alignment)
    (True, 2)
    """

    links: frozenset[Link]

    def __init__(self, links: Iterable[Link] = ()) -> None:
        try:
            checked = frozenset([(index(source), index(target)) for source, target in links])
        except (TypeError, ValueError) as error:
            message = f"expected links as (source index, target index) pairs of integers: {error}"
            raise InvalidInputError(message) from error
        if checked and min(map(min, checked)) < 0:
            raise InvalidInputError(f"got a negative index in {sorted(checked)}; count words from 0")
        object.__setattr__(self, "links", checked)

    def transposed(self) -> "Alignment":
        """The same links with source and target exchanged.

        >>> Alignment([(0, 1), (2, 1)]).transposed()
        Alignment([(1, 0), (1, 2)])
        """
        return Alignment([(target, source) for source, target in self.links])

    def __and__(self, other: "Alignment") -> "Alignment":
        return Alignment(self.links & other.links)

    def __or__(self, other: "Alignment") -> "Alignment":
        return Alignment(self.links | other.links)

    def __sub__(self, other: "Alignment") -> "Alignment":
        return Alignment(self.links - other.links)

    def __le__(self, other: "Alignment") -> bool:
        return self.links <= other.links

    def __contains__(self, link: object) -> bool:
        return link in self.links

    def __iter__(self) -> Iterator[Link]:
        return iter(sorted(self.links))

    def __len__(self) -> int:
        return len(self.links)

    def __repr__(self) -> str:
        return f"Alignment({list(self)})"


@dataclass(frozen=True, slots=True)
class GoldAlignment:
    """A human alignment of sure and possible links [Och & Ney 2003, section 5].

    Attributes:
        sure: S, the unambiguous links.
        possible: P, the given links and all sure ones.

    >>> GoldAlignment(sure=Alignment([(0, 0)]), possible=Alignment([(1, 0)])).possible
    Alignment([(0, 0), (1, 0)])
    """

    sure: Alignment
    possible: Alignment = Alignment()

    def __post_init__(self) -> None:
        object.__setattr__(self, "possible", self.sure | self.possible)

    def transposed(self) -> "GoldAlignment":
        """The same gold alignment with source and target exchanged.

        >>> GoldAlignment(Alignment([(0, 2)])).transposed().sure
        Alignment([(2, 0)])
        """
        return GoldAlignment(self.sure.transposed(), self.possible.transposed())


CALIBRATION = 1.4
"""What :func:`alignment.links.calibrated` adds to log-odds, fitted to the links of three stories with gold links."""


def calibrated(probabilities: ArrayLike) -> WordMap:
    """How often links of these probabilities are right: the log-odds plus 1.4.

    The probabilities of :func:`alignment.decoding.link_probabilities` are geometric means of both directions, and too
    low. The offset was fitted by maximum likelihood to the links of both shipped models together, right meaning
    possible or sure, with a lexicon of the text and without.

    >>> calibrated([0.0, 0.3, 0.5, 0.9, 1.0]).round(2).tolist()
    [0.0, 0.63, 0.8, 0.97, 1.0]
    """
    uncalibrated = np.asarray(probabilities, np.float64)
    with np.errstate(divide="ignore"):
        odds = np.log(uncalibrated) - np.log1p(-uncalibrated) + CALIBRATION
    scores: WordMap = 0.5 * (1 + np.tanh(odds / 2))
    return scores


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

    def all_probabilities(self) -> WordMap:
        """The probabilities; a ValueError if there are none."""
        if self.probabilities is None:
            raise ValueError("the recipe computes no probabilities")
        return self.probabilities

    def scored_links(self) -> Iterator[tuple[Link, float]]:
        """Yield each link and its :func:`alignment.links.calibrated` probability, in order; ValueError without any."""
        scores = calibrated(self.all_probabilities())
        for source, target in self.links:
            yield (source, target), float(scores[target, source])

    def at_least(self, score: float) -> "ScoredAlignment":
        """Leave out the links whose :func:`alignment.links.calibrated` probability is lower; at 0, none."""
        if not score:
            return self
        links = Alignment(link for link, probability in self.scored_links() if probability >= score)
        return ScoredAlignment(links, self.probabilities, self.corpus_statistics)
