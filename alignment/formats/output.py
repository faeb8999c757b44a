"""Formats the alignments that a run writes, line by line."""

from collections.abc import Sequence
from dataclasses import dataclass

from alignment.formats.pharaoh import format_pharaoh
from alignment.links import Alignment
from alignment.scored import ScoredAlignment


@dataclass(frozen=True)
class PharaohOutput:
    """Pharaoh format: a line for each sentence pair, empty for one without an alignment."""

    scored = False

    def text(self, number: int, source: Sequence[str], target: Sequence[str], found: ScoredAlignment) -> str:
        """Return the text for the sentence pair of a line, with line ends."""
        del number, source, target
        return f"{format_pharaoh(found.links)}\n"

    def nothing(self, number: int) -> str:
        """Return the text for a line that has no alignment."""
        del number
        return f"{format_pharaoh(Alignment())}\n"
