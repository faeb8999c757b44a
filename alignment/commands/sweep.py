"""``norm-align sweep``: the paper's experiment on a corpus with gold alignments."""

import argparse
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from alignment.commands import models
from alignment.corpora import ParallelGold, load_alibi, read_rwth, read_wpt03
from alignment.pipeline.progress import to_stderr
from captum_norm import InvalidInputError
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import positive, resamples

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from alignment.sweep import Sweep

_WIDTH = 10_000  # what many layers or heads can need; in less, rich would cut numbers

_FOLDERS: Mapping[str, Callable[[str], ParallelGold]] = MappingProxyType({"wpt03": read_wpt03, "rwth": read_rwth})


def corpus(text: str) -> ParallelGold:
    """A corpus by what the option ``--corpus`` says: ``alibi``, ``wpt03=FOLDER`` or ``rwth=FOLDER``.

    Raises:
        InvalidInputError: there is no such corpus, or it cannot be read.
    """
    name, _, folder = text.partition("=")
    if text == "alibi":
        return load_alibi()
    if name not in _FOLDERS or not folder:
        raise InvalidInputError(f"got the corpus {text!r}; expected alibi, wpt03=FOLDER or rwth=FOLDER")
    return _FOLDERS[name](folder)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="a further model of the same shape and direction, such as another seed or checkpoint: what --model takes, "
        "with the same options; the mean and the population SD over all follow (may be given several times)",
    )
    parser.add_argument(
        "--corpus",
        action="append",
        metavar="CORPUS",
        help="sentences with gold alignments: alibi, which comes with this package, wpt03=FOLDER or rwth=FOLDER; may "
        "be given several times (default: alibi)",
    )
    parser.add_argument(
        "--swapped",
        action="store_true",
        help="the corpora the other way round, for a model that does not name its languages, such as Hugging Face's",
    )
    parser.add_argument("--no-gradients", action="store_true", help="leave out the gradient baselines")
    parser.add_argument(
        "--bootstrap",
        type=resamples,
        default=1000,
        metavar="N",
        help="resamples for the 95%% intervals of AER; 0 for none (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=positive, default=4096, metavar="N", help="how large a batch may be")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="also write sweep.csv and heatmaps, CORPUS-layers.png, CORPUS-heads.png, of --also with -2, -3 … behind",
    )


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from alignment.sweep import sweep
    from alignment.sweep_report import head_figure, layer_figure, records, spread_tables, tables
    from captum_norm.commands.outputs import write_outputs
    from captum_norm.visualization.figures import figure_bytes

    if options.out is not None and not options.out.is_dir():
        raise InvalidInputError(f"there is no folder {options.out}; make it, or give another --out")
    corpora = [corpus(text) for text in options.corpus or ["alibi"]]
    names = [found.name for found in corpora]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"got the corpora {', '.join(names)}; expected each once")
    console = Console()
    console.width = _WIDTH
    rows, outputs = [], dict[Path, bytes]()
    sweeps: dict[str, list[Sweep]] = {}
    for number, name in enumerate([options.model, *options.also], 1):
        model, tokenizer = models.load(argparse.Namespace(**{**vars(options), "model": name}))
        for found in corpora:
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
            _print(console, f"{_heading(turned)}; {name}" if options.also else _heading(turned), tables(swept))
            rows += [{"model": name, **record} for record in records(swept)]
            if options.out is not None:
                stem = f"{turned.name.lower()}-{{}}{f'-{number}' if number > 1 else ''}.png"
                outputs[options.out / stem.format("layers")] = figure_bytes(layer_figure(swept))
                outputs[options.out / stem.format("heads")] = figure_bytes(head_figure(swept))
            # The maps of a corpus are large, and nobody reads them any more.
            sweeps.setdefault(_heading(turned), []).append(replace(swept, maps={}))
    if options.also:
        for heading, several in sweeps.items():
            _print(console, f"{heading}; {len(several)} models", spread_tables(several))
    if options.out is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        outputs[options.out / "sweep.csv"] = text.getvalue().encode()
        write_outputs(outputs)


def _heading(turned: ParallelGold) -> str:
    direction = f"{turned.source_language}–{turned.target_language}"
    return f"{turned.name} {direction}, {len(turned)} sentence pairs; AER in %; layers and heads from 0"


def _print(console: "Console", heading: str, tables: "Sequence[Table]") -> None:
    console.print(heading, "", sep="\n", style="bold", highlight=False)
    for table in tables:
        console.print(table, "")


def _turned(given: ParallelGold, tokenizer: object, *, swapped: bool) -> ParallelGold:
    """The corpus in the direction of the model, where the model says it."""
    backwards = _direction(tokenizer) == (given.target_language, given.source_language)
    return given.swapped() if backwards or swapped else given


def _warn_of_other_languages(turned: ParallelGold, tokenizer: object) -> None:
    direction, languages = _direction(tokenizer), (turned.source_language, turned.target_language)
    if direction not in ((None, None), languages):
        found = f"the model translates {'–'.join(map(str, direction))}, {turned.name} is read as {'–'.join(languages)}"
        to_stderr(f"{found}; --swapped turns a corpus round")


def _direction(tokenizer: object) -> tuple[str | None, str | None]:
    return getattr(tokenizer, "source_language", None), getattr(tokenizer, "target_language", None)


COMMAND = Command("sweep", "alignment error rate by method, setting, layer, head and recipe", _add_arguments, _run)
