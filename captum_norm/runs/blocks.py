"""Cuts text files into blocks of lines, which any process can read by itself."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from captum_norm.errors import InvalidInputError
from captum_norm.text.lines import TextSource, decoded, error_at, plain_size, raw_lines, read_range, source_name


class Part(NamedTuple):
    """The lines of a block in one file.

    Attributes:
        source: the path or URL of the file, or the name of the stream.
        offset: the position of the first byte in the file.
        size: the number of bytes.
        content: the bytes, if the file is compressed or a stream, whose lines are not found by their position.
    """

    source: str
    offset: int
    size: int
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive lines of an input, or of several that are read in parallel.

    Attributes:
        index: its index in the input, from 0.
        first: the number of its first line, from 1.
        last: the number of its last line.
        parts: where its lines are, in each file.
        digest: identifies its lines and their numbers.
        share: the share of the input that ends with this block; None if unknown.
    """

    index: int
    first: int
    last: int
    parts: tuple[Part, ...]
    digest: str
    share: float | None = None

    @property
    def lines(self) -> int:
        """The number of its lines."""
        return self.last - self.first + 1

    def read(self) -> list[bytes]:
        """Read its lines in each file.

        Raises:
            InvalidInputError: a file cannot be read, or has changed since it was cut.
        """
        contents = [read_range(*part[:3]) if part.content is None else part.content for part in self.parts]
        if _digest(self.first, contents) != self.digest:
            files = " or ".join(part.source for part in self.parts)
            raise InvalidInputError(f"{self} have changed since the start: see {files}; start again")
        return contents

    def __str__(self) -> str:
        return f"lines {self.first} to {self.last} of the input"


def _digest(first: int, contents: Sequence[bytes]) -> str:
    """Identify the lines of a block, and their numbers."""
    digest = hashlib.blake2b(f"{first} {[len(content) for content in contents]}\n".encode(), digest_size=16)
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


class _LineReader:
    """Reads the lines of a text with their ends, and remembers where they are."""

    def __init__(self, source: TextSource) -> None:
        self.name = source_name(source)
        texts = raw_lines(source)
        self.lines = (text if isinstance(text, bytes) else text.encode(errors="surrogatepass") for text in texts)
        self._size = plain_size(source)
        self._offset = 0

    def part(self, content: bytes) -> Part:
        """Where the lines are that were read since the last part; ``content`` are all of them."""
        part = Part(self.name, self._offset, len(content), content if self._size is None else None)
        self._offset += len(content)
        return part

    @property
    def share(self) -> float | None:
        """The share of the text that ends with the last part."""
        return self._offset / self._size if self._size else None


def cut(sources: Sequence[TextSource], size: int) -> Iterator[Block]:
    """Cut a text, or several that are read in parallel, into blocks of ``size`` lines; the last one may be shorter.

    Each line of the sources is read once.

    Raises:
        InvalidInputError: a source cannot be read, see :func:`~captum_norm.text.lines.raw_lines`; or one ends
            before another.
    """
    readers = [_LineReader(source) for source in sources]
    first = 1
    for index in count():
        sides = [list(islice(reader.lines, size)) for reader in readers]
        lengths = [len(lines) for lines in sides]
        if min(lengths) < max(lengths):
            if index == 0:  # a text in another encoding than UTF-8 is split into other lines
                for reader, lines in zip(readers, sides, strict=True):
                    texts = [decoded(line, reader.name, number) for number, line in enumerate(lines, 1)]
                    errors = [text for text in texts if isinstance(text, InvalidInputError)]
                    if errors and len(errors) == len(lines):
                        raise errors[0]
            shortest, longest = lengths.index(min(lengths)), lengths.index(max(lengths))
            message = f"got no such line, but {readers[longest].name} has one; expected equally many in both"
            raise error_at(sources[shortest], first + lengths[shortest], message)
        if not sides[0]:
            return
        contents = [b"".join(lines) for lines in sides]
        parts = tuple(reader.part(content) for reader, content in zip(readers, contents, strict=True))
        last = first + len(sides[0]) - 1
        yield Block(index, first, last, parts, _digest(first, contents), readers[0].share)
        first = last + 1
