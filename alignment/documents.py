"""Cuts long pairs, such as documents, into sections that are aligned as pairs, and joins what is read off them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from alignment.links import Alignment, ScoredAlignment
from captum_norm import InvalidInputError

Words = Sequence[str]

WINDOW = 100
"""A pair with more words on a side is cut."""
_SEEN = 250  # source words among whose links cuts are sought
_LEAST = 8  # source words of a section that ends at punctuation marks


class Section(NamedTuple):
    """A section of a pair: the pair's index, where it begins on each side, and its words."""

    pair: int
    begin: tuple[int, int]
    words: tuple[Words, Words]


def cut(
    pairs: Iterable[tuple[Words, Words]], links_of: Callable[[Words, Words], Alignment | None]
) -> Iterator[Section]:
    """Cut long pairs where links do not cross, at punctuation marks if there are any, one window after the other.

    Words of one side that are left when the other has ended are in no section. A window without links (None), which is
    too long for the model, is halved; if none can be used, the pair is not cut.
    """
    for index, (source, target) in enumerate(pairs):
        cuts, size = [(0, 0)], _SEEN
        ratio = min(max(len(target) / max(len(source), 1), 0.5), 2)
        while all(rest := (source[cuts[-1][0] :], target[cuts[-1][1] :])) and size >= _LEAST:
            if max(map(len, rest)) <= min(WINDOW, size):
                cuts.append((len(source), len(target)))
                break
            window = rest[0][:size], rest[1][: round(1.25 * size * ratio)]
            if (links := links_of(*window)) is None:
                size //= 2
                continue
            halves = max(1, len(window[0]) // 2), max(1, len(window[0]) // 2 * len(rest[1]) // len(rest[0]))
            first, second = cuts[-1]
            cuts += [(first + i, second + j) for i, j in _uncrossed(links, *window, rest) or [halves]]
        if len(cuts) == 1 or size < _LEAST or cuts[1] == (len(source), len(target)):
            yield Section(index, (0, 0), (source, target))
            continue
        for (i, j), (end, target_end) in pairwise(cuts):
            yield Section(index, (i, j), (source[i:end], target[j:target_end]))


def in_proportion(pairs: Iterable[tuple[Words, Words]]) -> Iterator[tuple[Words, Words]]:
    """Cut long pairs without a look at their links."""
    return (section.words for section in cut(pairs, lambda *_: Alignment()))


def gathered(
    sections: Iterable[Section], answers: Iterable[tuple[int, Any]]
) -> Iterator[tuple[int, list[tuple[Section, Any]] | InvalidInputError]]:
    """Yield each pair's index with its sections and their answers, or the first error among these."""
    known = dict(answers)
    for index, group in groupby(enumerate(sections), key=lambda item: item[1].pair):
        row = [(section, known.pop(place)) for place, section in group]
        yield index, next((answer for _, answer in row if isinstance(answer, InvalidInputError)), row)


def joined(source: Words, target: Words, answers: Sequence[tuple[Section, ScoredAlignment]]) -> ScoredAlignment:
    """The links of a pair; those between words of different sections have probability 0."""
    if len(answers) == 1:
        return answers[0][1]
    links, probabilities = set[tuple[int, int]](), np.zeros((len(target), len(source)))
    for (_, (i, j), words), answer in answers:
        links |= {(i + left, j + right) for left, right in answer.links}
        if scored := answer.probabilities is not None:
            probabilities[j : j + len(words[1]), i : i + len(words[0])] = answer.probabilities
    return ScoredAlignment(Alignment(links), probabilities if scored else None, answer.corpus_statistics)


def _uncrossed(links: Alignment, source: Words, target: Words, rest: tuple[Words, Words]) -> list[tuple[int, int]]:
    """Places behind links that no link crosses, or the last that the fewest cross; none near the window's end."""
    ends, sizes = np.array(sorted(links), int).reshape(-1, 2) + 1, np.array([len(source), len(target)])
    most = sizes - [_LEAST, 0] if sizes.tolist() == list(map(len, rest)) else 0.75 * sizes
    behind_all = np.stack([ends[:, 0], np.maximum.accumulate(ends[:, 1])], 1)
    places = np.unique(np.concatenate([ends, behind_all]), axis=0)
    sure = places[(places <= most).all(1) & (places[:, 0] >= _LEAST)]
    crossed = ((ends[:, 0] <= sure[:, :1]) != (ends[:, 1] <= sure[:, 1:])).sum(1)
    cuts = [(0, 0)]
    for i, j in sure[crossed == 0].tolist():
        marks = not (source[i - 1][-1:].isalnum() or target[j - 1][-1:].isalnum())
        if i - cuts[-1][0] >= (_LEAST if marks else WINDOW // 2):
            cuts.append((i, j))
    fewest = sure[crossed == crossed.min(initial=len(links))][-1:].tolist()
    return cuts[1:] or [(i, j) for i, j in fewest]
