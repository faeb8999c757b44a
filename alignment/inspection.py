"""Measures whether a translation is about its source, and flags what is not."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from alignment.word_maps import WordMap, checked_map, normalize_rows

Flag = Literal["unrelated", "untranslated", "truncated", "added", "repeated", "exchanged"]
"""What is wrong with a translation: it is of another sentence, it or a part of it is the source itself, a part of the
source is missing, words have no source, words come twice, or source and target are exchanged."""

FLAGS: tuple[Flag, ...] = get_args(Flag)


class Rule(NamedTuple):
    """When a measure raises a flag: if it is above or below a limit."""

    flag: Flag
    above: bool
    limit: float


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "information": Rule("unrelated", False, 0.2),
        "copied": Rule("untranslated", True, 0.2),
        "gap": Rule("truncated", True, 0.25),
        "end_log_probability": Rule("truncated", False, -5.0),
        "target_gap": Rule("added", True, 0.2),
        "repetition": Rule("repeated", True, 0.03),
        "exchange": Rule("exchanged", True, 1.0),
    }
)
"""The rules by measure."""

EXPLAINED: Mapping[Flag, frozenset[Flag]] = MappingProxyType(
    {
        "untranslated": frozenset({"unrelated", "exchanged"}),
        "exchanged": frozenset({"unrelated", "truncated", "added"}),
        "unrelated": frozenset({"truncated", "added"}),
        "repeated": frozenset({"added"}),
    }
)
"""The flags that are not raised beside another one, which explains them."""

COVERED = 0.6
"""A word is covered if one of its links is at least as probable as this."""
DOUBT: Mapping[str, float] = MappingProxyType({"coverage": 0.75, "log_probability": -4.0})
"""Pairs with a coverage or log-probability below these are scored without their source and with their sides exchanged,
too."""
REPEATED_WORDS = 4
"""So many words that occur again are a repetition; fewer only if they follow directly on each other."""


@dataclass(frozen=True)
class Inspection:
    """What one sentence pair's measures are. Log-probabilities are in nats.

    Attributes:
        log_probability: the mean log-probability of the target's pieces, end of sentence included.
        end_log_probability: that of the end of sentence; None if the model has none.
        source_share: how much of the decoder's states comes from the source, not from the target words before; the
            mean over decoder steps, from 0 to 1.
        link_entropy: how widely target words spread over the source, see :func:`link_entropy`.
        source_coverage: the probability of each source word's best link, the mean over source words.
        target_coverage: the same of target words.
        gap: the longest run of uncovered source words, as a share of the source.
        target_gap: the same of target words, as a share of the target.
        repetition: repeated words beyond those of the source, as a share of the target.
        copied: the share of target words that are the source's, see :func:`alignment.inspection.copied`.
        numbers: the share of both sides' numbers that the other side has; None without numbers.
        names: the share of names that the other side has; None without names.
        information: how much of the target's surprisal the source takes away,
            1 − log p(target | source) / log p(target | no source); None for a pair beyond
            :data:`alignment.inspection.DOUBT`.
        exchange: by how much the mean log-probability grows if source and target are exchanged; None likewise.
        uncovered: the indices of uncovered source words.
        added: those of uncovered target words.
        repeated: those of repeated target words, see :func:`alignment.inspection.repeated_words`.
        flags: the flags raised.
    """

    log_probability: float
    end_log_probability: float | None
    source_share: float
    link_entropy: float
    source_coverage: float
    target_coverage: float
    gap: float
    target_gap: float
    repetition: float
    copied: float
    numbers: float | None
    names: float | None
    information: float | None
    exchange: float | None
    uncovered: tuple[int, ...]
    added: tuple[int, ...]
    repeated: tuple[int, ...]
    flags: tuple[Flag, ...] = ()


MEASURES = tuple(Inspection.__annotations__)[:-4]
"""The names of the measures."""


def link_entropy(word_map: ArrayLike) -> float:
    """The entropy of target words' distributions over the source, relative to the highest one, their mean.

    The map is (T, S + 1); rows are normalised, and the mean is over rows that are not zeros: from 0, each word draws on
    one column alone, to 1, on all alike.

    >>> link_entropy([[1, 0, 0, 0], [1, 1, 0, 0]])
    0.25
    """
    rows = normalize_rows(word_map)
    rows = rows[rows.any(1)]
    if rows.shape[1] < 2 or not len(rows):
        return 0.0
    logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    return float(-(rows * logs).sum(1).mean() / np.log(rows.shape[1]))


def coverage(link_probabilities: ArrayLike) -> tuple[WordMap, WordMap]:
    """The probability of the best link of each source word, (S,), and of each target word, (T,), of (T, S).

    >>> [side.tolist() for side in coverage([[0.9, 0.1], [0.2, 0.3], [0.0, 0.0]])]
    [[0.9, 0.3], [0.9, 0.3, 0.0]]
    """
    matrix = checked_map(link_probabilities, null=False)
    return matrix.max(0, initial=0.0), matrix.max(1, initial=0.0)


def longest_run(marks: Sequence[bool]) -> int:
    """The length of the longest run of true marks."""
    return max((len(list(run)) for mark, run in groupby(marks) if mark), default=0)


def repeated_words(words: Sequence[str]) -> tuple[int, ...]:
    """The indices of words that repeat earlier ones: all but the first copy.

    A span of words counts if it follows directly on an equal one, as in a loop, or if it has
    :data:`REPEATED_WORDS` words and occurs earlier. Case is ignored.

    >>> repeated_words("the the cat sat on the mat , sat on the mat".split())
    (1, 8, 9, 10, 11)
    """
    _, ids = np.unique(np.array([word.lower() for word in words], object).astype(str), return_inverse=True)
    repeated = np.zeros(len(words), bool)
    for lag in range(1, len(words)):
        same = np.concatenate([[False], ids[lag:] == ids[:-lag], [False]])
        starts, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(same[:-1] & ~same[1:])
        for start, end in zip(starts, ends, strict=True):
            if end - start >= min(lag, REPEATED_WORDS):
                repeated[start + lag : end + lag] = True
    return tuple(np.flatnonzero(repeated).tolist())


def copied(source: Sequence[str], target: Sequence[str]) -> float:
    """The share of target words that follow, or are followed by, the same word as in the source.

    Case, punctuation and digits are ignored. Two names in a row do not count: one of the two words must be written
    without a capital on either side.

    >>> copied("Le chat dort , M. Hamel .".split(), "The cat sleeps , M. Hamel .".split())
    0.0
    >>> copied("Le chat dort ici .".split(), "The cat dort ici .".split())
    0.5
    """

    def followed(words: Sequence[str]) -> list[tuple[tuple[str, str], bool]]:
        letters = [word for text in words if (word := "".join(filter(str.isalpha, text)))]
        return [
            ((one.casefold(), other.casefold()), any(word[0] == word[0].lower() for word in (one, other)))
            for one, other in pairwise(letters)
        ]

    known, marks = set(followed(source)), [False]
    for pair, ordinary in followed(target):
        same = (pair, True) in known or (ordinary and (pair, False) in known)
        marks[-1] |= same
        marks.append(same)
    return fmean(marks)


def shared_numbers(source: Sequence[str], target: Sequence[str]) -> float | None:
    """The share of both sides' numbers that the other side has; None if there are none.

    Numbers are compared by their digits: 10,000 is 10 000 and 3.5 is 3,5. Number words are none.

    >>> shared_numbers("le 3 mai , 10 000 euros".split(), "10,000 euros on 4 May".split())
    0.5
    """
    counts = [_numbers(words) for words in (source, target)]
    total = sum(count.total() for count in counts)
    return 2 * (counts[0] & counts[1]).total() / total if total else None


def shared_names(source: Sequence[str], target: Sequence[str]) -> float | None:
    """The share of one side's names that the other side has, of the side with the larger share; None without names.

    A name is a word with a capital that does not begin a sentence; of names, four letters without accents are compared.

    >>> shared_names("Hier Clara vit Rome .".split(), "Yesterday Clara saw Paris .".split())
    0.5
    """
    shares = []
    for words, others in ((source, target), (target, source)):
        known = {_stem(word) for word in others}
        found = [
            _stem(word) in known
            for before, word in pairwise(words)
            if word[:1].isupper() and len(word) > 1 and (before == "," or any(map(str.isalnum, before)))
        ]
        if found and not " ".join(words).isupper():
            shares.append(fmean(found))
    return max(shares, default=None)


_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[ .,'\u2019\u00a0\u202f]\d{3})+(?!\d)")
_NUMBER = re.compile(r"(?<=\d[.,])\d+|[1-9]\d*")


def _numbers(words: Sequence[str]) -> Counter[str]:
    """The numbers of a text, whole and fractional parts apart, without zeros in front and without zero itself."""
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), " ".join(words))
    text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return Counter(digits for digits in _NUMBER.findall(text) if int(digits))


def _stem(word: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", word.casefold())))[:4]


def information(log_probability: float, without_source: float) -> float:
    """The share of the target's surprisal that its source takes away, from log p(target | source or no source).

    1 if the source makes the target certain, 0 if it tells nothing, below 0 if it misleads.

    >>> information(-5.0, -20.0)
    0.75
    """
    return 1 - log_probability / without_source if without_source else 0.0


def flags_of(inspection: Inspection) -> tuple[Flag, ...]:
    """The flags that the measures raise, but those that others explain (:data:`EXPLAINED`)."""
    raised = set()
    for measure, rule in RULES.items():
        value = getattr(inspection, measure)
        if value is not None and (value > rule.limit if rule.above else value < rule.limit):
            raised.add(rule.flag)
    for flag, explained in EXPLAINED.items():
        if flag in raised:
            raised -= explained
    return tuple(flag for flag in FLAGS if flag in raised)
