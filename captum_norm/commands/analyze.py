"""Runs ``captum-norm analyze``, which repeats the papers' experiments on a model and a corpus."""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from captum_norm.bars import progress
from captum_norm.commands import workers
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import natural, positive
from captum_norm.commands.options import add_layouts, declare_layouts
from captum_norm.commands.outputs import local_folder, output_folder_or_url, output_path_or_url
from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL
from captum_norm.runs import Backend, Journal

if TYPE_CHECKING:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.lab.analysis.results import AnalysisResult, Table

NAMES = (
    "dispersion",
    "special-tokens",
    "frequency",
    "mixing-ratio",
    "expansion-rate",
    "contextualization-change",
)
"""The names of :data:`captum_norm.lab.analysis.engine.ANALYSES`, without importing torch."""

_SHOWN_ROWS = 40


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("analysis", metavar="NAME", choices=NAMES, help=f"the experiment: {', '.join(NAMES)}")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
        help="a model folder or a name on the Hugging Face hub; for an encoder–decoder model, its encoder is measured "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        help="the path or URL of the text, UTF-8; .gz, .xz and .bz2 are decompressed, - is standard input "
        "(default: 200 sentences of Europarl in this package)",
    )
    unit = parser.add_mutually_exclusive_group()
    unit.add_argument(
        "--lines", action="store_true", help="a text is a line, truncated to the model's length (default)"
    )
    unit.add_argument(
        "--documents",
        action="store_true",
        help="a text is all lines up to a blank one; a long text becomes several inputs",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="read only the first N texts")
    parser.add_argument(
        "--out",
        type=output_folder_or_url,
        metavar="FOLDER",
        help="write the results there, in a folder or at a URL: numbers, tables, figures and a page. A killed run is "
        "resumed",
    )
    parser.add_argument("--status", action="store_true", help="show how far the run in --out is, and do nothing else")
    parser.add_argument("--restart", action="store_true", help="discard an unfinished run")
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="the seed for masking tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--mask-rate",
        type=float,
        metavar="SHARE",
        help="the share of ordinary tokens to mask (default: 0.12 for mixing-ratio, else 0)",
    )
    parser.add_argument(
        "--frequencies",
        metavar="FILE",
        help="a list of tokens, one in each line, the most frequent first, to rank tokens by instead of the corpus",
    )
    parser.add_argument("--max-length", type=positive, metavar="N", help="the largest number of tokens in an input")
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="the largest number of tokens in a batch, padding included (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=output_path_or_url([".parquet"]),
        metavar="FILE.parquet",
        help="also store the values of each token",
    )
    parser.add_argument(
        "--device", default="cpu", help="the device of the model: cpu, cuda, cuda:1 (default: %(default)s)"
    )
    add_layouts(parser)
    workers.add_arguments(parser)


def _run(options: argparse.Namespace) -> None:
    from captum_norm.commands.terminal import Terminal

    console = Terminal()
    if options.status:
        if options.out is None:
            raise InvalidInputError("got --status, but no --out; name the folder of the run")
        console.say(workers.status_of(f"{options.out}/{options.analysis}"))
        return

    from captum_norm.lab.analysis.engine import analyze
    from captum_norm.loading import load, on_device
    from captum_norm.show import write_report

    backend, device = workers.backend_of(options), workers.device_of(options)
    declare_layouts(options)
    if options.out is not None:
        Journal(f"{options.out}/{options.analysis}", {}).check()
    written: list[str] = []

    def save(result: "AnalysisResult") -> None:
        if options.out is None:
            return
        try:
            with local_folder(options.out) as folder:
                written.extend(path.name for path in write_report(result, folder))
        except OSError as error:
            raise InvalidInputError(f"cannot write into {options.out}: {error.strerror or error}") from error

    with _corpus(options, backend) as corpus, progress(terminal_only=True):
        model, tokenizer = load(options.model)
        result = analyze(
            options.analysis,
            # Workers take the model to their devices; this process may have none.
            on_device(model, device) if backend == "local" else model,
            tokenizer,
            corpus,
            out=options.out,
            seed=options.seed,
            mask_rate=options.mask_rate,
            max_length=options.max_length,
            batch_tokens=options.batch_tokens,
            frequencies=options.frequencies,
            tokens=options.tokens,
            restart=options.restart,
            backend=backend,
            device=device,
            log=options.log,
            model_name=options.model,
            command=" ".join(["captum-norm", *sys.argv[1:]]),
            save=save,
            report=Terminal(stderr=True).say,
        )
    show(result, console)
    if options.out is not None:
        console.say(f"wrote {len(written)} files into {options.out}")


def show(result: "AnalysisResult", console: "Terminal") -> None:
    """Print the description of a result and its tables, except long ones."""
    about, corpus = result.metadata, result.metadata["corpus"]
    read = f"{corpus['texts']:,} text{'s' * (corpus['texts'] != 1)} of {corpus['name']}, {corpus['tokens']:,} tokens"
    left_out = f"; {corpus['set_aside']:,} texts were set aside" if "set_aside" in corpus else ""
    console.say(f"{result.analysis}: {about['model']}, {read}{left_out}")
    console.print(result.description, "", sep="\n")
    for table in result.tables:
        if len(table.rows) <= _SHOWN_ROWS:
            console.print(_drawn(table), "")
        else:
            console.print(f"{table.title}: {len(table.rows)} rows\n")


def _drawn(table: "Table") -> Any:
    from rich.table import Table as DrawnTable

    drawn = DrawnTable(title=table.title, title_justify="left", box=None)
    for index, column in enumerate(table.columns):
        words = any(isinstance(row[index], str) for row in table.rows)
        drawn.add_column(column.label, justify="left" if words else "right")
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    return drawn


def _cell(cell: object) -> str:
    return "–" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell)


@contextmanager
def _corpus(options: argparse.Namespace, backend: Backend) -> Iterator[Any]:
    """The corpus; standard input is copied to a temporary file."""
    from captum_norm.lab.analysis.corpus import SAMPLE, Corpus

    unit: Any = "documents" if options.documents else "lines"
    if options.corpus != "-":
        yield Corpus(SAMPLE if options.corpus is None else options.corpus, unit, options.limit)
        return
    if backend != "local":
        raise InvalidInputError("got standard input and several workers; give a file or a URL")
    with TemporaryDirectory(prefix="captum-norm-") as folder:
        path = Path(folder) / "text"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield Corpus(path, unit, options.limit, "standard input")


COMMAND = Command("analyze", "repeat the papers' experiments on a model and a corpus", _add_arguments, _run)
