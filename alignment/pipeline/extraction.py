"""Extracts alignments from parallel text: one line in Pharaoh format for each input line."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal, get_args

from alignment.formats import TextSource, split_words
from alignment.formats.output import Output
from alignment.formats.text import write_parts, write_text
from alignment.pipeline.blocks import Aligner, BlockAligner, Counting, ExtractionCounts, LinkWriting, Splits, Writing
from captum_norm import InvalidInputError, bars
from captum_norm.checks import check_choice, quoted_name
from captum_norm.runs import Backend, Block, Identity, Job, Journal, Record, cut, run_job
from captum_norm.text.files import Local, check_file, place_of
from captum_norm.text.lines import is_regular_file, suffix_of

_PHARAOH = Output()

BadLines = Literal["empty", "stop"]
"""What to do about a bad line: write an empty line, or stop the run."""


def extract(
    source: TextSource,
    target: TextSource | None,
    align: Aligner,
    out: str | PathLike[str] | IO[bytes],
    *,
    settings: Identity | None = None,
    block_lines: int = 2048,
    max_words: int = 256,
    bad_lines: BadLines = "empty",
    overwrite: bool = False,
    restart: bool = False,
    backend: Backend = "local",
    report: Callable[[str], None] | None = None,
    progress: bool | None = None,
    splits: Splits = (split_words, split_words),
    form: Output = _PHARAOH,
    writing: Writing | None = None,
    save_lexicon: str | PathLike[str] | None = None,
    at_end: Callable[[], None] | None = None,
) -> ExtractionCounts:
    r"""Align parallel text of any size, line by line: line n of the output belongs to line n of the input.

    From files to a file, a run that was killed at any moment continues where it stopped when it is started again, with
    the same output as an uninterrupted run. The folder ``OUT.parts`` keeps finished blocks; ``OUT`` appears when it is
    complete. Workers on Ray can share the blocks, and a run may be continued with another number of workers. If the
    input or output is a stream, this process aligns the text straight through, and an interrupted run starts over.

    An aligner with ``count_text=True`` reads the text once; its maps are kept on disk until all word pairs are counted,
    then links are read off them.

    A line is bad if it is not UTF-8, does not have exactly one ``|||`` or tab between its sides (in one file of both),
    has no word on one side, more than ``max_words``, or more than 16 letters for each of these, or is refused by the
    aligner. A blank line, without a word on either side, has no links and is not bad.

    Args:
        source: the source sentences, one per line; without ``target``, both sides with ``|||`` or a tab between them.
            Path or URL (``.gz``, ``.xz`` and ``.bz2`` are decompressed) or open stream.
        target: the target sentences, one per line.
        align: a :class:`~alignment.WordAligner`; or a function of the good pairs of a block, as words, and of nothing
            else.
        out: path or URL (``.gz``, ``.xz`` and ``.bz2`` are compressed) or open stream of bytes, such as
            ``sys.stdout.buffer``.
        settings: names and values that describe ``align``; a run is continued only with the same settings.
        block_lines: lines per block, which are held in memory and from which batches are formed.
        max_words: the most words that a side may have.
        bad_lines: ``"empty"`` writes an empty line, ``"stop"`` raises the error of the first and keeps finished blocks.
        overwrite: whether ``out`` may exist; it stays unchanged until the new output is complete.
        restart: whether to discard the work of an unfinished run.
        backend: where blocks are aligned, see :func:`captum_norm.runs.run_job`.
        report: called with each bad line (file, number, reason) when its block is done, and with messages about the
            run; None writes to standard error.
        progress: whether to show a progress bar on standard error; None for only if that is a terminal.
        splits: split source and target sentences into words.
        form: what is written of each pair.
        writing: writes something else than links, in place of ``form``; not if the aligner counts the text's words.
        save_lexicon: where to write the word pairs of an aligner that counts the text's own (``count_text=True``).
        at_end: called when all lines are aligned, before ``out`` appears; by one of the workers, if there are any.

    Returns:
        The counts of all lines.

    Raises:
        InvalidInputError: ``out`` exists or is the input; an unfinished run has other settings or another input;
            ``OUT.parts`` does not belong to a run, or cannot be read or written; a line is bad and ``bad_lines`` is
            ``"stop"``; one file ends before the other; or see :func:`captum_norm.runs.run_job`.

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
    if min(block_lines, max_words) < 1:
        raise InvalidInputError(f"got block_lines {block_lines} and max_words {max_words}, expected at least 1")
    check_choice("bad_lines", bad_lines, get_args(BadLines))
    report = report or bars.to_stderr
    inputs = [side for side in (source, target) if side is not None]
    if form.scored and not getattr(align, "scored", False):
        raise InvalidInputError(
            "got scores and links that have no probabilities; use the recipe hmm, and combine two directions by add or "
            "multiply"
        )
    links = LinkWriting(form)
    counting = Counting(align, links, save_lexicon) if getattr(align, "count_text", False) else None
    if save_lexicon is not None and counting is None:
        raise InvalidInputError("got save_lexicon and an aligner that counts nothing; give it count_text=True")
    rereadable = all(isinstance(side, str | PathLike) and is_regular_file(side) for side in inputs)
    aligner = BlockAligner(align, counting or writing or links, max_words, bad_lines == "stop", splits)
    file = output_file(out, inputs, replace=overwrite)
    settings = dict(settings or {})
    if save_lexicon is not None:
        settings["save_lexicon"] = lexicon_file(save_lexicon, file, inputs, overwrite=overwrite, restart=restart)
    shown = sys.stderr.isatty() if progress is None else progress
    if file is not None and rereadable:
        job = Extraction(file, inputs, aligner, settings, block_lines, counting, overwrite=overwrite, at_end=at_end)
        if not restart and (done := job.tidied()) is not None:
            report(f"{file} is complete: the run before was killed at its end")
            return done
        output_file(out, inputs, replace=overwrite)
        with bars.progress(0) if shown else bars.hidden():
            counted: ExtractionCounts = run_job(job, backend, restart=restart, report=report)
        return counted
    if backend != "local":
        raise InvalidInputError("got a stream; several workers need files or URLs as input and output")
    report("a run from or to a stream cannot be resumed: if interrupted, it starts over")
    with line_bar("aligning", source, shown=shown) as advance:
        counts = _align_through(cut(inputs, block_lines), aligner, counting, file, out, report, advance)
    if at_end is not None:
        at_end()
    return counts


