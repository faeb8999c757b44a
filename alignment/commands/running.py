"""Declares the options shared by the commands that process text of any size, and sets up their runs."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

from alignment.formats import TextSource
from captum_norm.bars import to_stderr
from captum_norm.commands.numbers import positive, whole_number
from captum_norm.text.lines import is_regular_file

PAUSE = 0.05
"""Seconds without a new line after which the lines of a stream are processed."""

_MOST_THREADS = 1024  # torch kills the process if the system cannot start so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a run."""
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--max-words",
        type=positive,
        default=256,
        metavar="N",
        help="lines with more words on a side are bad (default: %(default)s)",
    )
    group.add_argument(
        "--bad-lines",
        choices=("empty", "stop"),
        default="empty",
        help="what to do about an unusable line: write an empty line and a message with its number, or stop "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="the largest batch, in pieces, padding included (default: %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=whole_number(f"a number from 1 to {_MOST_THREADS}", accepts=lambda number: 0 < number <= _MOST_THREADS),
        metavar="N",
        help="CPU threads (default: torch's choice)",
    )
    group.add_argument("--quiet", action="store_true", help="write only errors to standard error")


@contextmanager
def set_up(options: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Set the number of threads for the run; yield the function that prints messages."""
    import torch

    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        yield (lambda _: None) if options.quiet else to_stderr
    finally:
        torch.set_num_threads(threads)


def report_waiting(report: Callable[[str], None], options: argparse.Namespace) -> None:
    """Say that the lines of a stream wait until layers and heads are chosen."""
    flags = "--layer, --head and --reverse-head" if "reverse_head" in options else "--layer and --head"
    report(
        f"layer and head are chosen on the first lines, which are waited for; give {flags} to answer each line as it "
        "comes"
    )


def text_source(name: str) -> TextSource:
    """A source for the readers of :mod:`alignment.formats`; ``-`` is standard input.

    Raises:
        InvalidInputError: the file does not exist.
    """
    if name == "-":
        return sys.stdin.buffer
    is_regular_file(name)
    return name


def print_whole(parts: Iterable[bytes]) -> None:
    """Print all parts of a text, or none if one of them cannot be computed."""
    with TemporaryFile() as kept:
        kept.writelines(parts)
        kept.seek(0)
        shutil.copyfileobj(kept, sys.stdout.buffer)
