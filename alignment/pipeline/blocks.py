"""Cuts parallel text into blocks of lines, and aligns a block."""

import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import count, islice
from typing import Literal, Protocol, runtime_checkable

from alignment.formats import TextSource, format_pharaoh, parse_pharaoh, read_parallel, split_words
from alignment.links import Alignment
from captum_norm import InvalidInputError
from captum_norm.runs import Record, Save
from captum_norm.texts import error_at

Pairs = Sequence[tuple[list[str], list[str]]]
Answer = Alignment | InvalidInputError


@runtime_checkable
class SteadyAligner(Protocol):
    """An aligner that hands over each alignment as soon as it is there, as :class:`alignment.WordAligner` does."""

    def align_each(self, pairs: Pairs, known: Container[int]) -> Iterator[tuple[int, Answer]]:
        """Each pair's index and its alignment or, if there is none, an error saying why.

        Args:
            pairs: (source words, target words); alignments must depend on all of them alone.
            known: indices of pairs that may be left out.
        """
        ...


Aligner = Callable[[Pairs], Sequence[Answer]] | SteadyAligner
"""Aligns a batch of (source words, target words): for each pair its alignment or, if it cannot, an error saying why."""

_Kind = Literal["unreadable", "empty", "too_long", "refused"]
_WORDINGS: dict[_Kind, str] = {
    "unreadable": "unreadable",
    "empty": "with an empty side",
    "too_long": "too long",
    "refused": "refused by the aligner",
}


