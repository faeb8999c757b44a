"""Runs ``norm-align extract``: aligns parallel text and writes Pharaoh format."""

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from alignment.commands import aligners, models
from alignment.commands.aligners import AlignerOptions, LexiconOptions
from alignment.commands.evaluate import GoldOptions
from alignment.formats import Output, OutputStyle, TextSource, read_parallel, split_words
from alignment.pipeline import extract
from alignment.pipeline.blocks import Pairs, Splits, read_lines
from alignment.pipeline.extraction import lexicon_file, output_file
from captum_norm import InvalidInputError
from captum_norm.checks import quoted
from captum_norm.commands.program import Command, argument, option
from captum_norm.commands.shared import Workers, output_path, positive, share, status_of, write_outputs
from captum_norm.loading import on_device
from captum_norm.runs import Journal, cut
from captum_norm.text.lines import error_at
from captum_norm.versions import versions

if TYPE_CHECKING:
    from alignment.aligner import TextAligner
    from alignment.links import GoldAlignment, ScoredAlignment
    from alignment.word_maps import WordMap

_BLOCK_LINES = 2048


@dataclass(frozen=True, kw_only=True)
class _Counted(LexiconOptions, title=LexiconOptions.title):
    lexicon: bool = option("first count which words the whole text links, and use the counts", False)
    save_lexicon: str | None = option("with --lexicon: also write the counts to FILE", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class _Written(GoldOptions, title="what is written"):
    format: OutputStyle = option(
        "pharaoh: i-j; naacl: a line for each link, pair i j S, from 1; tsv: source, target and links; matrix: a line "
        "of JSON with words, links and the probability of every possible link; npz: the same numbers as arrays in one "
        "file",
        "pharaoh",
    )
    base: Literal[0, 1] | None = option("the index of the first word (default: 0; naacl: 1)")
    scores: bool = option(
        "also write how probable each link is, i-j:p; for the recipe hmm, in both directions by add, multiply "
        "or mutual",
        False,
    )
    page: Path | None = option(
        "also write a page with the first sentence pairs: their maps, and lines between the words",
        parse=output_path(".html"),
        metavar="FILE.html",
    )
    gold: str | None = option(
        "with --page: the gold alignments of the text, which the page shows beside the links", metavar="FILE"
    )
    min_score: float = option("leave out links less probable than this", 0.0, parse=share, metavar="P")


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(_Written, AlignerOptions, _Counted, Workers):
    """The options of ``norm-align extract``."""

    source: str | None = argument(
        "the tokenised source sentences, one a line; without TARGET, lines source ||| target. A file or URL; .gz, .xz "
        "and .bz2 are decompressed, - is standard input",
        metavar="SOURCE",
        nargs="?",
    )
    target: str | None = argument("the tokenised target sentences, one a line", metavar="TARGET", nargs="?")
    out: str | None = option(
        "the alignments, i-j, source first, from 0; line n belongs to line n of the input. From files to a file, a "
        "killed run continues where it stopped (default: standard output)",
        metavar="FILE",
    )
    overwrite: bool = option("replace FILE if it exists", False)
    restart: bool = option("discard the work of an unfinished run", False)
    status: str | None = option("show how far the run that writes FILE is, and do nothing else", metavar="FILE")
    tokenize: bool = option(
        "split raw text into words as Moses does, for the shipped models; --format tsv shows the words", False
    )
    block_lines: int | None = option(
        f"lines that are read, aligned and written together (default: {_BLOCK_LINES:,}; from a stream, as many as "
        "there are when it pauses)",
        parse=positive,
        metavar="N",
    )


class _Deferred:
    """Moves an aligner's models to their device, and lets it choose what was left open, when the first pairs come."""

    def __init__(
        self,
        aligner: "TextAligner",
        device: str,
        report: Callable[[str], None] | None,
        check: aligners.SideCheck | None,
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
        for part, _ in self._aligner.directions:
            on_device(part.model, self._device)
        aligners.choose(self._aligner, pairs, self._report)
        if self._check is not None:
            self._check(self._aligner, pairs)
        return self._aligner


def _run(options: ExtractOptions) -> None:
    if options.status is not None:
        from captum_norm.commands.terminal import Terminal

        Terminal().say(status_of(options.status))
        return
    if options.source is None:
        raise InvalidInputError("got no SOURCE; give the text to align, or --status FILE")
    models.refuse_two_streams(options.source, options.target)
    if options.save_lexicon is not None and not options.lexicon:
        raise InvalidInputError("got --save-lexicon without --lexicon, so nothing is counted; add --lexicon")
    form = Output(options.format, options.base, options.scores, options.min_score)
    splits = models.splits(options, tokenize=options.tokenize)
    backend, device = options.backend(options.threads), options.worker_device(options.device)
    with models.set_up(options) as report:
        source = models.text_source(options.source)
        target = None if options.target is None else models.text_source(options.target)
        inputs = [side for side in (source, target) if side is not None]
        rereadable = not any(map(models.is_stream, inputs))
        _check_outputs(options, inputs, rereadable=rereadable)
        # A pipe can be read only once: its first pairs decide when they are aligned.
        block_lines = options.block_lines or _BLOCK_LINES
        lines = _first_pairs(inputs, block_lines, options.max_words, splits) if rereadable else {}
        first = list(lines.values())
        gold = None if options.gold is None else _gold(options, options.gold, inputs, splits)
        # Workers take the models to their devices; this process may have none.
        aligner, identity = aligners.load(options, device if backend == "local" else "cpu", count_text=options.lexicon)
        aligners.choose(aligner, first, report)
        if not options.keep_sides:
            aligners.check_sides(aligner, first)
        undecided = any(part.choice is None for part, _ in aligner.directions)
        if undecided and not rereadable:
            models.report_waiting(report, options)
        deferred = _Deferred(
            aligner,
            device,
            report if undecided else None,
            check=aligners.SideCheck() if not first and not options.keep_sides else None,
        )
        identity |= aligners.identity(options, aligner) | {"output": str(form)}
        counts = extract(
            source,
            target,
            deferred,
            sys.stdout.buffer if options.out is None else options.out,
            settings={**versions(), **identity, "tokenize": options.tokenize},
            block_lines=block_lines,
            # Lines that layers and heads are chosen on must come together.
            pause=None if undecided else models.PAUSE,
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
            names = {"model": options.model, "reverse": options.reverse_model}
            facts = {name: model for name, model in names.items() if model is not None}
            write_outputs({options.page: aligners.page(aligner, first, facts, shown, options.min_score)})
        report(str(counts))


def _check_outputs(options: ExtractOptions, inputs: Sequence[TextSource], *, rereadable: bool) -> None:
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
    if file is not None and rereadable:
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


def _gold(options: ExtractOptions, path: str, inputs: Sequence[TextSource], splits: Splits) -> "list[GoldAlignment]":
    """The gold alignment of each line of the text, whose links lie inside its sentences."""
    pairs = list(read_parallel(*inputs, on_error=lambda _: None))
    # A line that cannot be used is not checked.
    sides = [[" ".join(split(pair[side])) or None for pair in pairs] for side, split in enumerate(splits)]
    in_file = options.gold_format == "tsv"
    gold, scanned = options.scan_gold(path, (None, None) if in_file else (sides[0], sides[1]))
    if in_file and len(gold) != len(pairs):
        raise InvalidInputError(f"{path}: got {len(gold)} sentence pairs, the text has {len(pairs)}")
    for name, of_file, of_text in zip(("source", "target"), (scanned.sources, scanned.targets), sides, strict=True):
        for number, (theirs, ours) in enumerate(zip(of_file or (), of_text, strict=True), 1):
            if ours is not None and theirs is not None and split_words(theirs) != split_words(ours):
                message = (
                    f"got the {name} {quoted(theirs)}, but the text has {quoted(ours)}; align the file's sentences"
                )
                raise error_at(models.text_source(path), number, message)
    return gold


COMMAND = Command("extract", "align the words of sentence pairs with a translation model", ExtractOptions, _run)
