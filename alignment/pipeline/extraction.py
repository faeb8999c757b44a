"""Extracts alignments from parallel text: one line in Pharaoh format for each input line."""

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
from alignment.pipeline.progress import Advance, line_bar, to_stderr
from captum_norm import InvalidInputError
from captum_norm.files import check_file, sync
from captum_norm.runs import Job, Journal, Record, check_rank, work_through
from captum_norm.texts import is_regular_file, named

BadLines = Literal["empty", "stop"]
"""What to do about a bad line: write an empty line, or stop the run."""


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
    r"""Align parallel text of any size, line by line: line n of the output belongs to line n of the input.

    From files to a file, a run that was killed at any moment continues where it stopped when it is started again, with
    the same output as an uninterrupted run. The folder ``OUT.parts`` keeps finished blocks, and every few seconds what
    is done of the current one; ``OUT`` appears when it is complete. Several processes share the blocks: block b is done
    by process b mod ``world_size``, and a run may be continued with another number of processes. If the input or output
    is a stream, one process aligns the text straight through, and an interrupted run starts over.

    A line is bad if it is not UTF-8, does not have exactly one ``|||`` (in one file of both sides), has no word or more
    than ``max_words`` on a side, or is refused by the aligner.

    Args:
        source: the source sentences, one a line; without ``target``, lines ``source ||| target``. Path (``.gz``,
            ``.xz`` and ``.bz2`` are decompressed) or open stream.
        target: the target sentences, one a line.
        align: a :class:`~alignment.WordAligner`; or a function of the good pairs of a block, as words, and of nothing
            else: only whole blocks are saved then.
        out: path (``.gz`` and ``.xz`` are compressed) or open stream of bytes such as ``sys.stdout.buffer``.
        settings: names and values that describe ``align``; a run is continued only with the same settings.
        block_lines: lines per block, which are held in memory and from which batches are formed.
        max_words: the most words that a side may have.
        bad_lines: ``"empty"`` writes an empty line, ``"stop"`` raises the error of the first and keeps finished blocks.
        overwrite: whether ``out`` may exist; it stays unchanged until the new output is complete.
        restart: whether to discard the work of an unfinished run.
        rank: the rank of this process; see ``torchrun_rank``.
        world_size: the number of processes, all called with the same arguments.
        report: called with each bad line (file, number, reason) when its block is done, and with messages about the
            run; None writes to standard error.
        progress: whether to show a progress bar on standard error; None for only if that is a terminal.

    Returns:
        The counts of all lines; None in all processes but the first.

    Raises:
        InvalidInputError: ``out`` exists or is the input; an unfinished run has other settings or another input;
            ``OUT.parts`` does not belong to a run, or cannot be read or written; a line is bad and ``bad_lines`` is
            ``"stop"``; one file ends before the other.

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
                f"got a stream and {world_size} processes; several processes need files as input and output"
            )
        report("a run from or to a stream cannot be resumed: if interrupted, it starts over")
        with line_bar("aligning", source, shown=shown) as advance:
            return _align_through(text.blocks(block_lines), aligner, file, out, advance)
    journal = journal_of(file, {**(settings or {}), "block_lines": block_lines, "max_words": max_words}, report)
    with work_through(
        journal,
        text.blocks(block_lines),
        aligner,
        rank=rank,
        world_size=world_size,
        restart=restart,
        # A run that accepted bad lines may be continued by one that stops at them.
        redo=lambda notes: bad_lines == "stop" and _counts(notes).bad_lines > 0,
    ) as steps:
        with line_bar("aligning", source, shown=shown) as advance:
            for step in steps:
                advance(step.texts, _counts(step.notes).bad_lines, step.fresh)
        return None if rank > 0 else _merge(journal, file, overwrite=overwrite)


def _check_options(block_lines: int, max_words: int, bad_lines: str, rank: int, world_size: int) -> None:
    if min(block_lines, max_words) < 1:
        raise InvalidInputError(f"got block_lines {block_lines} and max_words {max_words}, expected at least 1")
    if bad_lines not in get_args(BadLines):
        raise InvalidInputError(f"got bad_lines {bad_lines!r}, expected one of {', '.join(get_args(BadLines))}")
    check_rank(rank, world_size)


def output_file(out: str | PathLike[str] | IO[bytes], inputs: Sequence[TextSource], *, replace: bool) -> Path | None:
    """The regular file to write, symbolic links resolved; None for a stream, a pipe or a device.

    Raises:
        InvalidInputError: it is a folder or the input, it exists and ``replace`` is not set, or its folder does not
            exist or cannot be examined.
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
        # A run that was killed just before its end leaves both.
        if journal.has_job():
            message += f"; {journal.folder} was left by a run: remove it if that run wrote {out}"
        raise InvalidInputError(f"{out} exists already; {message}")
    return file


def journal_of(file: Path, job: Job, report: Callable[[str], None] = lambda _: None) -> Journal:
    """The journal of a run, in a folder beside its output file."""
    return Journal(file.with_name(f"{file.name}.parts"), str(file), job, report)


def _counts(notes: Mapping[str, Any]) -> ExtractionCounts:
    return ExtractionCounts(**notes.get("counts", {}))


def _merge(journal: Journal, file: Path, *, overwrite: bool) -> ExtractionCounts:
    """Write the output from the journal's blocks.

    Raises:
        InvalidInputError: the output has come to exist during the run, and ``overwrite`` is not set.
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
    advance: Advance,
) -> ExtractionCounts:
    """Align without a journal; ``file`` appears when it is complete, a stream ``out`` is written block by block."""

    def records() -> Iterator[Record]:
        for block in blocks:
            yield (record := aligner(block))
            advance(len(block), _counts(record.notes).bad_lines, True)

    def stream(contents: Iterator[bytes]) -> None:
        with Path(out).open("wb") if isinstance(out, str | PathLike) else nullcontext(out) as opened:
            for content in contents:
                opened.write(content)
                opened.flush()

    return _write(records(), stream if file is None else partial(write_text, file))


def _write(records: Iterator[Record], write: Callable[[Iterator[bytes]], None]) -> ExtractionCounts:
    """Write the records' contents in order, and add up their counts."""
    total = ExtractionCounts()

    def contents() -> Iterator[bytes]:
        nonlocal total
        for record in records:
            total += _counts(record.notes)
            yield record.content

    write(contents())
    return total
