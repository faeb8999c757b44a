"""Runs ``norm-align extract``: aligns parallel text and writes Pharaoh format."""

import argparse
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from alignment.commands import aligners, directions, models, running
from alignment.commands import gold as gold_options
from alignment.formats import Output, OutputStyle, TextSource, read_parallel
from alignment.pipeline import extract
from alignment.pipeline.blocks import Pairs, Splits, read_lines
from alignment.pipeline.extraction import lexicon_file, output_file
from captum_norm import InvalidInputError
from captum_norm.commands import workers
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import positive, share
from captum_norm.commands.outputs import output_path, write_outputs
from captum_norm.loading import on_device
from captum_norm.runs import Journal, cut
from captum_norm.text.files import check_writable, is_url
from captum_norm.text.lines import is_regular_file
from captum_norm.versions import versions

if TYPE_CHECKING:
    from alignment.aligner import TextAligner
    from alignment.links import GoldAlignment, ScoredAlignment
    from alignment.word_maps import WordMap

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
    parser.add_argument(
        "--tokenize",
        action="store_true",
        help="split raw text into words as Moses does, for the shipped models; --format tsv shows the words",
    )
    parser.add_argument(
        "--block-lines",
        type=positive,
        metavar="N",
        help=f"lines that are read, aligned and written together (default: {_BLOCK_LINES:,}; from a stream, as many as "
        "there are when it pauses)",
    )
    written = parser.add_argument_group("what is written")
    written.add_argument(
        "--format",
        choices=get_args(OutputStyle),
        default="pharaoh",
        help="pharaoh: i-j; naacl: a line for each link, pair i j S, from 1; tsv: source, target and links; matrix: a "
        "line of JSON with words, links and the probability of every possible link; npz: the same numbers as arrays in "
        "one file (default: %(default)s)",
    )
    written.add_argument("--base", type=int, choices=(0, 1), help="the index of the first word (default: 0; naacl: 1)")
    written.add_argument(
        "--scores",
        action="store_true",
        help="also write how probable each link is, i-j:p; for the recipe hmm, in both directions by add, multiply or "
        "mutual",
    )
    written.add_argument(
        "--page",
        type=output_path([".html"]),
        metavar="FILE.html",
        help="also write a page with the first sentence pairs: their maps, and lines between the words",
    )
    written.add_argument(
        "--gold",
        metavar="FILE",
        help="with --page: the gold alignments of the text, which the page shows beside the links",
    )
    gold_options.add_format(written)
    written.add_argument(
        "--min-score", type=share, default=0.0, metavar="P", help="leave out links less probable than this"
    )
    models.add_arguments(parser)
    directions.add_arguments(parser)
    aligners.add_arguments(parser)
    running.add_arguments(parser)
    workers.add_arguments(parser)


class _Deferred:
    """Moves an aligner's models to their device, and lets it choose what was left open, when the first pairs come."""

    def __init__(
        self,
        aligner: "TextAligner",
        device: str,
        report: Callable[[str], None] | None = None,
        check: "Callable[[TextAligner, Pairs], None] | None" = None,
    ) -> None:
        self._aligner, self._device, self._report, self._check = aligner, device, report, check
        self.count_text, self.scored = aligner.count_text, aligner.scored
        self.counted, self.begun_lexicon, self.read = aligner.counted, aligner.begun_lexicon, aligner.read

    def read_each(
        self, pairs: Pairs, known: Container[int]
    ) -> "Iterator[tuple[int, ScoredAlignment | InvalidInputError]]":
        return self._ready(pairs).read_each(pairs, known)

    def map_each(self, pairs: Pairs, known: Container[int]) -> "Iterator[tuple[int, WordMap | InvalidInputError]]":
        return self._ready(pairs).map_each(pairs, known)

    def _ready(self, pairs: Pairs) -> "TextAligner":
        for one, _ in directions.parts(self._aligner):
            on_device(one.model, self._device)
        directions.choose(self._aligner, pairs, self._report)
        if self._check is not None:
            self._check(self._aligner, pairs)
        return self._aligner