@dataclass(frozen=True, slots=True)
class ExtractionCounts:
    """What became of the lines of a parallel text; each bad line is counted under one reason.

    Attributes:
        lines: all lines, read and written.
        links: links written.
        unreadable: not UTF-8, or not ``source ||| target``.
        empty: no word on one side or on both.
        too_long: too many words on a side.
        refused: the aligner gave an error.

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
        """The lines that have no alignment, for whatever reason."""
        return self.unreadable + self.empty + self.too_long + self.refused

    def __add__(self, other: "ExtractionCounts") -> "ExtractionCounts":
        return ExtractionCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        reasons = {field.name: getattr(self, field.name) for field in fields(self)}
        bad = ", ".join(f"{reasons[kind]:,} {wording}" for kind, wording in _WORDINGS.items() if reasons[kind])
        return f"{self.lines:,} lines, {self.links:,} links; {self.bad_lines:,} bad lines" + (f": {bad}" if bad else "")


@dataclass(frozen=True, slots=True)
class PairBlock:
    """Consecutive lines of a parallel text.

    Attributes:
        index: which block of the text, from 0.
        first: the number of its first line, from 1.
        lines: the two sides of each line, or why it could not be read.
    """

    index: int
    first: int
    lines: list[tuple[str, str] | InvalidInputError]

    def check_readable(self) -> None:
        """Refuse a text of which nothing can be read, such as one in another encoding, or without its other side.

        Raises:
            InvalidInputError: the block is the first one, and none of its lines could be read.
        """
        errors = [line for line in self.lines if isinstance(line, InvalidInputError)]
        if self.index == 0 and errors and len(errors) == len(self.lines):
            raise errors[0]

    def content(self) -> Iterator[str]:
        """The lines: blocks that have the same are the same."""
        for line in self.lines:
            # No side contains a line feed.
            yield "\n\nunreadable\n" if isinstance(line, InvalidInputError) else f"{line[0]}\n{line[1]}\n\n"

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        return f"lines {self.first} to {self.first + len(self) - 1} of the input"


@dataclass(frozen=True, slots=True)
class ParallelText:
    """Where sentence pairs come from, as ``read_parallel`` takes it."""

    source: TextSource
    target: TextSource | None

    def blocks(self, size: int) -> Iterator[PairBlock]:
        """The text in blocks of ``size`` lines, the last one perhaps shorter, read as they are asked for.

        Raises:
            InvalidInputError: see :func:`~alignment.formats.read_parallel`; of two files of which one ends before the
                other, the one of which nothing can be read is at fault.
        """
        errors: list[InvalidInputError] = []
        pairs = read_parallel(self.source, self.target, on_error=errors.append)
        for index in count():
            block = PairBlock(index, index * size + 1, [])
            try:
                for pair in islice(pairs, size):
                    block.lines.append(errors.pop() if errors else pair)
            except InvalidInputError:
                block.check_readable()  # text in another encoding has other lines, too
                raise
            if not block.lines:
                return
            yield block

    def error(self, number: int, message: str, *, side: int = 0) -> InvalidInputError:
        """An error about a line; ``side`` 1 is in the target file if there is one."""
        return error_at(self.target if side and self.target is not None else self.source, number, message)


@dataclass(frozen=True, slots=True)
class BlockAligner:
    """Turns blocks into lines in Pharaoh format, an empty one for each bad line; notes their counts.

    What is saved of a block are its alignments as JSON, by their lines' places among those that can be aligned.

    Attributes:
        text: what the blocks are from, for messages.
        align: the aligner; it gets the good pairs of a block together.
        max_words: more words on a side make a line bad.
        stop: whether the first bad line is raised.
        report: told of every bad line, in order.
    """

    text: ParallelText
    align: Aligner
    max_words: int
    stop: bool
    report: Callable[[str], None]

    def __call__(self, block: PairBlock, saved: Record | None = None, save: Save = lambda _: None) -> Record:
        """The block's record; what was saved of it is not aligned again.

        Raises:
            InvalidInputError: a line is bad and ``stop`` is set, or nothing of the text can be read.
        """
        block.check_readable()
        batch: dict[int, tuple[list[str], list[str]]] = {}
        bad: dict[int, tuple[_Kind, InvalidInputError]] = {}
        numbers = range(block.first, block.first + len(block))
        for number, line in zip(numbers, block.lines, strict=True):
            if isinstance(line, InvalidInputError):
                bad[number] = ("unreadable", line)
                continue
            pair = split_words(line[0]), split_words(line[1])
            if problem := self._problem(number, pair):
                bad[number] = problem
            else:
                batch[number] = pair
        self._stop_at_first(bad)
        alignments: dict[int, Alignment] = {}
        for number, answer in zip(batch, self._answers(list(batch.values()), saved, save), strict=True):
            if isinstance(answer, InvalidInputError):
                bad[number] = ("refused", self.text.error(number, str(answer)))
            else:
                alignments[number] = answer
        self._stop_at_first(bad)
        counts = ExtractionCounts(lines=len(block), links=sum(map(len, alignments.values())))
        for _, (kind, error) in sorted(bad.items()):
            self.report(str(error))
            counts += ExtractionCounts(**{kind: 1})
        nothing = Alignment()
        lines = (f"{format_pharaoh(alignments.get(number, nothing))}\n" for number in numbers)
        return Record({"counts": asdict(counts)}, "".join(lines).encode("ascii"))

    def _answers(self, pairs: Pairs, saved: Record | None, save: Save) -> Sequence[Answer]:
        if not pairs:
            return []
        if not isinstance(self.align, SteadyAligner):
            return self.align(pairs)
        told = {} if saved is None else json.loads(saved.content)
        aligned = {int(index): parse_pharaoh(line) for index, line in told.items()}
        refused = dict[int, InvalidInputError]()

        def record() -> Record:
            links = {index: format_pharaoh(alignment) for index, alignment in aligned.items()}
            return Record({}, json.dumps(links).encode())

        for index, answer in self.align.align_each(pairs, aligned.copy()):
            if isinstance(answer, InvalidInputError):
                refused[index] = answer
            else:
                aligned[index] = answer
                save(record)
        return [refused[index] if index in refused else aligned[index] for index in range(len(pairs))]

    def _problem(self, number: int, pair: tuple[list[str], list[str]]) -> tuple[_Kind, InvalidInputError] | None:
        for side, (name, words) in enumerate(zip(("source", "target"), pair, strict=True)):
            if not words:
                message = f"got no word on the {name} side, expected at least one"
                return "empty", self.text.error(number, message, side=side)
            if len(words) > self.max_words:
                allow = "allow more with --max-words (max_words=), or split the line"
                found = f"got {len(words)} words on the {name} side, expected at most {self.max_words}"
                return "too_long", self.text.error(number, f"{found}; {allow}", side=side)
        return None

    def _stop_at_first(self, bad: dict[int, tuple[_Kind, InvalidInputError]]) -> None:
        if bad and self.stop:
            _, error = bad[min(bad)]
            raise InvalidInputError(
                f"{error}; or let bad lines stay empty with --bad-lines empty (bad_lines='empty')"
            ) from error
