"""Runs ``norm-align extract``: aligns parallel text and writes Pharaoh format."""

import argparse
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.commands import aligners, models, running
from alignment.formats import TextSource, split_words
from alignment.pipeline import Answer, extract
from alignment.pipeline.blocks import Pairs, read_lines
from alignment.pipeline.extraction import output_file
from captum_norm import InvalidInputError
from captum_norm.commands import workers
from captum_norm.commands.command import Command
from captum_norm.files import check_writable
from captum_norm.loading import on_device
from captum_norm.runs import Journal, cut
from captum_norm.texts import is_regular_file
from captum_norm.urls import is_url
from captum_norm.versions import versions

if TYPE_CHECKING:
    from alignment.aligner import WordAligner

_BLOCK_LINES = 2048


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="the tokenised source sentences, one a line; without TARGET, lines source ||| target. A file or URL; "
        ".gz, .xz and .bz2 are decompressed, - is standard input",
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the tokenised target sentences, one a line")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the alignments, i-j, source first, from 0; line n belongs to line n of the input. From files to a file, "
        "a killed run continues where it stopped (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--restart", action="store_true", help="discard the work of an unfinished run")
    parser.add_argument(
        "--status", metavar="FILE", help="show how far the run that writes FILE is, and do nothing else"
    )
    models.add_arguments(parser)
    aligners.add_arguments(parser)
    running.add_arguments(parser)
    workers.add_arguments(parser)


@dataclass(frozen=True)
class _Deferred:
    """An aligner that moves its model to its device, and chooses what was left open, when it gets its first pairs."""

    aligner: "WordAligner"
    device: str
    report: Callable[[str], None] | None = None

    def align_each(self, pairs: Pairs, known: Container[int]) -> Iterator[tuple[int, Answer]]:
        on_device(self.aligner.model, self.device)
        aligners.choose(self.aligner, pairs, self.report)
        return self.aligner.align_each(pairs, known)


def _run(options: argparse.Namespace) -> None:
    if options.status is not None:
        from captum_norm.commands.terminal import Terminal

        Terminal().say(workers.status_of(options.status))
        return
    if options.source is None:
        raise InvalidInputError("got no SOURCE; give the text to align, or --status FILE")
    if options.source == options.target == "-":
        raise InvalidInputError("got - for both sides; standard input can be read only once")
    backend, device = workers.backend_of(options), workers.device_of(options)
    with running.set_up(options) as report:
        source = running.text_source(options.source)
        target = None if options.target is None else running.text_source(options.target)
        inputs = [side for side in (source, target) if side is not None]
        rereadable = all(isinstance(side, str) and is_regular_file(side) for side in inputs)
        out = sys.stdout.buffer if options.out is None else options.out
        if (file := output_file(out, inputs, replace=options.overwrite)) is not None:
            if not is_url(file):
                check_writable(Path(file).parent)
            if rereadable:
                Journal(file, {}).check()
        # A pipe can be read only once: its first pairs decide when they are aligned.
        first = _first_pairs(inputs, options.max_words) if rereadable else []
        # Workers take the model to their devices; this process may have none.
        model, tokenizer = models.load(options, device if backend == "local" else "cpu")
        aligner = aligners.word_aligner(model, tokenizer, options)
        aligners.choose(aligner, first, report)
        counts = extract(
            source,
            target,
            _Deferred(aligner, device, report if aligner.choice is None else None),
            out,
            settings={
                **versions(),
                **models.identity(options, model, tokenizer, device),
                **aligners.identity(options, aligner),
            },
            block_lines=_BLOCK_LINES,
            max_words=options.max_words,
            bad_lines=options.bad_lines,
            overwrite=options.overwrite,
            restart=options.restart,
            backend=backend,
            log=options.log,
            report=report,
            progress=False if options.quiet else None,
        )
        report(str(counts))


def _first_pairs(inputs: Sequence[TextSource], max_words: int) -> Pairs:
    """The usable pairs of the first block that has any."""
    for block in cut(inputs, _BLOCK_LINES):
        readable = (line for line in read_lines(block) if not isinstance(line, InvalidInputError))
        pairs = ((split_words(left), split_words(right)) for left, right in readable)
        if usable := [pair for pair in pairs if all(0 < len(words) <= max_words for words in pair)]:
            return usable
    return []


COMMAND = Command("extract", "align the words of sentence pairs with a translation model", _add_arguments, _run)