def _run(options: argparse.Namespace) -> None:
    if options.status is not None:
        from captum_norm.commands.terminal import Terminal

        Terminal().say(workers.status_of(options.status))
        return
    if options.source is None:
        raise InvalidInputError("got no SOURCE; give the text to align, or --status FILE")
    if options.source == options.target == "-":
        raise InvalidInputError("got - for both sides; standard input can be read only once")
    form = Output(options.format, options.base, options.scores, options.min_score)
    splits = models.splits(options)
    backend, device = workers.backend_of(options), workers.device_of(options)
    with running.set_up(options) as report:
        source = running.text_source(options.source)
        target = None if options.target is None else running.text_source(options.target)
        inputs = [side for side in (source, target) if side is not None]
        rereadable = all(isinstance(side, str) and is_regular_file(side) for side in inputs)
        out = sys.stdout.buffer if options.out is None else options.out
        _check_outputs(options, inputs, rereadable=rereadable)
        # A pipe can be read only once: its first pairs decide when they are aligned.
        block_lines = options.block_lines or _BLOCK_LINES
        lines = _first_pairs(inputs, block_lines, options.max_words, splits) if rereadable else {}
        first = list(lines.values())
        gold = None if options.gold is None else _gold(options, inputs, splits)
        # Workers take the models to their devices; this process may have none.
        aligner, identity = directions.load(options, device if backend == "local" else "cpu")
        directions.choose(aligner, first, report)
        if not options.keep_sides:
            directions.check_sides(aligner, first)
        chosen = [one.choice for one, _ in directions.parts(aligner)]
        if None in chosen and not rereadable:
            running.report_waiting(report, options)
        described = aligners.identity(options, directions.parts(aligner))
        counts = extract(
            source,
            target,
            _Deferred(
                aligner,
                device,
                report if None in chosen else None,
                check=directions.SideCheck() if not first and not options.keep_sides else None,
            ),
            out,
            settings={**versions(), **identity, **described, "output": str(form), "tokenize": options.tokenize},
            block_lines=block_lines,
            # Lines that layers and heads are chosen on must come together.
            pause=None if None in chosen else running.PAUSE,
            max_words=options.max_words,
            bad_lines=options.bad_lines,
            overwrite=options.overwrite,
            restart=options.restart,
            backend=backend,
            log=options.log,
            report=report,
            progress=False if options.quiet else None,
            splits=splits,
            form=form,
            save_lexicon=options.save_lexicon,
        )
        if aligner.corpus_statistics:
            report("the links hold corpus statistics: a lexicon counted from other sentences took part")
        if options.page is not None:
            shown = None if gold is None else [gold[number - 1] for number in lines]
            named = {"model": options.model, "reverse": options.reverse_model}
            facts = {name: model for name, model in named.items() if model is not None}
            write_outputs({options.page: aligners.page(aligner, first, facts, shown, options.min_score)})
        report(str(counts))


def _gold(options: argparse.Namespace, inputs: Sequence[TextSource], splits: Splits) -> "list[GoldAlignment]":
    """The gold alignment of each line of the text, whose links lie inside its sentences."""
    pairs = list(read_parallel(*inputs, on_error=lambda _: None))
    sources, targets = ([" ".join(split(pair[side])) or None for pair in pairs] for side, split in enumerate(splits))
    return gold_options.read_gold_of(options, sources, targets)


def _check_outputs(options: argparse.Namespace, inputs: Sequence[TextSource], *, rereadable: bool) -> None:
    """Check that the files can be written, before a model is loaded."""
    if options.gold is None and (options.gold_base is not None or options.gold_swapped):
        raise InvalidInputError("got --gold-base or --gold-swapped without --gold FILE")
    if options.gold is not None and options.page is None:
        raise InvalidInputError("got --gold without --page, which shows gold links; add --page FILE.html")
    if options.page is not None and not rereadable:
        raise InvalidInputError("got --page and a stream, which can be read only once; give files")
    if options.page is not None and options.lexicon:
        raise InvalidInputError(
            "got --page and --lexicon, whose links depend on the whole text; leave out one of them, or take the "
            "lexicon of another text: --use-lexicon FILE"
        )
    used = [options.use_lexicon] if options.use_lexicon is not None and Path(options.use_lexicon).exists() else []
    file = None if options.out is None else output_file(options.out, [*inputs, *used], replace=options.overwrite)
    if options.save_lexicon is not None:
        lexicon_file(options.save_lexicon, file, inputs, overwrite=options.overwrite, restart=options.restart)
    if file is not None:
        if not is_url(file):
            check_writable(Path(file).parent)
        if rereadable:
            Journal(file, {}).check()


def _first_pairs(
    inputs: Sequence[TextSource], block_lines: int, max_words: int, splits: Splits
) -> dict[int, tuple[list[str], list[str]]]:
    """The usable pairs of the first block that has any, by the number of their line."""
    for block in cut(inputs, block_lines):
        usable = {}
        for number, line in enumerate(read_lines(block), block.first):
            if not isinstance(line, InvalidInputError):
                pair = splits[0](line[0]), splits[1](line[1])
                if all(0 < len(words) <= max_words for words in pair):
                    usable[number] = pair
        if usable:
            return usable
    return {}


COMMAND = Command("extract", "align the words of sentence pairs with a translation model", _add_arguments, _run)
