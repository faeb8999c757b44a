"""Defines the maps that alignments can be read from, and chooses among them without gold alignments."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from alignment.decoding import mutual_argmax
from alignment.links import Alignment
from alignment.tokenization import EncodedSentence
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError

Setting = Literal["AWO", "AWI"]
"""``"AWO"``, alignment with output: a target piece's row is that of the step that emits it. ``"AWI"``, alignment with
input: that of the next step, which reads it."""

SETTINGS: tuple[Setting, ...] = get_args(Setting)


def row_word_ids(target: EncodedSentence, setting: Setting) -> list[int | None]:
    """The target word that each decoder step's row belongs to."""
    if setting not in SETTINGS:
        raise InvalidInputError(f"got the setting {setting!r}, expected {' or '.join(SETTINGS)}")
    if setting == "AWO":
        return list(target.word_ids)
    return [None, *target.word_ids][: len(target.ids)]


@dataclass(frozen=True, order=True)
class Choice:
    """The maps from which alignments are read.

    Attributes:
        setting: which rows.
        layer: 0-based index.
        head: 0-based index, or None for all heads together.
        weight: of a similarity that is added; 0 for none.
    """

    setting: Setting
    layer: int
    head: int | None = None
    weight: float = 0.0

    def __str__(self) -> str:
        head = "" if self.head is None else f" head {self.head}"
        return f"{self.setting} layer {self.layer}{head}" + (f" + {self.weight} similarity" if self.weight else "")


def consistency(
    alignments: Sequence[Alignment], sources: Sequence[Sequence[str]], targets: Sequence[Sequence[str]]
) -> float:
    """How consistently one-to-one alignments translate the same words: the criterion of ``layer="auto"``.

    Every link counts 1 plus the Dice coefficient of its two words over all *other* links,
    2 (c(s, t) − 1) / (c(s) + c(t) − 1): near 1 if the two words are always linked to each other, 0 if only here. The
    sum is divided by the number of target words. The wrong layer gives few mutual links. The wrong setting, which is
    off by one row, gives as many as the right one, but between unrelated words.

    Alignments are one-to-one, such as those of ``mutual_argmax``; the case of words is ignored. The result is from 0 to
    2; 0 if there is no target word.

    >>> consistency([Alignment([(0, 0)]), Alignment([(0, 0)])], [["Haus"], ["haus"]], [["house"], ["house"]])
    1.6666666666666665
    """
    pairs = [
        (source_words[source].lower(), target_words[target].lower())
        for alignment, source_words, target_words in zip(alignments, sources, targets, strict=True)
        for source, target in alignment
    ]
    together = Counter(pairs)
    source_counts, target_counts = Counter(source for source, _ in pairs), Counter(target for _, target in pairs)
    dice = sum(
        2 * (count - 1) / (source_counts[source] + target_counts[target] - 1) * count
        for (source, target), count in together.items()
    )
    words = sum(map(len, targets))
    return (len(pairs) + dice) / words if words else 0.0


def most_consistent(
    candidates: Mapping[Choice, Sequence[WordMap]], sources: Sequence[Sequence[str]], targets: Sequence[Sequence[str]]
) -> Choice:
    """The candidate with the highest :func:`consistency` of its mutual links; ties go to AWI and the first layer."""

    def rate(choice: Choice) -> float:
        return consistency(list(map(mutual_argmax, candidates[choice])), sources, targets)

    return max(sorted(candidates), key=rate)


def highest_norm(candidates: Mapping[Choice, Sequence[WordMap]]) -> Choice:
    """The candidate with the highest :func:`mean_norm` [Kobayashi et al. 2020, section 5.3]."""
    return max(candidates, key=lambda choice: mean_norm(candidates[choice]))


def mean_norm(maps: Sequence[WordMap]) -> float:
    """The mean entry of all pairs' maps, null column included."""
    return float(sum(word_map.sum() for word_map in maps) / sum(word_map.size for word_map in maps))
