"""Runs ``norm-align extract``: aligns parallel text and writes Pharaoh format."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alignment.commands import aligners, models
from alignment.commands.aligners import AlignerOptions, LexiconOptions, LinkOptions
from alignment.commands.models import BlockOptions
from alignment.formats import Output, OutputStyle, TextSource
from alignment.formats.bitext import is_bitext
from alignment.pipeline import BadLines
from alignment.pipeline.blocks import Pairs, Splits, read_lines
from alignment.pipeline.extraction import lexicon_file, output_file
from captum_norm import InvalidInputError
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.commands.shared import number_of_threads, positive, share, write_outputs
from captum_norm.loading import on_device
from captum_norm.runs import Backend, Journal, RayBackend, cut
from captum_norm.versions import versions

if TYPE_CHECKING:
    from alignment.aligner import TextAligner
    from alignment.lexicon import Lexicon

_STATISTICS = "the links hold corpus statistics: a lexicon counted from other sentences took part"


@dataclass(frozen=True, kw_only=True)
class _Counted(LexiconOptions, title=LexiconOptions.title):
    lexicon: bool | None = option(
        "first count which words are linked throughout the text, and use these counts; maps are then kept on disk "
        "(default: for files that two models align by add or multiply)"
    )
    save_lexicon: str | None = option("also write the counts to FILE", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class _Written(Options, title="what is written"):
    format: OutputStyle = option(
        "how links are written; pharaoh: i-j; naacl: a line for each link, pair i j S, from 1; tsv: source, target and "
        "links; matrix: a line of JSON with words, links and the probability of every possible link",
        "pharaoh",
    )
    scores: bool = option(
        "also write the probability of each link, i-j:p; needs the recipe hmm, and for two models add or multiply",
        False,
    )
    min_score: float = option("leave out links less probable than this", 0.0, parse=share, metavar="P")
    pieces: list[str] | None = option(
        "write links between pieces of the words, as Marian's guided alignment reads them: the SentencePiece model "
        "(.spm, .model) or BPE codes of the model to be trained; twice for source and target",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class _Workers(Options, title="the workers"):
    """Where a long run takes place."""

    workers: int | None = option(
        "share the work among N processes, on this machine or the cluster (default: this process; on a cluster, as "
        "many as it has room for)",
        metavar="N",
        parse=positive,
    )
    ray: str | None = option(
        "the Ray cluster to run on: auto for that of this machine (default: $RAY_ADDRESS, or none)",
        os.environ.get("RAY_ADDRESS"),
        metavar="ADDRESS",
    )
    cpus_per_worker: int | None = option(
        "cores, and threads, for each worker (default: 1)", metavar="N", parse=number_of_threads
    )
    gpus_per_worker: float = option(
        "GPUs for each worker, or a share of one, such as 0.5; the model then runs on cuda (default: 0)",
        0.0,
        metavar="N",
    )

    def backend(self, threads: int | None = None) -> Backend:
        """Where the run takes place: here, unless workers or a cluster are asked for."""
        if self.workers is None and not self.ray:
            return "local"
        return RayBackend(
            workers=self.workers,
            address=self.ray or None,
            cpus_per_worker=self.cpus_per_worker or threads or 1,
            gpus_per_worker=self.gpus_per_worker,
        )


@dataclass(frozen=True, kw_only=True)
class _TextOptions(_Written, _Counted, BlockOptions):
    """What ``extract`` and ``decode`` share."""

    out: str | None = option(
        "where to write the links; by default as i-j, source first, from 0, one line for each line of the input. A run "
        "that was killed continues where it stopped if it reads files and writes to one (default: standard output)",
        metavar="FILE",
    )
    overwrite: bool = option("replace FILE if it exists", False)
    restart: bool = option("discard the work of an unfinished run", False)


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(_TextOptions, AlignerOptions, _Workers):
    """The options of ``norm-align extract``."""

    source: str = argument(models.SOURCE, metavar="SOURCE")
    target: str | None = argument("the tokenised target sentences, one per line", metavar="TARGET", nargs="?")
    page: Path | None = models.page_option()
    tokenize: bool = models.tokenize_option()


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(_TextOptions, LinkOptions):
    """The options of ``norm-align decode``."""

    matrices: str = argument(
        "what Marian's --alignment soft wrote, or lines of JSON with source, target and attention, or of extract "
        "--format matrix; - is standard input",
        metavar="MATRICES",
    )
    text: str | None = argument(
        "the pieces that Marian read, one sentence per line, or source ||| target, if MATRICES lacks them",
        metavar="TEXT",
        nargs="?",
    )
    setting: Literal["AWO", "AWI"] = option("whether a row is of the step that emits a piece, or that reads it", "AWO")
    bad_lines: BadLines = models.bad_lines_option("stop")


class _Deferred:
    """An aligner whose models go to their device, and which chooses what was left open, when the first pairs come."""

    def __init__(self, aligner: "TextAligner", device: str, report: Callable[[str], None] | None) -> None:
        self._aligner, self._device, self._report = aligner, device, report
        self.count_text, self.scored = aligner.count_text, aligner.scored
        self.corpus_statistics = aligner.corpus_statistics
        self.counted, self.read = aligner.counted, aligner.read
        self.counts: Lexicon | None = None

    def ready(self, pairs: Pairs) -> "TextAligner":
        """The aligner, ready for these pairs."""
        for part, _ in self._aligner.directions:
            on_device(part.model, self._device)
        aligners.choose(self._aligner, pairs, self._report)
        return self._aligner

    def begun_lexicon(self) -> "Lexicon":
        """The lexicon to which the pairs of the text are added, which is kept."""
        self.counts = self._aligner.begun_lexicon()
        return self.counts

    def write_page(self, page: Path, options: ExtractOptions, pairs: Pairs) -> None:
        """Write the page of the first pairs, with the counts of the whole text."""
        names = {"model": options.model, "reverse": options.reverse_model}
        facts = {name: model for name, model in names.items() if model is not None}
        settings: dict[str, Any] = {"min_score": options.min_score, "counts": self.counts}
        write_outputs({page: aligners.page(self._aligner, pairs, facts, **settings)})


def _run(options: ExtractOptions) -> None:
    if options.pieces and options.tokenize:
        raise InvalidInputError("got --pieces and --tokenize; give the words that the model to be trained reads")
    form = _output(options)
    splits = models.splits(options, tokenize=options.tokenize)
    backend = options.backend(options.threads)
    device = "cuda" if options.gpus_per_worker and options.device == "cpu" else options.device
    with models.set_up(options) as report, models.text_sources(options, options.source, options.target) as inputs:
        rereadable = not any(map(models.is_stream, inputs))
        _check_outputs(options, inputs, rereadable=rereadable)
        # A pipe can be read only once: its first pairs decide when they are aligned.
        first = _first_pairs(inputs, options, splits) if rereadable else []
        # Workers take the models to their devices; this process may have none.
        count_text = options.lexicon
        if count_text is None and (options.save_lexicon is not None or not rereadable):
            count_text = options.save_lexicon is not None
        aligner, identity = aligners.load(options, device if backend == "local" else "cpu", count_text=count_text)
        aligners.choose(aligner, first, report)
        if not options.keep_sides:
            aligners.check_sides(aligner, first)
        undecided = any(part.choice is None for part, _ in aligner.directions)
        deferred = _Deferred(aligner, device, report if undecided else None)
        identity |= aligners.identity(options, aligner) | {"output": str(form), "tokenize": options.tokenize}
        page = options.page and options.page.absolute()  # workers may be in other folders
        at_end = None if page is None else partial(deferred.write_page, page, options, first)
        _extract(options, inputs, deferred, identity, report, form=form, splits=splits, backend=backend, at_end=at_end)
        if page is not None and not page.exists():
            raise InvalidInputError(
                f"{options.out} is complete, but {page} is not there; give a folder that all workers reach, or align "
                "the text anew with --overwrite"
            )


def _extract(
    options: _TextOptions,
    inputs: Sequence[TextSource],
    aligner: Any,
    settings: Mapping[str, str | int | None],
    report: Callable[[str], None],
    **further: Any,
) -> None:
    counts = options.extract(
        inputs,
        aligner,
        sys.stdout.buffer if options.out is None else options.out,
        report,
        settings={**versions(), **settings},
        overwrite=options.overwrite,
        restart=options.restart,
        save_lexicon=options.save_lexicon,
        **further,
    )
    if aligner.corpus_statistics:
        report(_STATISTICS)
    report(str(counts))


def _output(options: _TextOptions) -> Output:
    """What is written, by options that fit each other."""
    from alignment.fairseq.tokenizer import read_segmenter

    if options.save_lexicon is not None and options.lexicon is False:
        raise InvalidInputError("got --save-lexicon and --no-lexicon, so nothing is counted; leave out one of them")
    files = options.pieces or []
    if len(files) > 2:
        raise InvalidInputError(f"got --pieces {len(files)} times, expected once or twice, for source and target")
    cuts = (read_segmenter(Path(files[0])).cut, read_segmenter(Path(files[-1])).cut) if files else None
    return Output(options.format, options.scores, options.min_score, cuts)


def _check_outputs(options: ExtractOptions, inputs: Sequence[TextSource], *, rereadable: bool) -> None:
    """Check that the files can be written, before a model is loaded."""
    if options.page is not None and not rereadable:
        raise InvalidInputError("got --page and a stream, which can be read only once; give files")
    given = [*inputs, *([options.source] if is_bitext(options.source) else [])]
    if options.use_lexicon is not None and Path(options.use_lexicon).exists():
        given.append(options.use_lexicon)
    file = None if options.out is None else output_file(options.out, given, replace=options.overwrite)
    if options.save_lexicon is not None:
        lexicon_file(options.save_lexicon, file, inputs, overwrite=options.overwrite, restart=options.restart)
    if file is not None and rereadable:
        Journal(file, {}).check()


def _first_pairs(
    inputs: Sequence[TextSource], options: BlockOptions, splits: Splits
) -> list[tuple[list[str], list[str]]]:
    """The usable pairs of the first block that has any."""
    for block in cut(inputs, options.block_lines):
        lines = [line for line in read_lines(block) if not isinstance(line, InvalidInputError)]
        pairs = [(splits[0](source), splits[1](target)) for source, target in lines]
        if usable := [pair for pair in pairs if all(0 < len(words) <= options.max_words for words in pair)]:
            return usable
    return []


def _decode(options: DecodeOptions) -> None:
    from alignment.matrices import MatrixAligner

    form = _output(options)
    models.refuse_two_streams(options.matrices, options.text)
    lexicon = options.load_lexicon()
    count_text = bool(options.lexicon) or options.save_lexicon is not None
    recipe = replace(options.recipe, combination=None)
    with models.set_up(options) as report:
        aligner = MatrixAligner(recipe, lexicon, count_text=count_text, languages=(None, None))
        aligner.setting = options.setting
        identity: dict[str, str | int | None] = {"recipe": str(recipe), "setting": options.setting, "output": str(form)}
        inputs = [models.text_source(name) for name in (options.matrices, options.text) if name is not None]
        identity["lexicon"] = aligners.counts(aligner, options.use_lexicon)
        _extract(options, inputs, aligner, identity, report, form=form)


COMMAND = Command(
    "extract",
    "align the words of sentence pairs with a translation model",
    ExtractOptions,
    _run,
    "norm-align extract corpus.fr corpus.en --out links.txt --page links.html",
    ("out", "overwrite", "format", "scores", "page", "tokenize", "lexicon", "model", "reverse_model", "device"),
)
DECODE = Command(
    "decode",
    "align words by attention that another tool wrote",
    DecodeOptions,
    _decode,
    "norm-align decode marian.out source.pieces --out links.txt",
    ("out", "overwrite", "format", "scores", "recipe", "setting", "bad_lines", "lexicon", "use_lexicon"),
)
