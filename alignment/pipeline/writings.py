"""What a run writes of each sentence pair: its links in a format, or its map for a second pass."""

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from alignment.formats.output import Output, decoded, encoded
from alignment.lexicon import Lexicon
from alignment.links import ScoredAlignment
from alignment.pipeline.blocks import Aligner, Pairs, ReadingAligner, Written
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError
from captum_norm.runs import Record


class CountingAligner(Protocol):
    """An aligner that may count the text's own word pairs, such as :class:`alignment.WordAligner`.

    Attributes:
        count_text: whether it does.
    """

    count_text: bool

    def map_each(self, pairs: Pairs, known: Container[int]) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and its map, or an error that says why there is none."""
        ...

    def counted(self, word_map: WordMap) -> WordMap:
        """Return the link probabilities of a map that a lexicon counts."""
        ...

    def begun_lexicon(self) -> Lexicon:
        """Return the lexicon that the text's word pairs are added to."""
        ...

    def read(
        self, word_map: WordMap, source: Sequence[str], target: Sequence[str], lexicon: Lexicon | None, own: WordMap
    ) -> ScoredAlignment:
        """Read the links of a pair off its map."""
        ...


@dataclass(frozen=True)
class LinkWriting:
    """Writes links in a format."""

    form: Output

    def each(
        self, align: Aligner, pairs: Pairs, numbers: Sequence[int], known: Container[int]
    ) -> Iterator[tuple[int, Written | InvalidInputError]]:
        """Align the pairs, and yield what is written."""
        for index, found in _scored_each(align, pairs, known, scored=self.form.scored):
            if isinstance(found, InvalidInputError):
                yield index, found
            else:
                yield index, self.written(numbers[index], *pairs[index], found)

    def written(self, number: int, source: Sequence[str], target: Sequence[str], found: ScoredAlignment) -> Written:
        """What is written of an alignment."""
        kept = found.at_least(self.form.min_score)
        return Written(self.form.text(number, source, target, kept), len(kept.links))

    def nothing(self, number: int) -> str:
        """Return what is written for a line without an alignment."""
        del number
        return self.form.nothing()


def _scored_each(
    align: Aligner, pairs: Pairs, known: Container[int], *, scored: bool
) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
    if isinstance(align, ReadingAligner):
        yield from align.read_each(pairs, known)
        return
    if scored:
        raise InvalidInputError(f"got a {type(align).__name__}, which has no scores; give a WordAligner")
    for index, (_, found) in enumerate(zip(pairs, align(pairs), strict=True)):
        yield index, found if isinstance(found, InvalidInputError) else ScoredAlignment(found)


@dataclass(frozen=True)
class MapWriting:
    """Writes each pair's words, map and probabilities to count as a line of JSON, for a second pass."""

    def each(
        self, align: Aligner, pairs: Pairs, numbers: Sequence[int], known: Container[int]
    ) -> Iterator[tuple[int, Written | InvalidInputError]]:
        """Compute the maps, and yield what is written."""
        del numbers
        counting = cast(CountingAligner, align)
        for index, word_map in counting.map_each(pairs, known):
            if isinstance(word_map, InvalidInputError):
                yield index, word_map
            else:
                source, target = pairs[index]
                arrays = {"map": encoded(word_map), "counted": encoded(counting.counted(word_map))}
                line = json.dumps({"source": source, "target": target, **arrays}, ensure_ascii=False)
                yield index, Written(f"{line}\n", 0)

    def nothing(self, number: int) -> str:
        """Return an empty line."""
        del number
        return "\n"


def count_records(align: CountingAligner, records: Iterable[Record]) -> Lexicon:
    """Count the word pairs in records of :class:`MapWriting`."""
    lexicon = align.begun_lexicon()
    for record in records:
        for line in record.content.split(b"\n"):
            if line:
                source, target, _, counted = _parsed(line)
                lexicon.count(source, target, counted)
    return lexicon


def read_records(
    align: CountingAligner, writing: LinkWriting, records: Iterable[Record], lexicon: Lexicon
) -> Iterator[Record]:
    """Read the links in records of :class:`MapWriting` with a lexicon; yield records of what is written."""
    number = 0
    for record in records:
        texts, links = [], 0
        for line in record.content.split(b"\n")[:-1]:
            number += 1
            if line:
                source, target, word_map, counted = _parsed(line)
                found = writing.written(number, source, target, align.read(word_map, source, target, lexicon, counted))
                texts.append(found.text)
                links += found.links
            else:
                texts.append(writing.nothing(number))
        counts = {**record.notes["counts"], "links": links}
        yield Record({**record.notes, "counts": counts}, "".join(texts).encode())


def _parsed(line: bytes) -> tuple[list[str], list[str], WordMap, WordMap]:
    found = json.loads(line)
    shape = len(found["target"]), len(found["source"])
    return found["source"], found["target"], decoded(found["map"], shape), decoded(found["counted"], shape)
