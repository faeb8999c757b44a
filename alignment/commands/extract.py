"""Runs ``norm-align extract``: aligns parallel text and writes Pharaoh format."""

import argparse
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignment.commands import aligners, models, running
from alignment.formats import TextSource, split_words
from alignment.pipeline import Answer, extract, torchrun_rank
from alignment.pipeline.blocks import Pairs, ParallelText
from alignment.pipeline.extraction import journal_of, output_file
from captum_norm import InvalidInputError
from captum_norm.commands.command import Command
from captum_norm.files import check_writable
from captum_norm.texts import is_regular_file
from captum_norm.versions import versions

if TYPE_CHECKING:
    from alignment.aligner import WordAligner

_BLOCK_LINES = 2048


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="the tokenised source sentences, one a line; without TARGET, lines source ||| target. .gz, .xz and "
        ".bz2 are decompressed, - is standard input",
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the tokenised target sentences, one a line")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the alignments, i-j, source first, from 0; line n belongs to line n of the input. From files to a file, "
        "a killed run continues where it stopped, and several processes can share the work: torchrun "
        "--nproc-per-node 4 --no-python norm-align extract ... (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--restart", action="store_true", help="discard the work of an unfinished run")
    models.add_arguments(parser)
    aligners.add_arguments(parser)
    running.add_arguments(parser)


@dataclass(frozen=True)
class _Reporting:
    """An aligner that reports its choice when it makes it on the first pairs of a pipe."""

    aligner: "WordAligner"
    report: Callable[[str], None] | None

    def align_each(self, pairs: Pairs, known: Container[int]) -> Iterator[tuple[int, Answer]]:
        aligners.choose(self.aligner, pairs, self.report)
        return self.aligner.align_each(pairs, known)


def _run(options: argparse.Namespace) -> None:
    if options.source == options.target == "-":
        raise InvalidInputError("got - for both sides; standard input can be read only once")
    rank, world_size = torchrun_rank()
    with running.set_up(options) as report:
        source = running.text_source(options.source)
        target = None if options.target is None else running.text_source(options.target)
        inputs = [side for side in (source, target) if side is not None]
        rereadable = all(isinstance(side, str) and is_regular_file(side) for side in inputs)
        out = sys.stdout.buffer if options.out is None else options.out
        if (file := output_file(out, inputs, replace=options.overwrite or rank > 0)) is not None:
            check_writable(file.parent)
            if rereadable:
                journal_of(file, {}).check()
        # A pipe can be read only once: its first pairs decide when they are aligned.
        first = _first_pairs(source, target, options.max_words) if rereadable else []
        model, tokenizer = models.load(options)
        aligner = aligners.word_aligner(model, tokenizer, options)
        aligners.choose(aligner, first, report if rank == 0 else None)
        counts = extract(
            source,
            target,
            _Reporting(aligner, report if rank == 0 else None),
            out,
            settings={
                **versions(),
                **models.identity(options, model, tokenizer),
                **aligners.identity(options, aligner),
            },
            block_lines=_BLOCK_LINES,
            max_words=options.max_words,
            bad_lines=options.bad_lines,
            overwrite=options.overwrite,
            restart=options.restart,
            rank=rank,
            world_size=world_size,
            report=report,
            progress=False if options.quiet else None,
        )
        if counts is not None:
            report(str(counts))


def _first_pairs(source: TextSource, target: TextSource | None, max_words: int) -> Pairs:
    """The usable pairs of the first block that has any."""
    for block in ParallelText(source, target).blocks(_BLOCK_LINES):
        block.check_readable()
        readable = (line for line in block.lines if not isinstance(line, InvalidInputError))
        pairs = ((split_words(left), split_words(right)) for left, right in readable)
        if usable := [pair for pair in pairs if all(0 < len(words) <= max_words for words in pair)]:
            return usable
    return []


COMMAND = Command("extract", "align the words of sentence pairs with a translation model", _add_arguments, _run)
