"""Defines what a subcommand is."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: the word after the program's name.
        help: one line for the list of commands.
        add_arguments: declares the command's arguments on its parser.
        run: does the work; prints to standard output. What it raises of
            :class:`captum_norm.errors.CaptumNormError` becomes one sentence and exit code 2.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
