"""Decodes a word map into an alignment.

Maps are (T, S + 1), or (T, S) with ``null=False``, without the null column; finite and, unless said, not negative.
A map or a number that is not as described raises :class:`~captum_norm.errors.InvalidInputError`.

Ties go to the lowest source index, with the null column last. A row of zeros carries no information; its word gets no
link.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alignment.links import Alignment
from alignment.word_maps import WordMap, check_factor, checked_map, split_null
from captum_norm import InvalidInputError


def argmax(word_map: ArrayLike, *, null: bool = True) -> Alignment:
    """Link each target word to its highest entry; the null column stands for no link [Kobayashi et al. 2020].

    Entries may be negative.

    >>> argmax([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    Alignment([(0, 0)])
    """
    sources = _best_sources(checked_map(word_map, null=null, signed=True), null)
    return _links(np.arange(len(sources)), sources)


def mutual_argmax(word_map: ArrayLike, *, null: bool = True) -> Alignment:
    """The links of ``argmax`` whose entries are also the highest of their columns; entries may be negative.

    >>> mutual_argmax([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
    Alignment([(0, 0)])
    """
    matrix = checked_map(word_map, null=null, signed=True)
    sources = _best_sources(matrix, null)
    linked = np.flatnonzero(sources >= 0)
    if not linked.size:
        return Alignment()
    targets = matrix.argmax(0)
    mutual = linked[targets[sources[linked]] == linked]
    return _links(mutual, sources[mutual])


def itermax(word_map: ArrayLike, *, null: bool = True) -> Alignment:
    """The links of ``mutual_argmax`` and those of a second round [Jalili Sabet et al. 2020]; entries are not negative.

    In the second round an entry counts 0.9 times if one of its words has a link already, and not at all if both have.
    There is none if a side has at most two words, or none without a link.

    >>> itermax([[0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.8, 0.1, 0.1]], null=False)
    Alignment([(0, 0), (0, 2), (1, 1)])
    """
    words, _ = split_null(checked_map(word_map, null=null), null=null)
    first = mutual_argmax(words, null=False)
    rows, columns = (np.ones(size) for size in words.shape)  # 1 for a word without a link
    for source, target in first:
        rows[target] = columns[source] = 0
    if min(words.shape) <= 2 or not rows.any() or not columns.any():
        return first
    return first | mutual_argmax(np.minimum(0.9 * (rows[:, None] + columns), 1) * words, null=False)


def hmm_posteriors(word_map: ArrayLike, *, jump_penalty: float, null: bool = True) -> WordMap:
    """The posterior probability of each link in a hidden Markov model of source positions, (T, S) [Vogel et al. 1996].

    Target word t is emitted at source position a_t with log-probability log map[t, a_t], up to a constant per row. The
    transition costs ``jump_penalty · |a_t − a_u − 1|`` nats, where u is the last word before t with a link, and
    a_u = −1 if there is none; monotone steps of one are free. A word may be emitted from null instead; the position
    then stays a_u for the next word [Och & Ney 2003]. The forward–backward algorithm sums over all paths; each row sums
    to 1 minus the probability that its word has no link.

    >>> hmm_posteriors([[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]], jump_penalty=1.0).round(2).tolist()
    [[0.98, 0.02], [0.27, 0.58]]
    """
    emissions, null_emissions, jumps, before = _hmm(word_map, jump_penalty, null)
    targets_count, sources_count = emissions.shape
    # Keep factors above 0: underflow could close the only path to a word.
    factors = np.exp(-np.minimum(jumps, 700.0))
    arrivals = np.empty_like(emissions)
    for target in range(targets_count):
        arrivals[target] = _log_product(before, factors)
        before = before + null_emissions[target]
        before[:-1] = np.logaddexp(before[:-1], arrivals[target] + emissions[target])
    total = np.logaddexp.reduce(before)
    after, posteriors = np.zeros(sources_count + 1), np.empty_like(emissions)
    for target in reversed(range(targets_count)):
        links = emissions[target] + after[:-1]
        posteriors[target] = np.exp(arrivals[target] + links - total)
        after = np.logaddexp(_log_product(links, factors.T), after + null_emissions[target])
    return posteriors


def link_probabilities(word_map: ArrayLike, *, jump_penalty: float, null: bool = True) -> WordMap:
    """The probability of each link by hidden Markov models of both directions, (T, S), from 0 to 1.

    It is the geometric mean of the ``hmm_posteriors`` over the map's rows and over its columns [Liang et al. 2006].
    Source words have no null choice.

    Args:
        word_map: (T, S + 1), or (T, S) without a null column.
        jump_penalty: nats per position that a jump is off, in both directions.
        null: whether the last column of ``word_map`` is the null column.

    >>> link_probabilities([[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]], jump_penalty=1.0).round(2).tolist()
    [[0.96, 0.04], [0.14, 0.73]]
    """
    words, _ = split_null(checked_map(word_map, null=null), null=null)
    forward = hmm_posteriors(word_map, jump_penalty=jump_penalty, null=null)
    backward = hmm_posteriors(words.T, jump_penalty=jump_penalty, null=False).T
    return np.sqrt(forward * backward)


def probable_links(probabilities: ArrayLike, min_probability: float, *, mutual: bool = True) -> Alignment:
    """The links that are more probable than ``min_probability`` and, if ``mutual``, the most so of both their words.

    Probabilities are (T, S), and 0 ≤ ``min_probability`` < 1.

    >>> probable_links([[0.9, 0.1], [0.8, 0.2]], 0.1)
    Alignment([(0, 0)])
    """
    if not 0 <= min_probability < 1:
        raise InvalidInputError(f"got min_probability {min_probability}, expected 0 ≤ min_probability < 1")
    matrix = checked_map(probabilities, null=False)
    above = matrix > min_probability
    return mutual_argmax(np.where(above, matrix, 0.0), null=False) if mutual else _links(*np.nonzero(above))


def _hmm(word_map: ArrayLike, jump_penalty: float, null: bool) -> tuple[WordMap, WordMap, WordMap, WordMap]:
    """Log-probabilities (T, S) and of null (T,), costs of jumps (S + 1, S), and log-probabilities of states (S + 1,).

    The state is the source word of the last link; the last state, −1, is that there is no link so far.
    """
    check_factor("jump_penalty", jump_penalty)
    words, null_column = split_null(checked_map(word_map, null=null), null=null)
    with np.errstate(divide="ignore"):
        emissions = np.log(words)
        null_emissions = np.log(null_column)
    null_emissions[~words.any(1) & (null_column == 0)] = 0.0
    sources = np.arange(words.shape[1])
    states = np.append(sources, -1)
    jumps = jump_penalty * np.abs(sources - states[:, None] - 1)
    return emissions, null_emissions, jumps, np.where(states < 0, 0.0, -np.inf)


def _log_product(scores: WordMap, factors: WordMap) -> WordMap:
    """log(exp(scores) @ factors), for factors above 0."""
    highest = np.maximum.reduce(scores, initial=-np.inf)
    if highest == -np.inf:
        return np.full(factors.shape[1], -np.inf)
    product: WordMap = np.log(np.exp(scores - highest).dot(factors)) + highest
    return product


def _best_sources(matrix: WordMap, null: bool) -> NDArray[np.intp]:
    """The column of each row's highest entry, (T,); −1 for the null column and rows of zeros."""
    if not matrix.shape[1]:
        return np.full(len(matrix), -1)
    sources: NDArray[np.intp] = matrix.argmax(1)
    sources[~matrix.any(1)] = -1
    if null:
        sources[sources == matrix.shape[1] - 1] = -1
    return sources


def _links(targets: NDArray[np.intp], sources: NDArray[np.intp]) -> Alignment:
    linked = sources >= 0
    return Alignment(zip(sources[linked].tolist(), targets[linked].tolist(), strict=True))
