"""Splits parallel text into blocks of lines, and aligns a block."""

import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
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
    """An aligner that yields each alignment as soon as it is done, such as :class:`alignment.WordAligner`."""

    def align_each(self, pairs: Pairs, known: Container[int]) -> Iterator[tuple[int, Answer]]:
        """Yield each pair's index and its alignment, or an error that says why there is none.

        Args:
            pairs: (source words, target words); alignments may depend on all of them, and on nothing else.
            known: indices of pairs that may be left out.
        """
        ...


Aligner = Callable[[Pairs], Sequence[Answer]] | SteadyAligner
"""Aligns a batch of (source words, target words): returns each pair's alignment, or an error that says why not."""

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
        unreadable: bad lines that are not UTF-8 or not ``source ||| target``.
        empty: those without a word on one or both sides.
        too_long: those with too many words on a side.
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
        numbers = asdict(self)
        bad = ", ".join(f"{numbers[reason]:,} {wording}" for reason, wording in _WORDINGS.items() if numbers[reason])
        return f"{self.lines:,} lines, {self.links:,} links; {self.bad_lines:,} bad lines" + (f": {bad}" if bad else "")


@dataclass(frozen=True, slots=True)
class PairBlock:
    """Consecutive lines of a parallel text.

    Attributes:
        index: the index of the block, from 0.
        first: the number of its first line, from 1.
        lines: the two sides of each line, or the error that says why it could not be read.
    """

    index: int
    first: int
    lines: list[tuple[str, str] | InvalidInputError]

    def check_readable(self) -> None:
        """Refuse unreadable text, such as text in another encoding or with one side only.

        Raises:
            InvalidInputError: this is the first block, and none of its lines could be read.
        """
        errors = [line for line in self.lines if isinstance(line, InvalidInputError)]
        if self.index == 0 and errors and len(errors) == len(self.lines):
            raise errors[0]

    def content(self) -> Iterator[str]:
        """The lines, which identify the block."""
        for line in self.lines:
            # No side contains a line feed.
            yield "\n\nunreadable\n" if isinstance(line, InvalidInputError) else f"{line[0]}\n{line[1]}\n\n"

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        return f"lines {self.first} to {self.first + len(self) - 1} of the input"


@dataclass(frozen=True, slots=True)
class ParallelText:
    """Parallel text, as in ``read_parallel``."""

    source: TextSource
    target: TextSource | None

    def blocks(self, size: int) -> Iterator[PairBlock]:
        """Yield the text in blocks of ``size`` lines; the last one may be shorter.

        Raises:
            InvalidInputError: see :func:`~alignment.formats.read_parallel`; if two files differ in length and one is
                unreadable, the error names that one.
        """
        errors: list[InvalidInputError] = []
        pairs = read_parallel(self.source, self.target, on_error=errors.append)
        for index in count():
            block = PairBlock(index, index * size + 1, [])
            try:
                for pair in islice(pairs, size):
                    block.lines.append(errors.pop() if errors else pair)
            except InvalidInputError:
                block.check_readable()  # text in another encoding is split into other lines
                raise
            if not block.lines:
                return
            yield block

    def error(self, number: int, message: str, *, side: int = 0) -> InvalidInputError:
        """An error about a line; ``side`` 1 refers to the target file, if there is one."""
        return error_at(self.target if side and self.target is not None else self.source, number, message)


@dataclass(frozen=True, slots=True)
class BlockAligner:
    """Aligns blocks: makes records of lines in Pharaoh format, empty for bad lines, and notes their counts.

    An unfinished block is saved as JSON: its alignments by index among the good pairs.

    Attributes:
        text: the text that the blocks are from, for messages.
        align: the aligner; it gets all good pairs of a block at once.
        max_words: lines with more words on a side are bad.
        stop: whether to raise the error of the first bad line.
        report: called with every bad line's error, in order.
    """

    text: ParallelText
    align: Aligner
    max_words: int
    stop: bool
    report: Callable[[str], None]

    def __call__(self, block: PairBlock, saved: Record | None = None, save: Save = lambda _: None) -> Record:
        """Align a block, except for the pairs in ``saved``; return its record.

        Raises:
            InvalidInputError: a line is bad and ``stop`` is set, or the text is unreadable.
        """
        block.check_readable()
        batch: dict[int, tuple[list[str], list[str]]] = {}
        bad: dict[int, tuple[_Reason, InvalidInputError]] = {}
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
        for _, (reason, error) in sorted(bad.items()):
            self.report(str(error))
            counts += ExtractionCounts(**{reason: 1})
        nothing = Alignment()
        lines = (f"{format_pharaoh(alignments.get(number, nothing))}\n" for number in numbers)
        return Record({"counts": asdict(counts)}, "".join(lines).encode("ascii"))

    def _answers(self, pairs: Pairs, saved: Record | None, save: Save) -> Sequence[Answer]:
        if not pairs:
            return []
        if not isinstance(self.align, SteadyAligner):
            return self.align(pairs)
        lines = {} if saved is None else json.loads(saved.content)
        aligned = {int(index): parse_pharaoh(line) for index, line in lines.items()}
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

    def _problem(self, number: int, pair: tuple[list[str], list[str]]) -> tuple[_Reason, InvalidInputError] | None:
        for side, (name, words) in enumerate(zip(("source", "target"), pair, strict=True)):
            if not words:
                message = f"got no word on the {name} side, expected at least one"
                return "empty", self.text.error(number, message, side=side)
            if len(words) > self.max_words:
                allow = "allow more with --max-words (max_words=), or split the line"
                found = f"got {len(words)} words on the {name} side, expected at most {self.max_words}"
                return "too_long", self.text.error(number, f"{found}; {allow}", side=side)
        return None

    def _stop_at_first(self, bad: dict[int, tuple[_Reason, InvalidInputError]]) -> None:
        if bad and self.stop:
            _, error = bad[min(bad)]
            raise InvalidInputError(
                f"{error}; or leave bad lines empty with --bad-lines empty (bad_lines='empty')"
            ) from error
