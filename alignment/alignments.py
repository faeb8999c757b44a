"""The alignments of sentence pairs together with their words."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, SupportsIndex, overload

from alignment.links import Alignment, Link
from captum_norm import InvalidInputError
from captum_norm.results.base import Result

_LONGEST = 300
"""Characters that a console shows of the links."""


class Alignments(list[Alignment], Result):
    """A list of alignments that knows the words aligned, and that a notebook shows.

    ``alignments[0]`` are the links of the first sentence pair; a slice, such as ``alignments[:1]``, has the words, too.
    Equal are those with the same links and words; a list without words is compared by the links.

    Args:
        links: the links of each sentence pair.
        sources: the words of each source sentence.
        targets: the words of each target sentence.

    Raises:
        InvalidInputError: their numbers differ, or a link is not between words.

    Example:
        >>> alignments = Alignments([[(0, 0), (1, 1)]], [["la", "maison"]], [["the", "house"]])
        >>> alignments
        [Alignment([(0, 0), (1, 1)])]
        >>> alignments.pairs(0)
        [('la', 'the'), ('maison', 'house')]
        >>> alignments.top(1)
        [(('la', 'the'), 1)]
    """

    def __init__(
        self,
        links: Sequence[Sequence[Link]] | Sequence[Alignment],
        sources: Sequence[Sequence[str]],
        targets: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(pair if isinstance(pair, Alignment) else Alignment(pair) for pair in links)
        self.sources = [list(words) for words in sources]
        self.targets = [list(words) for words in targets]
        if not len(self) == len(self.sources) == len(self.targets):
            raise InvalidInputError(
                f"got {len(self)} alignments of {len(self.sources)} source and {len(self.targets)} target sentences; "
                "expected equally many"
            )
        for index, pair in enumerate(self):
            if any(i >= len(self.sources[index]) or j >= len(self.targets[index]) for i, j in pair):
                raise InvalidInputError(f"got the links {list(pair)[:3]} … of pair {index}, which has fewer words")

    def __repr__(self) -> str:
        links = super().__repr__()
        count = sum(map(len, self))
        return links if len(links) <= _LONGEST else f"Alignments({len(self)} sentence pairs, {count} links)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Alignments):
            return super().__eq__(other)
        return super().__eq__(other) and (self.sources, self.targets) == (other.sources, other.targets)

    __hash__ = None  # as a list, it can change

    def __ne__(self, other: object) -> bool:
        return not self == other

    @overload
    def __getitem__(self, index: SupportsIndex) -> Alignment: ...

    @overload
    def __getitem__(self, index: slice) -> "Alignments": ...

    def __getitem__(self, index: SupportsIndex | slice) -> "Alignment | Alignments":
        """Return the links of a sentence pair; of a slice, several with their words."""
        pairs = super().__getitem__(index)
        return pairs if isinstance(pairs, Alignment) else Alignments(pairs, self.sources[index], self.targets[index])

    @property
    def links(self) -> Sequence[Sequence[Link]]:
        """The links of each pair in ascending order."""
        return [list(pair) for pair in self]

    def pairs(self, index: int) -> list[tuple[str, str]]:
        """Return the linked words of a sentence pair."""
        return [(self.sources[index][source], self.targets[index][target]) for source, target in self[index]]

    def top(self, count: int = 10) -> list[tuple[tuple[str, str], int]]:
        """Return the pairs of words that are linked most often, and how often; ties keep their order in the text."""
        if count < 1:
            raise InvalidInputError(f"got count={count}; expected at least 1")
        return Counter(pair for index in range(len(self)) for pair in self.pairs(index)).most_common(count)

    def words(self) -> "Alignments":
        """Return the alignments themselves, which already link words."""
        return self

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each link: pair, source and target index, and their words."""
        columns = ["pair", "source", "target", "source_word", "target_word"]
        return [
            dict(zip(columns, (index, *link, *words), strict=True))
            for index, links in enumerate(self)
            for link, words in zip(links, self.pairs(index), strict=True)
        ]
