"""A subcommand of a command line."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: its name on the command line.
        help: a line for the list of commands.
        add_arguments: declares the command's arguments on its parser.
        run: runs the command, which prints to standard output. A :class:`captum_norm.errors.CaptumNormError` becomes
            one sentence and exit code 2.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
