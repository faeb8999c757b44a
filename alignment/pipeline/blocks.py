"""Aligns the lines of a block of parallel text, and writes its links in a format or its maps for a second pass."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from io import BytesIO
from os import PathLike
from typing import Any, Literal, NamedTuple, Protocol, cast

from alignment.documents import Section, gathered, joined
from alignment.formats import read_parallel, split_words
from alignment.formats.output import Output, decoded, encoded
from alignment.links import Alignment, ScoredAlignment
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError
from captum_norm.runs import Block, Part, Record
from captum_norm.text.lines import error_at, scan_lines

Pairs = Sequence[tuple[list[str], list[str]]]
Answer = Alignment | InvalidInputError


Aligner = Callable[[Pairs], Sequence[Answer]] | Any
"""Aligns a batch of (source words, target words): an :class:`alignment.WordAligner` or
:class:`alignment.BidirectionalAligner`, or a function that returns each pair's alignment, or an error that says why
not."""

Splits = tuple[Callable[[str], list[str]], Callable[[str], list[str]]]
"""Functions that split source and target sentences into words."""

Line = tuple[str, str] | InvalidInputError
"""The two sides of a line, or the error that says why it cannot be read."""

WORD_LETTERS = 16
"""How many letters words have at most on average, in a line with as many words as it may have."""

_Reason = Literal["unreadable", "empty", "too_long", "refused"]
_WORDINGS: dict[_Reason, str] = {
    "unreadable": "unreadable",
    "empty": "with an empty side",
    "too_long": "too long",
    "refused": "refused by the aligner",
}


@dataclass(frozen=True, slots=True)
class ExtractionCounts:
    """Numbers of lines and links of an extraction; each bad line counts under one reason.

    Attributes:
        lines: all lines, read and written.
        links: links written.
        unreadable: bad lines that are not UTF-8 or do not have two sides.
        empty: those without a word on one side; without any, a line is blank, not bad.
        too_long: those with too many words, or letters, on a side.
        refused: those that the aligner returned an error for.

    >>> print(ExtractionCounts(lines=3, links=4) + ExtractionCounts(lines=2, empty=1, refused=1))
    5 lines, 4 links; 2 bad lines: 1 with an empty side, 1 refused by the aligner
    """

    lines: int = 0
    links: int = 0
    unreadable: int = 0
    empty: int = 0
    too_long: int = 0
    refused: int = 0

    @property
    def bad_lines(self) -> int:
        """The number of lines without an alignment."""
        return self.unreadable + self.empty + self.too_long + self.refused

    def __add__(self, other: "ExtractionCounts") -> "ExtractionCounts":
        return ExtractionCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return f"{self.lines:,} lines, {self.links:,} links; {self.bad}"

    @property
    def bad(self) -> str:
        """The number of bad lines and their reasons, in words."""
        numbers = asdict(self)
        bad = ", ".join(f"{numbers[reason]:,} {wording}" for reason, wording in _WORDINGS.items() if numbers[reason])
        return f"{self.bad_lines:,} bad lines" + (f": {bad}" if bad else "")


class Written(NamedTuple):
    """What is written for a sentence pair.

    Attributes:
        text: the text, with line ends.
        links: the number of its links.
    """

    text: str
    links: int


class Writing(Protocol):
    """What is written of each sentence pair."""

    def answers(self, align: Aligner, pairs: Pairs) -> Iterator[tuple[int, Any]]:
        """Yield each pair's index and what an aligner finds, or an error that says why it finds nothing."""
        ...

    def written(self, number: int, source: Sequence[str], target: Sequence[str], answer: Any) -> Written:
        """Return what is written of a pair, on the line of this number, that was answered without an error."""
        ...

    def nothing(self, number: int) -> str:
        """Return what is written for a line without an alignment."""
        ...


