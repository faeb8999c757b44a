"""Runs ``norm-align sweep``: the paper's experiment on corpora with gold alignments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from alignment.commands import models
from alignment.commands.evaluate import GoldOptions, read_file, read_sentences
from alignment.corpora import ALIBI_STORIES, ParallelGold, load_alibi, read_rwth, read_wpt03
from alignment.formats import split_words
from alignment.tokenization import TranslationTokenizer
from captum_norm import InvalidInputError
from captum_norm.bars import to_stderr
from captum_norm.checks import did_you_mean
from captum_norm.commands.program import Command, option
from captum_norm.commands.shared import output_folder, positive, resamples, write_outputs
from captum_norm.results.tables import csv_records

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from alignment.huggingface import HuggingFaceTokenizer
    from alignment.sweep import Sweep
    from captum_norm.commands.terminal import Terminal

_WIDTH = 10_000  # columns, for many layers or heads: rich would cut numbers

_UNNAMED = ("source", "target")  # the languages of a user's own corpus

_FOLDERS = {"wpt03": read_wpt03, "rwth": read_rwth}


def corpora(text: str) -> list[ParallelGold]:
    """The corpora that the option ``--corpus`` names: ``alibi[=STORY]``, ``wpt03=FOLDER`` or ``rwth=FOLDER``."""
    name, _, which = text.partition("=")
    if stories := [story for story in ALIBI_STORIES if text in ("alibi", f"alibi={story}")]:
        return [load_alibi(story) for story in stories]
    if name not in _FOLDERS or not which:
        known = ", ".join(f"alibi={story}" for story in ALIBI_STORIES)
        meant = did_you_mean(text, ["alibi", *known.split(", ")])
        raise InvalidInputError(f"got the corpus {text!r}; expected alibi, {known}, wpt03=FOLDER or rwth=FOLDER{meant}")
    return [_FOLDERS[name](which)]


@dataclass(frozen=True, kw_only=True)
class _OwnCorpus(GoldOptions, title="a corpus of your own, instead of --corpus"):
    gold: str | None = option("gold alignments, source first", metavar="FILE")
    source: str | None = option("the tokenised source sentences, one per line", metavar="FILE")
    target: str | None = option("the tokenised target sentences, one per line", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(models.ModelOptions, _OwnCorpus):
    """The options of ``norm-align sweep``."""

    corpus: list[str] = option(
        "sentences with gold alignments: alibi, the three stories that come with this package, alibi=STORY, "
        f"wpt03=FOLDER or rwth=FOLDER; the stories are {', '.join(ALIBI_STORIES)}; may be given several times "
        "(default: alibi)",
        [],
        metavar="CORPUS",
    )
    swapped: bool = option(
        "exchange source and target, for a model that does not name its languages, such as one of Hugging Face", False
    )
    no_gradients: bool = option("leave out the gradient baselines", False)
    bootstrap: int = option("resamples for the 95%% intervals of AER; 0 for none", 1000, parse=resamples, metavar="N")
    max_tokens: int = option("the maximum size of a batch in pieces", 4096, parse=positive, metavar="N")
    out: Path | None = option(
        "also write sweep.csv and a page for each corpus; CORPUS.html has heatmaps and the links of every head",
        parse=output_folder,
        metavar="FOLDER",
    )


def _run(options: SweepOptions) -> None:
    from alignment.sweep import corpora_tables, records, tables
    from captum_norm.commands.terminal import Terminal

    if options.gold is None and (options.source is not None or options.target is not None):
        raise InvalidInputError("got --source or --target without --gold; give the gold alignments of these sentences")
    texts = _corpora(options.corpus or ["alibi"]) if options.gold is None else [_own(options, options.gold)]
    console = Terminal(width=_WIDTH)
    model, tokenizer = models.load(options, encoders=True)
    rows, outputs = list[dict[str, Any]](), dict[Path, bytes]()
    of_directions: dict[str, list[Sweep]] = {}
    for text in texts:
        swept = _swept(model, tokenizer, text, options)
        direction = _direction_of(swept.corpus)
        heading = f"{swept.corpus.name} {direction}, {len(swept.corpus)} sentence pairs"
        _print(console, f"{heading}; AER in %; layers and heads from 0", tables(swept))
        rows += [{"model": options.model, **record} for record in records(swept)]
        if options.out is not None and swept.heads:
            name = swept.corpus.name.lower().replace(" ", "-")
            outputs[options.out / f"{name}.html"] = _page(swept, options.model)
        # Maps are large and no longer needed.
        of_directions.setdefault(direction, []).append(replace(swept, maps={}))
    for direction, several in of_directions.items():
        if len(several) > 1 and several[0].heads:
            _print(console, f"{len(several)} corpora {direction}; AER in %", corpora_tables(several))
    if options.out is not None:
        options.out.mkdir(exist_ok=True)
        write_outputs(outputs | {options.out / "sweep.csv": csv_records(rows).encode()})


def _own(options: SweepOptions, path: str) -> ParallelGold:
    """The corpus that ``--gold``, ``--source`` and ``--target`` name."""
    if options.corpus:
        raise InvalidInputError("got --gold and --corpus; give one of them")
    in_file = options.gold_format == "tsv"
    if in_file != (options.source is None) or in_file != (options.target is None):
        needed = "the sentences are in a tsv file; leave out" if in_file else "got --gold without both sides; give"
        raise InvalidInputError(f"{needed} --source and --target")
    texts = read_sentences(options.source), read_sentences(options.target)
    content = read_file(options.gold_file(path), texts)
    sources, targets = (list(map(split_words, side or ())) for side in (content.sources, content.targets))
    return ParallelGold(Path(path).name, *_UNNAMED, sources, targets, content.pairs)


def _corpora(texts: Sequence[str]) -> list[ParallelGold]:
    named = [corpus for text in texts for corpus in corpora(text)]
    names = [corpus.name for corpus in named]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"got the corpora {', '.join(names)}; expected each once")
    return named


def _swept(model: "nn.Module", tokenizer: TranslationTokenizer, text: ParallelGold, options: SweepOptions) -> "Sweep":
    from alignment.sweep import encoder_sweep, sweep

    translates = getattr(getattr(model, "config", None), "is_encoder_decoder", True)
    direction = getattr(tokenizer, "source_language", None), getattr(tokenizer, "target_language", None)
    turned = text.swapped() if options.swapped or direction == (text.target_language, text.source_language) else text
    further: Any = {"n_bootstrap": max(1, options.bootstrap), "max_tokens": options.max_tokens}
    swept = (
        sweep(model, tokenizer, turned, gradients=not options.no_gradients, **further)
        if translates
        else encoder_sweep(model, cast("HuggingFaceTokenizer", tokenizer), turned, **further)
    )
    languages = turned.source_language, turned.target_language
    if languages != _UNNAMED and direction not in ((None, None), languages):
        ways = f"the model translates {'–'.join(map(str, direction))}, {turned.name} is read as {'–'.join(languages)}"
        to_stderr(f"{ways}; --swapped exchanges source and target")
    return swept


def _page(swept: "Sweep", model: str) -> bytes:
    from alignment.pages import sweep_page
    from captum_norm.show.page import render

    return render(sweep_page(swept, model)).encode()


def _direction_of(turned: ParallelGold) -> str:
    return f"{turned.source_language}–{turned.target_language}"


def _print(console: "Terminal", heading: str, tables: "Sequence[Table]") -> None:
    console.print(heading, "", sep="\n", style="bold")
    for table in tables:
        console.print(table, "")


COMMAND = Command(
    "sweep",
    "measure error rates by method, setting, layer, head and recipe",
    SweepOptions,
    _run,
    "norm-align sweep --corpus alibi=blue-beard --no-gradients --out sweep",
    ("corpus", "gold", "gold_format", "gold_base", "source", "target", "no_gradients", "out", "model", "device"),
)
