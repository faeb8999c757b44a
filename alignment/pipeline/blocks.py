"""Parallel text in blocks of lines, and what an aligner makes of a block."""

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import count, islice
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from alignment.formats import TextSource, format_pharaoh, read_parallel, split_words
from alignment.links import Alignment
from captum_norm import InvalidInputError
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
class Block:
    """Consecutive lines.

    Attributes:
        index: which block of the text, from 0.
        first: the number of its first line, from 1.
        pairs: the two sides of each line.
        unreadable: the errors of lines that could not be read, by their place in the block; their pairs are empty.
    """

    index: int
    first: int
    pairs: list[tuple[str, str]]
    unreadable: dict[int, InvalidInputError]

    def check_readable(self) -> None:
        """Refuse a text of which nothing can be read, such as one in another encoding, or without its other side.

        Raises:
            InvalidInputError: the block is the first one, and none of its lines could be read.
        """
        if self.index == 0 and self.unreadable and len(self.unreadable) == len(self.pairs):
            raise self.unreadable[0]

    def digest(self) -> str:
        """A hash of the text: two blocks that have the same are the same."""
        digest = hashlib.blake2b(digest_size=16)
        for offset, (source, target) in enumerate(self.pairs):
            unreadable = "unreadable" if offset in self.unreadable else ""
            digest.update(f"{source}\n{target}\n{unreadable}\n".encode())  # no side contains a line feed
        return digest.hexdigest()


class AlignedBlock(NamedTuple):
    """The lines in Pharaoh format that a block becomes, and their counts."""

    lines: list[str]
    counts: ExtractionCounts


@dataclass(frozen=True, slots=True)
class ParallelText:
    """Where sentence pairs come from, as ``read_parallel`` takes it."""

    source: TextSource
    target: TextSource | None

    def blocks(self, size: int) -> Iterator[Block]:
        """The text in blocks of ``size`` lines, the last one perhaps shorter, read as they are asked for.

        Raises:
            InvalidInputError: see :func:`~alignment.formats.read_parallel`; of two files of which one ends before the
                other, the one of which nothing can be read is at fault.
        """
        errors: list[InvalidInputError] = []
        pairs = read_parallel(self.source, self.target, on_error=errors.append)
        for index in count():
            block = Block(index, index * size + 1, [], {})
            try:
                for offset, pair in enumerate(islice(pairs, size)):
                    block.pairs.append(pair)
                    if errors:
                        block.unreadable[offset] = errors.pop()
            except InvalidInputError:
                block.check_readable()  # text in another encoding has other lines, too
                raise
            if not block.pairs:
                return
            yield block

    def error(self, number: int, message: str, *, side: int = 0) -> InvalidInputError:
        """An error about a line; ``side`` 1 is in the target file if there is one."""
        return error_at(self.target if side and self.target is not None else self.source, number, message)


@dataclass(frozen=True, slots=True)
class BlockAligner:
    """Turns blocks into lines in Pharaoh format, an empty one for each bad line.

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

    def __call__(
        self,
        block: Block,
        *,
        known: Mapping[int, Alignment] = MappingProxyType({}),
        save: Callable[[Mapping[int, Alignment]], None] = lambda _: None,
    ) -> AlignedBlock:
        """The block's lines.

        Args:
            block: the block.
            known: alignments that were saved, by their lines' places among those that can be aligned.
            save: told of such alignments when there are more of them.

        Raises:
            InvalidInputError: a line is bad and ``stop`` is set, or nothing of the text can be read.
        """
        block.check_readable()
        batch: dict[int, tuple[list[str], list[str]]] = {}
        bad: dict[int, tuple[_Kind, InvalidInputError]] = {}
        for offset, (source, target) in enumerate(block.pairs):
            pair = split_words(source), split_words(target)
            if offset in block.unreadable:
                bad[offset] = ("unreadable", block.unreadable[offset])
            elif problem := self._problem(block.first + offset, pair):
                bad[offset] = problem
            else:
                batch[offset] = pair
        self._stop_at_first(bad)
        alignments: dict[int, Alignment] = {}
        for offset, answer in zip(batch, self._answers(list(batch.values()), known, save), strict=True):
            if isinstance(answer, InvalidInputError):
                bad[offset] = ("refused", self.text.error(block.first + offset, str(answer)))
            else:
                alignments[offset] = answer
        self._stop_at_first(bad)
        counts = ExtractionCounts(lines=len(block.pairs), links=sum(map(len, alignments.values())))
        for _, (kind, error) in sorted(bad.items()):
            self.report(str(error))
            counts += ExtractionCounts(**{kind: 1})
        nothing = Alignment()
        lines = [format_pharaoh(alignments.get(offset, nothing)) for offset in range(len(block.pairs))]
        return AlignedBlock(lines, counts)

    def _answers(
        self, pairs: Pairs, known: Mapping[int, Alignment], save: Callable[[Mapping[int, Alignment]], None]
    ) -> Sequence[Answer]:
        if not pairs:
            return []
        if not isinstance(self.align, SteadyAligner):
            return self.align(pairs)
        aligned, refused = dict(known), dict[int, InvalidInputError]()
        for index, answer in self.align.align_each(pairs, known):
            if isinstance(answer, InvalidInputError):
                refused[index] = answer
            else:
                aligned[index] = answer
                save(aligned)
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
