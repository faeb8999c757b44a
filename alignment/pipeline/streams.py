"""Cuts a stream into blocks of the lines that are there, so that a line is not held back while input pauses."""

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import count, islice

from alignment.formats import TextSource
from captum_norm.runs import Block, LineReader, block_of
from captum_norm.text.lines import error_at


def cut_at_pauses(sources: Sequence[TextSource], live: int, size: int, pause: float) -> Iterator[Block]:
    """Cut texts that are read in parallel into blocks; a block ends when the stream among them pauses.

    While the stream flows, or lines are waiting when the last block is done, blocks have ``size`` lines.

    Args:
        sources: the texts.
        live: the index of the stream.
        size: the most lines of a block.
        pause: seconds without a new line after which a block ends.

    Raises:
        InvalidInputError: a source cannot be read, see :func:`~captum_norm.text.lines.raw_lines`; or one ends
            before another.
    """
    readers = [LineReader(source) for source in sources]
    waiting = queue.Queue[bytes | BaseException | None](size)
    threading.Thread(target=_read, args=(readers[live].lines, waiting), daemon=True).start()
    first = 1
    for index in count():
        lines = _taken(waiting, size, pause)
        wanted = len(lines) or 1
        sides = [lines if place == live else list(islice(reader.lines, wanted)) for place, reader in enumerate(readers)]
        lengths = [len(side) for side in sides]
        if min(lengths) < max(lengths):
            shortest, longest = lengths.index(min(lengths)), lengths.index(max(lengths))
            message = f"got no such line, but {readers[longest].name} has one; expected equally many in both"
            raise error_at(sources[shortest], first + lengths[shortest], message)
        if not lines:
            return
        yield block_of(index, first, len(lines), sides, readers)
        first += len(lines)


def _read(lines: Iterator[bytes], waiting: "queue.Queue[bytes | BaseException | None]") -> None:
    """Put lines into the queue, then None; or the error that ends them."""
    try:
        for line in lines:
            waiting.put(line)
    except BaseException as error:  # noqa: BLE001 - raised where the lines are used
        waiting.put(error)
    else:
        waiting.put(None)


def _taken(waiting: "queue.Queue[bytes | BaseException | None]", size: int, pause: float) -> list[bytes]:
    """The lines until the next pause, at least one; none at the end."""
    lines: list[bytes] = []
    while len(lines) < size:
        try:
            found = waiting.get(timeout=pause if lines else None)
        except queue.Empty:
            break
        if isinstance(found, bytes):
            lines.append(found)
            continue
        if lines or found is None:
            waiting.put(found)  # what ends the stream, for the next call
            break
        raise found
    return lines
