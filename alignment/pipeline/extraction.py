"""Extracts alignments: parallel text in, a line in Pharaoh format out for each of its lines."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, Any, Literal, get_args

from alignment.formats import TextSource
from alignment.formats.text import write_text
from alignment.pipeline.blocks import Aligner, BlockAligner, ExtractionCounts, PairBlock, ParallelText
from alignment.pipeline.progress import Progress, to_stderr
from captum_norm import InvalidInputError
from captum_norm.files import check_file, sync
from captum_norm.runs import Job, Journal, Record, check_rank, work_through
from captum_norm.texts import is_regular_file, named

BadLines = Literal["empty", "stop"]
"""What becomes of a bad line: an empty line of the output, or the end of the run."""


def extract(
    source: TextSource,
    target: TextSource | None,
    align: Aligner,
    out: str | PathLike[str] | IO[bytes],
    *,
    settings: Job | None = None,
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
    file = output_file(out, inputs, replace=overwrite or rank > 0)
    if file is None or not all(rereadable):
        if world_size > 1:
            raise InvalidInputError(
                f"got a stream and {world_size} processes; several can only go from files to a file"
            )
        report("from or to a stream, the text is aligned straight through: if interrupted, the run begins anew")
        with Progress(source, shown=shown) as bar:
            return _align_through(text.blocks(block_lines), aligner, file, out, bar)
    journal = journal_of(file, {**(settings or {}), "block_lines": block_lines, "max_words": max_words}, report)
    with work_through(
        journal,
        text.blocks(block_lines),
        aligner,
        rank=rank,
        world_size=world_size,
        restart=restart,
        # A run that let bad lines pass may be continued by one that does not: those it names.
        redo=lambda notes: bad_lines == "stop" and _counts(notes).bad_lines > 0,
    ) as steps:
        with Progress(source, shown=shown) as bar:
            for step in steps:
                bar.advance(step.texts, bad=_counts(step.notes).bad_lines, fresh=step.fresh)
        return None if rank > 0 else _merge(journal, file, overwrite=overwrite)


def _check_options(block_lines: int, max_words: int, bad_lines: str, rank: int, world_size: int) -> None:
    if min(block_lines, max_words) < 1:
        raise InvalidInputError(f"got block_lines {block_lines} and max_words {max_words}, expected at least 1")
    if bad_lines not in get_args(BadLines):
        raise InvalidInputError(f"got bad_lines {bad_lines!r}, expected one of {', '.join(get_args(BadLines))}")
    check_rank(rank, world_size)


def output_file(out: str | PathLike[str] | IO[bytes], inputs: Sequence[TextSource], *, replace: bool) -> Path | None:
    """The regular file to make, links followed; None for a stream, a pipe or a device.

    Raises:
        InvalidInputError: it is a folder or the input, it exists and ``replace`` is not set, its folder is not there,
            or the system does not say.
    """
    if not isinstance(out, str | PathLike):
        return None
    if not os.fspath(out):
        raise InvalidInputError("cannot write a file without a name")
    path = Path(out)
    try:
        check_file(path)
        if path.exists() and any(isinstance(source, str | PathLike) and path.samefile(source) for source in inputs):
            raise InvalidInputError(f"cannot write {path}: it is the input; give another name")
        if path.exists() and not path.is_file():
            return None
        file = path.resolve()
    except OSError as error:
        raise InvalidInputError(f"cannot write {named(str(path))}: {error.strerror}") from error
    if file.exists() and not replace:
        journal = journal_of(file, {})
        message = "give another name, or replace it with --overwrite (overwrite=True)"
        # A run that is killed just before its end leaves both.
        if journal.has_job():
            message += f"; {journal.folder} is what a run left: remove it if that run made {out}"
        raise InvalidInputError(f"{out} exists already; {message}")
    return file


def journal_of(file: Path, job: Job, report: Callable[[str], None] = lambda _: None) -> Journal:
    """The unfinished work of a run, in a folder beside the file that it makes."""
    return Journal(file.with_name(f"{file.name}.parts"), str(file), job, report)


def _counts(notes: Mapping[str, Any]) -> ExtractionCounts:
    return ExtractionCounts(**notes.get("counts", {}))


def _merge(journal: Journal, file: Path, *, overwrite: bool) -> ExtractionCounts:
    """Makes the output from its blocks.

    Raises:
        InvalidInputError: somebody else has made the output meanwhile, and it is not to be overwritten.
    """
    merged = journal.folder / f"merged{file.suffix}"
    with journal.plainly():
        total = _write(journal.records(), partial(write_text, merged))
        if file.exists() and not overwrite:
            raise InvalidInputError(f"{file} has come to exist; move it away and start again: no work is lost")
        merged.replace(file)
        sync(file.parent)
    return total


def _align_through(
    blocks: Iterator[PairBlock],
    aligner: BlockAligner,
    file: Path | None,
    out: str | PathLike[str] | IO[bytes],
    bar: Progress,
) -> ExtractionCounts:
    """Aligns without a journal: ``file`` appears when it is complete; without one, ``out`` gets block after block."""

    def records() -> Iterator[Record]:
        for block in blocks:
            yield (record := aligner(block))
            bar.advance(len(block), bad=_counts(record.notes).bad_lines, fresh=True)

    def stream(contents: Iterator[bytes]) -> None:
        with Path(out).open("wb") if isinstance(out, str | PathLike) else nullcontext(out) as opened:
            for content in contents:
                opened.write(content)
                opened.flush()

    return _write(records(), stream if file is None else partial(write_text, file))


def _write(records: Iterator[Record], write: Callable[[Iterator[bytes]], None]) -> ExtractionCounts:
    """Writes what is in records, one after the other, and adds up their counts."""
    total = ExtractionCounts()

    def contents() -> Iterator[bytes]:
        nonlocal total
        for record in records:
            total += _counts(record.notes)
            yield record.content

    write(contents())
    return total
