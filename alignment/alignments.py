"""The alignments of sentence pairs together with their words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alignment.links import Alignment, Link
from captum_norm import InvalidInputError
from captum_norm.results import Result
from captum_norm.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from captum_norm.visualization.page import Page


class Alignments(list[Alignment], Result):  # type: ignore[misc]  # as a list, it has no hash
    """A list of alignments that knows the words aligned, and that a notebook shows.

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
    """

    def __init__(
        self,
        links: Sequence[Sequence[Link]] | Sequence[Alignment],
        sources: Sequence[Sequence[str]],
        targets: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(one if isinstance(one, Alignment) else Alignment(one) for one in links)
        self.sources = [list(words) for words in sources]
        self.targets = [list(words) for words in targets]
        if not len(self) == len(self.sources) == len(self.targets):
            raise InvalidInputError(
                f"got {len(self)} alignments of {len(self.sources)} source and {len(self.targets)} target sentences; "
                "expected equally many"
            )
        for index, one in enumerate(self):
            if any(i >= len(self.sources[index]) or j >= len(self.targets[index]) for i, j in one):
                raise InvalidInputError(f"got the links {list(one)[:3]} … of pair {index}, which has fewer words")

    @property
    def links(self) -> Sequence[Sequence[Link]]:
        """The links of each pair in ascending order."""
        return [list(one) for one in self]

    def pairs(self, index: int) -> list[tuple[str, str]]:
        """Return the linked words of a sentence pair."""
        return [(self.sources[index][source], self.targets[index][target]) for source, target in self[index]]

    def to_frame(self) -> "pd.DataFrame":
        """Return a data frame of pandas with a row for each link: pair, source and target index, and their words.

        Raises:
            InvalidInputError: pandas is not installed.
        """
        columns = ["pair", "source", "target", "source_word", "target_word"]
        rows = [
            (index, *link, *words)
            for index, one in enumerate(self)
            for link, words in zip(one, self.pairs(index), strict=True)
        ]
        return data_frame(rows, columns)

    def plot(self) -> "Figure":
        """Draw the links of the only sentence pair, source words across and target words down.

        Raises:
            InvalidInputError: there are several pairs, or a side has no words.
        """
        from captum_norm.visualization import Panel, draw_heatmaps

        if len(self) != 1 or not self.sources[0] or not self.targets[0]:
            raise InvalidInputError(f"got alignments of {len(self)} sentence pairs; draw those of one that has words")
        grid = [[float((i, j) in self[0]) for i in range(len(self.sources[0]))] for j in range(len(self.targets[0]))]
        return draw_heatmaps([Panel("links", grid, "link")], self.targets[0], self.sources[0])

    def page(self) -> "Page":
        """Return what a notebook shows, as the data of a page."""
        from alignment.pages import alignment_page

        return alignment_page(self.sources, self.targets, self)
