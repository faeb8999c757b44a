"""``extract``: parallel text in, a line in Pharaoh format out for each of its lines."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import IO, Literal, get_args

from alignment.formats import TextSource
from alignment.formats.text import write_lines
from alignment.pipeline.blocks import Aligner, Block, BlockAligner, ExtractionCounts, ParallelText
from alignment.pipeline.journal import Journal
from alignment.pipeline.progress import Progress, to_stderr
from captum_norm import InvalidInputError
from captum_norm.runs import Setting, Team
from captum_norm.texts import is_regular_file, named

BadLines = Literal["empty", "stop"]
"""What becomes of a bad line: an empty line of the output, or the end of the run."""


def extract(
    source: TextSource,
    target: TextSource | None,
    align: Aligner,
    out: str | PathLike[str] | IO[bytes],
    *,
    settings: Mapping[str, Setting] | None = None,
    block_lines: int = 2048,
    max_words: int = 256,
    bad_lines: BadLines = "empty",
    overwrite: bool = False,
    restart: bool = False,
    rank: int = 0,
    world_size: int = 1,
    report: Callable[[str], None] | None = None,
    progress: bool | None = None,
) -> ExtractionCounts | None:
    r"""Align a parallel text of any size, line by line: line n of the output belongs to line n of the input.

    From files to a file, a run that was killed at any moment goes on where it stopped when it is started again, and
    the output is the same as if nothing had happened: finished blocks wait in the folder ``OUT.parts``, of a block that
    takes long every few seconds what is aligned, and ``OUT`` appears when all of it is there. Several processes share
    the blocks: block b is made by process b mod ``world_size``, and a run may be continued with another number of
    processes. With a stream on either side, the text is aligned straight through, by one process, and an interrupted
    run begins anew.

    A line is bad if it is not UTF-8, has not exactly one ``|||`` (in one file of both sides), has no word or more than
    ``max_words`` on a side, or if the aligner refuses it.

    Args:
        source: the source sentences, one a line; without ``target``, lines ``source ||| target``. Path (``.gz``,
            ``.xz`` and ``.bz2`` are decompressed) or open stream.
        target: the target sentences, one a line.
        align: a :class:`~alignment.WordAligner`; or a function that is called with the good pairs of a block, as words,
            and depends on them alone: then of a block all is saved or nothing.
        out: path (``.gz`` and ``.xz`` are compressed) or open stream of bytes such as ``sys.stdout.buffer``.
        settings: what ``align`` does, by name: a run is continued only with the same settings.
        block_lines: lines a block: what is in memory, and what batches are made of.
        max_words: the most words that a side may have.
        bad_lines: ``"empty"`` writes an empty line for a bad one, ``"stop"`` raises the first; finished blocks stay.
        overwrite: whether ``out`` may exist; it stays what it is until the new output is complete.
        restart: whether to discard what an unfinished run left.
        rank: the number of this process; see ``torchrun_rank``.
        world_size: the number of processes, all called in the same way.
        report: told of each bad line (file, number, reason) when its block is done, and of how the run goes about its
            work; None writes to standard error.
        progress: whether to show a progress bar on standard error; None: if that is a terminal.

    Returns:
        The counts of all lines; None in all processes but the first.

    Raises:
        InvalidInputError: ``out`` exists, or is the input; an unfinished run was started with other settings or
            another input, or ``OUT.parts`` is not of a run, or cannot be read or written; a line is bad and
            ``bad_lines`` is ``"stop"``; one file ends before the other.

    >>> import io
    >>> from alignment import Alignment
    >>> def first_to_first(pairs):
    ...     return [Alignment([(0, 0)]) for _ in pairs]
    >>> text, out, told = io.BytesIO(b"das Haus ||| the house\nleer |||\n"), io.BytesIO(), []
    >>> print(extract(text, None, first_to_first, out, report=told.append))
    2 lines, 1 links; 1 bad lines: 1 with an empty side
    >>> out.getvalue()
    b'0-0\n\n'
    >>> told[1]
    '<stream>, line 2: got no word on the target side, expected at least one'
    """
    _check_options(block_lines, max_words, bad_lines, rank, world_size)
    report = report or to_stderr
    text = ParallelText(source, target)
    aligner = BlockAligner(text, align, max_words, bad_lines == "stop", report)
    shown = rank == 0 and (sys.stderr.isatty() if progress is None else progress)
    inputs = [side for side in (source, target) if side is not None]
    rereadable = [isinstance(side, str | PathLike) and is_regular_file(side) for side in inputs]
    file = output_file(out, inputs)
    if file is not None and rank == 0 and not overwrite:
        check_absent(file, out)
    if file is None or not all(rereadable):
        if world_size > 1:
            raise InvalidInputError(
                f"got a stream and {world_size} processes; several can only go from files to a file"
            )
        report("from or to a stream, the text is aligned straight through: if interrupted, the run begins anew")
        with Progress(source, shown=shown) as bar:
            return _align_through(text.blocks(block_lines), aligner, file, out, bar)
    journal = Journal(file, {**(settings or {}), "block_lines": block_lines, "max_words": max_words}, report)
    team = Team(journal.folder, rank, world_size, report)
    if rank > 0:
        journal.check()
        with Progress(source, shown=False) as bar:
            _align_share(text.blocks(block_lines), aligner, journal, team, bar)
        return None
    with journal.opened(restart=restart), Progress(source, shown=shown) as bar:
        if finished := journal.finished_blocks():
            report(f"{journal.folder}: {finished:,} blocks are finished already")
        blocks = _align_share(text.blocks(block_lines), aligner, journal, team, bar)
        counts = journal.merge(blocks, overwrite=overwrite)
        journal.remove()
    return counts


def _check_options(block_lines: int, max_words: int, bad_lines: str, rank: int, world_size: int) -> None:
    if min(block_lines, max_words) < 1:
        raise InvalidInputError(f"got block_lines {block_lines} and max_words {max_words}, expected at least 1")
    if bad_lines not in get_args(BadLines):
        raise InvalidInputError(f"got bad_lines {bad_lines!r}, expected one of {', '.join(get_args(BadLines))}")
    if not 0 <= rank < world_size:
        raise InvalidInputError(f"got rank {rank} of {world_size} processes, expected 0 to {world_size - 1}")


def output_file(out: str | PathLike[str] | IO[bytes], inputs: Sequence[TextSource]) -> Path | None:
    """The regular file to make, links followed; None for a stream, a pipe or a device.

    Raises:
        InvalidInputError: it is a folder or the input, its folder is not there, or the system does not say.
    """
    if not isinstance(out, str | PathLike):
        return None
    if not os.fspath(out):
        raise InvalidInputError("cannot write a file without a name")
    path = Path(out)
    try:
        if reason := _reason_against(path, inputs):
            raise InvalidInputError(f"cannot write {path}: {reason}")
        return None if path.exists() and not path.is_file() else path.resolve()
    except OSError as error:
        raise InvalidInputError(f"cannot write {named(str(path))}: {error.strerror}") from error


def check_absent(file: Path, called: object) -> None:
    """Refuse to replace a file; ``called`` is its name in messages.

    Raises:
        InvalidInputError: it exists.
    """
    if file.exists():
        journal = Journal(file, {})
        journal.tidy()
        message = "give another name, or replace it with --overwrite (overwrite=True)"
        # A run that is killed just before its end leaves both.
        if journal.has_job():
            message += f"; {journal.folder} is what a run left: remove it if that run made {called}"
        raise InvalidInputError(f"{called} exists already; {message}")


def _reason_against(path: Path, inputs: Sequence[TextSource]) -> str | None:
    """Why nothing can be written there, if so."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.exists() and any(isinstance(source, str | PathLike) and path.samefile(source) for source in inputs):
        return "it is the input; give another name"
    return None


