"""Shares what the commands need that work through text of any size."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alignment.formats import TextSource
from alignment.pipeline.progress import to_stderr
from captum_norm.commands.numbers import positive, whole_number
from captum_norm.texts import is_regular_file

_MOST_THREADS = 1024  # torch ends the process where the system cannot start so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares options on how the command goes about its work."""
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--max-words",
        type=positive,
        default=256,
        metavar="N",
        help="more words on a side make a line bad (default: %(default)s)",
    )
    group.add_argument(
        "--bad-lines",
        choices=("empty", "stop"),
        default="empty",
        help="what becomes of a line that cannot be used: an empty line, and a message with its number; or the end of "
        "the run (default: %(default)s)",
    )
    group.add_argument(
        "--max-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="how large a batch may be, in pieces, padding included (default: %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=whole_number(f"a number from 1 to {_MOST_THREADS}", accepts=lambda number: 0 < number <= _MOST_THREADS),
        metavar="N",
        help="processor threads (default: torch's choice)",
    )
    group.add_argument("--quiet", action="store_true", help="write nothing to standard error but errors")


@contextmanager
def set_up(options: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Runs with the threads that are asked for, and hands over what to tell the user through."""
    import torch

    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        yield (lambda _: None) if options.quiet else to_stderr
    finally:
        torch.set_num_threads(threads)


def text_source(name: str) -> TextSource:
    """What the readers of :mod:`alignment.formats` take; ``-`` is standard input.

    Raises:
        InvalidInputError: there is no such file.
    """
    if name == "-":
        return sys.stdin.buffer
    is_regular_file(name)
    return name
