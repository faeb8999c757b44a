"""Reads text of any size in blocks of lines, or of documents separated by blank lines."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

from captum_norm.errors import InvalidInputError
from captum_norm.texts import is_regular_file, read_lines

Unit = Literal["lines", "documents"]
"""A text: one line, or all lines up to a blank one."""


@dataclass(frozen=True, slots=True)
class CorpusBlock:
    """Consecutive texts of a corpus.

    Attributes:
        index: its index in the corpus.
        texts: the texts, each with the number of its first line, from 1.
    """

    index: int
    texts: tuple[tuple[int, str], ...]

    def content(self) -> Iterator[str]:
        """Yield the texts with their line numbers, which identify the block."""
        return (f"{number} {text}\n" for number, text in self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __str__(self) -> str:
        return f"the texts from line {self.texts[0][0]} to line {self.texts[-1][0]}"


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
        path: the file, UTF-8; ``.gz``, ``.xz`` and ``.bz2`` are decompressed.
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
        return islice(self._lines() if self.unit == "lines" else self._documents(), self.limit)

    def blocks(self, size: int) -> Iterator[CorpusBlock]:
        """Read the texts in blocks of ``size``; the last one may be smaller."""
        texts = self.texts()
        for index in count():
            block = tuple(islice(texts, size))
            if not block:
                return
            yield CorpusBlock(index, block)

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

    def _lines(self) -> Iterator[tuple[int, str]]:
        return ((number, line) for number, line in read_lines(self.path, self.name) if line.strip())

    def _documents(self) -> Iterator[tuple[int, str]]:
        first, gathered = 1, list[str]()
        for number, line in read_lines(self.path, self.name):
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