def _align_share(blocks: Iterator[Block], aligner: BlockAligner, journal: Journal, team: Team, bar: Progress) -> int:
    """Finishes the blocks of this process, and in the first one waits for the others; the number of all blocks."""
    with journal.plainly():
        team.begin()
    journal.check_job()
    number, fresh = 0, True
    for block in blocks:
        number, bad = block.index + 1, 0
        if block.index % team.size == team.rank:
            counts = journal.counts(block)
            # A run that let bad lines pass may be continued by one that does not: those it names.
            fresh = counts is None or (aligner.stop and counts.bad_lines > 0)
            if counts is None or fresh:
                aligned = aligner(block, known=journal.known(block), save=partial(journal.save_known, block))
                journal.finish(block, aligned)
                counts = aligned.counts
            bad = counts.bad_lines
        # The blocks of the others are taken to be as far as the last one of this process.
        bar.advance(len(block.pairs), bad=bad, fresh=fresh)
    with journal.plainly():
        team.end()
    return number


def _align_through(
    blocks: Iterator[Block],
    aligner: BlockAligner,
    file: Path | None,
    out: str | PathLike[str] | IO[bytes],
    bar: Progress,
) -> ExtractionCounts:
    """Aligns without a journal: ``file`` appears when it is complete; without one, ``out`` gets block after block."""
    total = ExtractionCounts()

    def aligned_blocks() -> Iterator[list[str]]:
        nonlocal total
        for block in blocks:
            lines, counts = aligner(block)
            yield lines
            total += counts
            bar.advance(counts.lines, bad=counts.bad_lines, fresh=True)

    if file is not None:
        write_lines(file, chain.from_iterable(aligned_blocks()))
        return total
    with Path(out).open("wb") if isinstance(out, str | PathLike) else nullcontext(out) as stream:
        for lines in aligned_blocks():
            stream.write("".join(f"{line}\n" for line in lines).encode())
            stream.flush()
    return total
