"""Measures how far the probabilities of links can be relied on, against gold alignments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from alignment.aer import AERScore, alignment_error_rate
from alignment.links import Alignment, GoldAlignment, Link
from captum_norm import InvalidInputError

Scores = Mapping[Link, float]
"""The links of a sentence pair, and how probable each is."""

BINS = 10
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))
"""The thresholds of :func:`alignment.score_curve`."""


@dataclass(frozen=True)
class Bin:
    """The links whose scores lie in an interval.

    Attributes:
        lower: the lowest score of the interval, included.
        upper: the highest; not included, unless it is 1.
        links: the number of links.
        score: their mean score; None if there is none.
        precision: the share of them that are sure or possible; None if there is none.
    """

    lower: float
    upper: float
    links: int
    score: float | None
    precision: float | None


@dataclass(frozen=True)
class Reliability:
    """How often links are right, by their score.

    Attributes:
        error: the expected calibration error [Guo et al. 2017]: the mean distance of score and precision over bins,
            weighted by their numbers of links.
        bins: the bins, in ascending order.
    """

    error: float
    bins: Sequence[Bin]


def reliability(scores: Sequence[Scores], gold: Sequence[GoldAlignment]) -> Reliability:
    """Compare scores of links with how often the links are right: sure or possible.

    Args:
        scores: the scored links of each sentence pair.
        gold: the gold alignment of each.

    Raises:
        InvalidInputError: the numbers of sentence pairs differ, or there is no link.

    >>> gold = [GoldAlignment(Alignment([(0, 0), (1, 1)]))]
    >>> reliability([{(0, 0): 0.95, (1, 1): 0.75, (2, 1): 0.75}], gold).error
    0.18333333333333335
    """
    _check(scores, gold)
    found = [
        (score, link in pair.possible)
        for links, pair in zip(scores, gold, strict=True)
        for link, score in links.items()
    ]
    if not found:
        raise InvalidInputError("got no link, expected links with scores")
    bins, distance = [], 0.0
    for number in range(BINS):
        inside = [(score, right) for score, right in found if min(int(score * BINS), BINS - 1) == number]
        mean, precision = (fmean(column) for column in zip(*inside, strict=True)) if inside else (None, None)
        bins.append(Bin(number / BINS, (number + 1) / BINS, len(inside), mean, precision))
        if mean is not None and precision is not None:
            distance += abs(mean - precision) * len(inside)
    return Reliability(distance / len(found), bins)


def score_curve(scores: Sequence[Scores], gold: Sequence[GoldAlignment]) -> dict[float, AERScore]:
    """AER, precision and recall of the links whose score is at least a threshold.

    By threshold, see :data:`alignment.calibration.THRESHOLDS`.

    Args:
        scores: the scored links of each sentence pair.
        gold: the gold alignment of each.

    Raises:
        InvalidInputError: the numbers of sentence pairs differ, or there is no gold link.

    >>> gold = [GoldAlignment(Alignment([(0, 0), (1, 1)]))]
    >>> curve = score_curve([{(0, 0): 0.95, (1, 1): 0.75, (2, 1): 0.3}], gold)
    >>> [(round(curve[least].precision, 1), curve[least].recall) for least in (0.0, 0.5, 0.9)]
    [(66.7, 100.0), (100.0, 100.0), (100.0, 50.0)]
    """
    _check(scores, gold)
    return {
        least: alignment_error_rate(
            [Alignment(link for link, score in links.items() if score >= least) for links in scores], gold
        )
        for least in THRESHOLDS
    }


def _check(scores: Sequence[Scores], gold: Sequence[GoldAlignment]) -> None:
    if len(scores) != len(gold):
        raise InvalidInputError(f"got scores of {len(scores)} sentence pairs and gold alignments of {len(gold)}")