@dataclass(frozen=True)
class LinkWriting:
    """Writes links in a format."""

    form: Output

    def answers(self, align: Aligner, pairs: Pairs) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
        """Yield each pair's index and alignment."""
        if hasattr(align, "read_each"):
            yield from align.read_each(pairs)
        elif self.form.scored:
            raise InvalidInputError(f"got a {type(align).__name__}, which has no scores; give a WordAligner")
        else:
            for index, (_, answer) in enumerate(zip(pairs, align(pairs), strict=True)):
                yield index, answer if isinstance(answer, InvalidInputError) else ScoredAlignment(answer)

    def written(self, number: int, source: Sequence[str], target: Sequence[str], answer: ScoredAlignment) -> Written:
        """Return the links of an alignment."""
        probable = answer.at_least(self.form.min_score)
        return Written(self.form.text(number, source, target, probable), len(probable.links))

    def nothing(self, number: int) -> str:
        """Return what is written for a line without an alignment."""
        del number
        return self.form.nothing()


@dataclass(frozen=True)
class Counting:
    """The passes of an aligner that counts the text's own word pairs: it writes maps, then reads links off them."""

    align: Any
    links: LinkWriting
    save_lexicon: str | PathLike[str] | None

    def answers(
        self, align: Any, pairs: Pairs
    ) -> Iterator[tuple[int, list[tuple[Section, WordMap]] | InvalidInputError]]:
        """Yield each pair's index and the maps of its sections."""
        sections = align.cut(pairs)
        return gathered(sections, align.map_each([section.words for section in sections]))

    def written(
        self, number: int, source: Sequence[str], target: Sequence[str], answer: list[tuple[Section, WordMap]]
    ) -> Written:
        """Return a pair's words, maps and probabilities to count, as a line of JSON."""
        del number
        arrays = [(section.begin, own.shape, encoded(own), encoded(self.align.counted(own))) for section, own in answer]
        return Written(f"{json.dumps([source, target, arrays], ensure_ascii=False)}\n", 0)

    def nothing(self, number: int) -> str:
        """Return an empty line."""
        del number
        return "\n"

    def reread(self, records: Callable[[], Iterator[Record]]) -> Iterator[Record]:
        """Count all records of the first pass, then yield records of their links; save the word pairs at the end."""
        lexicon = self.align.begun_lexicon()
        for record in records():
            for line in filter(None, record.content.split(b"\n")):
                for section, _, counted in _parsed(line)[2]:
                    lexicon.count(*section.words, counted)
        number = 0
        for record in records():
            texts, links = [], 0
            for line in record.content.split(b"\n")[:-1]:
                number += 1
                if line:
                    source, target, maps = _parsed(line)
                    answers = [
                        (part, self.align.read(own, *part.words, lexicon, counted)) for part, own, counted in maps
                    ]
                    text, more = self.links.written(number, source, target, joined(source, target, answers))
                    texts.append(text)
                    links += more
                else:
                    texts.append(self.links.nothing(number))
            counts = {**record.notes["counts"], "links": links}
            yield Record({**record.notes, "counts": counts}, "".join(texts).encode())
        if self.save_lexicon is not None:
            lexicon.save(self.save_lexicon)


def _parsed(line: bytes) -> tuple[list[str], list[str], list[tuple[Section, WordMap, WordMap]]]:
    source, target, entries = json.loads(line)
    maps = []
    for (first, second), (rows, columns), *arrays in entries:
        words = source[first : first + columns], target[second : second + rows]
        word_map, counted = (decoded(array, (rows, columns)) for array in arrays)
        maps.append((Section(0, (first, second), words), word_map, counted))
    return source, target, maps


def read_lines(block: Block) -> list[Line]:
    """Read the lines of a block; InvalidInputError if it is the first and none of its lines can be read."""
    errors: list[InvalidInputError] = []
    pairs = read_parallel(*map(_Stream, block.read(), block.parts), on_error=errors.append, first=block.first)
    lines: list[Line] = [errors.pop() if errors else pair for pair in pairs]
    if block.index == 0 and lines and all(isinstance(line, InvalidInputError) for line in lines):
        raise cast(InvalidInputError, lines[0])
    return lines


def read_rows(block: Block) -> Iterator[tuple[int, list[str] | InvalidInputError]]:
    """Yield the number of each line of a block, and its text in every file or the first error among these."""
    contents = zip(block.read(), block.parts, strict=True)
    sides = [scan_lines(BytesIO(content), part.source, block.first) for content, part in contents]
    for row in zip(*sides, strict=True):
        texts = [text for _, text in row if not isinstance(text, InvalidInputError)]
        errors = [text for _, text in row if isinstance(text, InvalidInputError)]
        yield row[0][0], errors[0] if errors else texts


