"""Defines word alignments: sets of links between the words of a source and a target sentence."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index

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
        """The same gold with source and target exchanged.

        >>> GoldAlignment(Alignment([(0, 2)])).transposed().sure
        Alignment([(2, 0)])
        """
        return GoldAlignment(self.sure.transposed(), self.possible.transposed())
