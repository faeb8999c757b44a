"""Runs ``norm-align sweep``: the paper's experiment on corpora with gold alignments."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from alignment.commands import gold as gold_options
from alignment.commands import models
from alignment.commands.evaluated_files import read_sentences
from alignment.corpora import ALIBI_STORIES, ParallelGold, load_alibi, read_rwth, read_wpt03
from alignment.formats import split_words
from alignment.tokenization import TranslationTokenizer
from captum_norm import InvalidInputError
from captum_norm.bars import to_stderr
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import positive, resamples
from captum_norm.commands.outputs import output_folder, write_outputs
from captum_norm.results.tables import csv_records

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from alignment.sweep import Sweep
    from captum_norm.commands.terminal import Terminal

_WIDTH = 10_000  # columns, for many layers or heads: rich would cut numbers

_UNNAMED = ("source", "target")  # the languages of a user's own corpus

_FOLDERS: Mapping[str, Callable[[str], ParallelGold]] = MappingProxyType({"wpt03": read_wpt03, "rwth": read_rwth})


def corpora(text: str) -> list[ParallelGold]:
    """The corpora that the option ``--corpus`` names: ``alibi[=STORY]``, ``wpt03=FOLDER`` or ``rwth=FOLDER``.

    Raises:
        InvalidInputError: the corpus is unknown or cannot be read.
    """
    name, _, which = text.partition("=")
    if stories := [story for story in ALIBI_STORIES if text in ("alibi", f"alibi={story}")]:
        return [load_alibi(story) for story in stories]
    if name not in _FOLDERS or not which:
        known = ", ".join(f"alibi={story}" for story in ALIBI_STORIES)
        raise InvalidInputError(f"got the corpus {text!r}; expected alibi, {known}, wpt03=FOLDER or rwth=FOLDER")
    return [_FOLDERS[name](which)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="a further model of the same shape and direction, such as another seed or checkpoint, given as for "
        "--model; adds the mean and population SD over all models (may be given several times)",
    )
    parser.add_argument(
        "--corpus",
        action="append",
        metavar="CORPUS",
        help="sentences with gold alignments: alibi, the three stories shipped with this package, alibi=STORY for "
        f"{' or '.join(ALIBI_STORIES)} alone, wpt03=FOLDER or rwth=FOLDER; may be given several times (default: alibi)",
    )
    own = parser.add_argument_group("a corpus of your own, instead of --corpus")
    own.add_argument("--gold", metavar="FILE", help="gold alignments, source first")
    own.add_argument("--source", metavar="FILE", help="the tokenised source sentences, one a line")
    own.add_argument("--target", metavar="FILE", help="the tokenised target sentences, one a line")
    gold_options.add_format(own)
    parser.add_argument(
        "--swapped",
        action="store_true",
        help="exchange source and target, for a model that does not name its languages, such as Hugging Face's",
    )
    parser.add_argument("--no-gradients", action="store_true", help="leave out the gradient baselines")
    parser.add_argument(
        "--bootstrap",
        type=resamples,
        default=1000,
        metavar="N",
        help="resamples for the 95%% intervals of AER; 0 for none (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=positive, default=4096, metavar="N", help="the largest batch, in pieces")
    parser.add_argument(
        "--out",
        type=output_folder,
        metavar="FOLDER",
        help="also write sweep.csv, and for each corpus heatmaps, CORPUS-layers.png, CORPUS-heads.png, and a page with "
        "the links of every head, CORPUS.html; those of --also end in -2, -3 …",
    )


def _run(options: argparse.Namespace) -> None:
    from alignment.sweep import corpora_tables, records, spread_tables, tables
    from captum_norm.commands.terminal import Terminal

    if options.gold is None and (options.source is not None or options.target is not None):
        raise InvalidInputError("got --source or --target without --gold; give the gold alignments of these sentences")
    given = [_own(options)] if options.gold else _given(options.corpus or ["alibi"])
    console = Terminal(width=_WIDTH)
    rows, outputs = [], dict[Path, bytes]()
    of_corpora: dict[str, list[Sweep]] = {}
    for number, name in enumerate([options.model, *options.also], 1):
        model, tokenizer = models.load(argparse.Namespace(**{**vars(options), "model": name}))
        which = f"; {name}" if options.also else ""
        of_directions: dict[str, list[Sweep]] = {}
        for found in given:
            swept = _swept(model, tokenizer, found, options)
            _print(console, f"{_heading(swept.corpus)}{which}", tables(swept))
            rows += [{"model": name, **record} for record in records(swept)]
            if options.out is not None:
                outputs |= _shown(swept, name, options.out, f"-{number}" if number > 1 else "")
            # Maps are large and no longer needed.
            kept = replace(swept, maps={})
            of_corpora.setdefault(_heading(kept.corpus), []).append(kept)
            of_directions.setdefault(_direction_of(kept.corpus), []).append(kept)
        for direction, several in of_directions.items():
            if len(several) > 1:
                _print(console, f"{len(several)} corpora {direction}; AER in %{which}", corpora_tables(several))
    if options.also:
        for heading, several in of_corpora.items():
            _print(console, f"{heading}; {len(several)} models", spread_tables(several))
    if options.out is not None:
        options.out.mkdir(exist_ok=True)
        write_outputs(outputs | {options.out / "sweep.csv": csv_records(rows).encode()})


def _own(options: argparse.Namespace) -> ParallelGold:
    """The corpus that ``--gold``, ``--source`` and ``--target`` name."""
    if options.corpus:
        raise InvalidInputError("got --gold and --corpus; give one of them")
    in_file = options.gold_format == "tsv"
    if in_file != (options.source is None) or in_file != (options.target is None):
        needed = "the sentences are in a tsv file; leave out" if in_file else "got --gold without both sides; give"
        raise InvalidInputError(f"{needed} --source and --target")
    found = gold_options.scan(options, read_sentences(options.source), read_sentences(options.target))
    gold = [pair for pair in found.pairs if not isinstance(pair, InvalidInputError)]  # it has raised those
    sources, targets = ([split_words(line or "") for line in side or ()] for side in (found.sources, found.targets))
    return ParallelGold(Path(options.gold).name, *_UNNAMED, sources, targets, gold)


def _given(texts: Sequence[str]) -> list[ParallelGold]:
    given = [found for text in texts for found in corpora(text)]
    names = [found.name for found in given]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"got the corpora {', '.join(names)}; expected each once")
    return given


def _swept(
    model: "nn.Module", tokenizer: TranslationTokenizer, found: ParallelGold, options: argparse.Namespace
) -> "Sweep":
    from alignment.sweep import sweep

    turned = _turned(found, tokenizer, swapped=options.swapped)
    swept = sweep(
        model,
        tokenizer,
        turned,
        gradients=not options.no_gradients,
        n_bootstrap=max(1, options.bootstrap),
        max_tokens=options.max_tokens,
    )
    _warn_of_other_languages(turned, tokenizer)
    return swept


def _shown(swept: "Sweep", model: str, folder: Path, ending: str) -> dict[Path, bytes]:
    from alignment.pages import sweep_page
    from alignment.sweep import head_figure, layer_figure
    from captum_norm.show import figure_bytes
    from captum_norm.show.page import render

    title = swept.corpus.name.lower().replace(" ", "-")
    drawn = {"layers": layer_figure(swept), "heads": head_figure(swept)}
    pictures = {folder / f"{title}-{kind}{ending}.png": figure_bytes(figure) for kind, figure in drawn.items()}
    return pictures | {folder / f"{title}{ending}.html": render(sweep_page(swept, model)).encode()}


def _heading(turned: ParallelGold) -> str:
    return f"{turned.name} {_direction_of(turned)}, {len(turned)} sentence pairs; AER in %; layers and heads from 0"


def _direction_of(turned: ParallelGold) -> str:
    return f"{turned.source_language}–{turned.target_language}"


def _print(console: "Terminal", heading: str, tables: "Sequence[Table]") -> None:
    console.print(heading, "", sep="\n", style="bold")
    for table in tables:
        console.print(table, "")


def _turned(given: ParallelGold, tokenizer: object, *, swapped: bool) -> ParallelGold:
    """The corpus in the direction of the model, if known."""
    backwards = _direction(tokenizer) == (given.target_language, given.source_language)
    return given.swapped() if backwards or swapped else given


def _warn_of_other_languages(turned: ParallelGold, tokenizer: object) -> None:
    direction, languages = _direction(tokenizer), (turned.source_language, turned.target_language)
    if languages != _UNNAMED and direction not in ((None, None), languages):
        found = f"the model translates {'–'.join(map(str, direction))}, {turned.name} is read as {'–'.join(languages)}"
        to_stderr(f"{found}; --swapped exchanges source and target")


def _direction(tokenizer: object) -> tuple[str | None, str | None]:
    return getattr(tokenizer, "source_language", None), getattr(tokenizer, "target_language", None)


COMMAND = Command("sweep", "alignment error rate by method, setting, layer, head and recipe", _add_arguments, _run)