class _Stream(BytesIO):
    """The lines of a block in one file, with its name for messages."""

    def __init__(self, content: bytes, part: Part) -> None:
        super().__init__(content)
        self.name = part.source


@dataclass(frozen=True, slots=True)
class BlockAligner:
    """Aligns all good pairs of a block at once; ``stop`` raises the error of the first bad line.

    A side may have :data:`WORD_LETTERS` letters for each word that it may have.
    """

    align: Aligner
    writing: Writing
    max_words: int
    stop: bool
    splits: Splits = (split_words, split_words)

    def __call__(self, block: Block) -> Record:
        """Align a block; return its record."""
        batch: dict[int, tuple[list[str], list[str]]] = {}
        bad: dict[int, tuple[_Reason, InvalidInputError]] = {}
        for number, pair in enumerate(self._pairs(block), block.first):
            if isinstance(pair, InvalidInputError):
                bad[number] = ("unreadable", pair)
            elif not any(pair):
                continue  # blank on both sides
            elif problem := self._problem(block, number, pair):
                bad[number] = problem
            else:
                batch[number] = pair
        self._stop_at_first(bad)
        written: dict[int, Written] = {}
        numbers, pairs = list(batch), list(batch.values())
        align = self.align.ready(pairs) if hasattr(self.align, "ready") else self.align
        for index, answer in self.writing.answers(align, pairs) if pairs else ():
            number = numbers[index]
            if isinstance(answer, InvalidInputError):
                bad[number] = ("refused", error_at(block.parts[0].source, number, str(answer)))
            else:
                written[number] = self.writing.written(number, *batch[number], answer)
        self._stop_at_first(bad)
        counts = ExtractionCounts(lines=block.lines, links=sum(links for _, links in written.values()))
        reasons = [bad[number] for number in sorted(bad)]
        counts = sum((ExtractionCounts(**{reason: 1}) for reason, _ in reasons), counts)
        lines = range(block.first, block.last + 1)
        text = (written[number].text if number in written else self.writing.nothing(number) for number in lines)
        return Record({"counts": asdict(counts)}, "".join(text).encode(), [str(error) for _, error in reasons])

    def _pairs(self, block: Block) -> Iterator[tuple[list[str], list[str]] | InvalidInputError]:
        """Yield the words of both sides of each line, or an error; an aligner may read what is no text itself."""
        if hasattr(self.align, "read_block"):
            yield from self.align.read_block(block)
            return
        for line in read_lines(block):
            yield line if isinstance(line, InvalidInputError) else (self.splits[0](line[0]), self.splits[1](line[1]))

    def _problem(
        self, block: Block, number: int, pair: tuple[list[str], list[str]]
    ) -> tuple[_Reason, InvalidInputError] | None:
        advice = "allow more with --max-words (max_words=), or split the line"
        for side, (name, words) in enumerate(zip(("source", "target"), pair, strict=True)):
            file = block.parts[min(side, len(block.parts) - 1)].source
            letters, most = sum(map(len, words)), WORD_LETTERS * self.max_words
            if not words:
                return "empty", error_at(file, number, f"got no word on the {name} side, expected at least one")
            if len(words) > self.max_words:
                message = f"got {len(words)} words on the {name} side, expected at most {self.max_words}"
                return "too_long", error_at(file, number, f"{message}; {advice}")
            if letters > most:
                message = f"got {letters} letters on the {name} side, expected at most {most}"
                expected = f"{WORD_LETTERS} for each of {self.max_words} words"
                return "too_long", error_at(file, number, f"{message}, {expected}; {advice}")
        return None

    def _stop_at_first(self, bad: dict[int, tuple[_Reason, InvalidInputError]]) -> None:
        if bad and self.stop:
            _, error = bad[min(bad)]
            raise InvalidInputError(
                f"{error}; or leave bad lines empty with --bad-lines empty (bad_lines='empty')"
            ) from error
