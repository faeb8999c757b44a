"""Reads text of any size in blocks of lines, or of documents separated by blank lines."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

from captum_norm.errors import InvalidInputError
from captum_norm.runs import Block, LineReader, block_of
from captum_norm.text.lines import decoded, is_regular_file, read_lines

Unit = Literal["lines", "documents"]
"""A text: one line, or all lines up to a blank one."""


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """The size and hash of a corpus.

    Attributes:
        texts: the number of texts.
        sha256: a hash of the texts, each with a line feed: the hash of the file itself if it has no blank lines and
            ends with a line feed.
    """

    texts: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """A text file; blank lines are skipped.

    Attributes:
        path: the path or URL of the file, UTF-8; ``.gz``, ``.xz`` and ``.bz2`` are decompressed.
        unit: whether a text is a line or a document.
        limit: the number of texts to read; all if None.
        name: its name in results; the file's name if None.

    Raises:
        InvalidInputError: there is no such file, it is not a regular file, or an option is invalid.

    Example:
        >>> corpus = Corpus(SAMPLE, limit=2)
        >>> corpus.facts().texts
        2
    """

    path: str | PathLike[str]
    unit: Unit = "lines"
    limit: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not is_regular_file(self.path):
            raise InvalidInputError(f"cannot read {self.path} more than once; expected a regular file")
        if self.unit not in get_args(Unit):
            raise InvalidInputError(f"got unit={self.unit!r}; expected one of {', '.join(get_args(Unit))}")
        if self.limit is not None and self.limit < 1:
            raise InvalidInputError(f"got limit={self.limit}; expected at least 1")

    def __str__(self) -> str:
        return Path(self.path).name if self.name is None else self.name

    def texts(self) -> Iterator[tuple[int, str]]:
        """Read each text with the number of its first line, from 1.

        Raises:
            InvalidInputError: a line is not UTF-8, or a compressed file is damaged.
        """
        return islice(self._texts(read_lines(self.path, self.name)), self.limit)

    def blocks(self, size: int) -> Iterator[Block]:
        """Find blocks of ``size`` texts; the last one may be smaller."""
        reader = LineReader(self.path, self.name)
        first, index, left = 1, 0, self.limit
        while left is None or left > 0:
            lines, texts = self._take(reader, first, size if left is None else min(size, left))
            if not texts:
                return
            yield block_of(index, first, texts, [lines], [reader])
            first, index, left = first + len(lines), index + 1, None if left is None else left - texts

    def read(self, block: Block) -> Sequence[tuple[int, str]]:
        """Read the texts of a block, each with the number of its first line.

        Raises:
            InvalidInputError: the file has changed or cannot be read.
        """
        (content,) = block.read()
        return list(self._texts(read_lines(BytesIO(content), self.name or str(self.path), block.first)))

    def facts(self) -> CorpusFacts:
        """Read all texts, to count and hash them.

        Raises:
            InvalidInputError: there are none; see :meth:`texts`.
        """
        digest, texts = hashlib.sha256(), 0
        for _, text in self.texts():
            digest.update(f"{text}\n".encode())
            texts += 1
        if not texts:
            raise InvalidInputError(f"{self.name or self.path} has no text: all its lines are blank")
        return CorpusFacts(texts, digest.hexdigest())

    def _take(self, reader: LineReader, first: int, number: int) -> tuple[list[bytes], int]:
        """Take the lines of the next texts; return how many texts they are, too."""
        lines, texts, inside = list[bytes](), 0, False
        for line in reader.lines:
            lines.append(line)
            text = decoded(line, self.name or reader.name, first + len(lines) - 1)
            if isinstance(text, InvalidInputError):
                raise text
            blank = not text.strip()
            texts += inside and blank if self.unit == "documents" else not blank
            inside = not blank
            if texts == number:
                return lines, texts
        return lines, texts + (inside and self.unit == "documents")

    def _texts(self, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Put lines together to texts."""
        if self.unit == "lines":
            yield from ((number, line) for number, line in lines if line.strip())
            return
        first, gathered = 1, list[str]()
        for number, line in lines:
            if line.strip():
                first = first if gathered else number
                gathered.append(line)
            elif gathered:
                yield first, "\n".join(gathered)
                gathered = []
        if gathered:
            yield first, "\n".join(gathered)


SAMPLE = Path(__file__).parent / "data" / "europarl-en.txt"
"""The sample in the package: sentences from the proceedings of the European Parliament, one in each line."""