class Extraction(Job):
    """The job of :func:`extract` from files to a file; ``counting`` does the second pass, if there is one."""

    title = "aligning"

    def __init__(
        self,
        file: str,
        inputs: Sequence[TextSource],
        aligner: BlockAligner,
        settings: Identity,
        block_lines: int,
        counting: Counting | None = None,
        *,
        overwrite: bool,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(file, {**settings, "block_lines": block_lines, "max_words": aligner.max_words})
        self._inputs, self._aligner, self._block_lines, self._overwrite = inputs, aligner, block_lines, overwrite
        self._counting, self._at_end = counting, at_end

    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the text."""
        return cut(self._inputs, self._block_lines)

    def worker(self) -> BlockAligner:
        """Return the aligner."""
        return self._aligner

    def redo(self, notes: Mapping[str, Any]) -> bool:
        """Whether a block with bad lines is to be computed again, since this run stops at them."""
        return self._aligner.stop and _counts(notes).bad_lines > 0

    def counts(self, notes: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the number of bad lines."""
        return {"bad": _counts(notes).bad_lines}

    def finish(self, journal: Journal, blocks: int) -> ExtractionCounts:
        """Write the output, and return the counts of all lines."""
        notes, digests = dict[str, Any](), list[str]()

        def noted(records: Iterator[Record]) -> Iterator[Record]:
            for record in records:
                digests.append(record.notes["digest"])
                yield record

        with journal.publishing(notes, overwrite=self._overwrite) as file:
            read = partial(journal.records, blocks)
            records = read() if self._counting is None else self._counting.reread(read)
            counts = _write(noted(records), partial(write_parts, file, suffix_of(self.output)))
            notes.update(counts=asdict(counts), text=_text_digest(digests))
            if self._at_end is not None:
                self._at_end()
        return counts

    def tidied(self) -> ExtractionCounts | None:
        """Remove what a run left that was killed when it had written the output; its counts, if it was this job."""
        journal = Journal(self.output, self.identity)
        notes = journal.published()
        if notes is None:
            return None
        same = (notes["job"], notes["text"]) == (self.identity, _text_digest(block.digest for block in self.blocks()))
        journal.tidy()
        return _counts(notes) if same else None


def output_file(out: str | PathLike[str] | IO[bytes], inputs: Sequence[TextSource], *, replace: bool) -> str | None:
    """The regular file to write, symbolic links resolved, or its URL; None for a stream, a pipe or a device."""
    if not isinstance(out, str | PathLike):
        return None
    name = os.fspath(out)
    if not name:
        raise InvalidInputError("cannot write a file without a name")
    place = place_of(name)
    try:
        kind = check_file(name)
        if kind and any(place.is_same(place_of(side)) for side in inputs if isinstance(side, str | PathLike)):
            raise InvalidInputError(f"cannot write {name}: it is the input; give another name")
        if kind == "other":
            return None
        file = str(place.path.resolve() if isinstance(place, Local) else place)
    except OSError as error:
        raise InvalidInputError(f"cannot write {quoted_name(name)}: {error.strerror or error}") from error
    journal = Journal(file, {})
    # A run that was killed just before its end leaves both; it is for the run to say whether it was the same.
    if kind is not None and not replace and journal.published() is None:
        with suppress(OSError):  # an empty one is all that is left of a run
            place_of(journal.folder).remove_folder()
        message = "give another name, or replace it with --overwrite (overwrite=True)"
        if journal.has_job():
            message += f"; {journal.folder} was left by a run: remove it if that run wrote {out}"
        raise InvalidInputError(f"{out} exists already; {message}")
    return file


def lexicon_file(
    path: str | PathLike[str], out: str | None, inputs: Sequence[TextSource], *, overwrite: bool, restart: bool
) -> str | None:
    """The file of a lexicon, as :func:`output_file` returns it."""
    # It may exist if a run is continued that was killed after writing it.
    continues = out is not None and not restart and Journal(out, {}).has_job()
    file = output_file(path, inputs, replace=overwrite or continues)
    if file is not None and file == out:
        raise InvalidInputError(f"got {quoted_name(os.fspath(path))} for the links and for the lexicon; give two names")
    return file


def _text_digest(digests: Iterable[str]) -> str:
    """Identify a text by its blocks."""
    return blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()


def _counts(notes: Mapping[str, Any]) -> ExtractionCounts:
    return ExtractionCounts(**notes.get("counts", {}))


def _align_through(
    blocks: Iterator[Block],
    aligner: BlockAligner,
    counting: Counting | None,
    file: str | None,
    out: str | PathLike[str] | IO[bytes],
    report: Callable[[str], None],
    done: Callable[[int, int], None],
) -> ExtractionCounts:
    """Align without a journal; ``file`` appears when it is complete, a stream ``out`` is written block by block."""

    def records() -> Iterator[Record]:
        for block in blocks:
            record = aligner(block)
            for message in record.messages:
                report(message)
            yield record
            done(block.lines, _counts(record.notes).bad_lines)

    def stream(contents: Iterator[bytes]) -> None:
        with Path(out).open("wb") if isinstance(out, str | PathLike) else nullcontext(out) as opened:
            for content in contents:
                opened.write(content)
                opened.flush()

    write = stream if file is None else partial(write_text, file)
    if counting is None:
        return _write(records(), write)
    with TemporaryFile() as spool:
        for record in records():
            spool.write(json.dumps([record.notes, len(record.content)]).encode() + b"\n" + record.content)

        def reread() -> Iterator[Record]:
            spool.seek(0)
            while header := spool.readline():
                notes, size = json.loads(header)
                yield Record(notes, spool.read(size))

        return _write(counting.reread(reread), write)


@contextmanager
def line_bar(description: str, source: TextSource, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar in lines of a text, which are counted first if that is cheap; it hides all bars below it."""
    total, bad_lines = bars.count_lines(source) if shown else None, 0
    with bars.progress(0) if shown else bars.hidden(), bars.bar(description, total, "lines") as line, bars.hidden():

        def done(lines: int, bad: int) -> None:
            nonlocal bad_lines
            bad_lines += bad
            line.set_postfix(bad=bad_lines, refresh=False)
            line.update(lines)

        yield done


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
