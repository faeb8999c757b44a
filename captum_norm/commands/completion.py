"""Prints the script with which a shell completes a command line."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

SHELLS = ("bash", "zsh")


class CompletionAction(argparse.Action):
    """Prints the completion script of the parser for a shell, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, choices=SHELLS, default=argparse.SUPPRESS, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Print the script and exit."""
        import shtab

        for action in _actions(parser):
            kind: Any = action
            if "FILE" in str(action.metavar) or "PATH" in str(action.metavar):
                kind.complete = shtab.FILE
            elif "FOLDER" in str(action.metavar) or "DIR" in str(action.metavar):
                kind.complete = shtab.DIRECTORY
        sys.stdout.write(shtab.complete(parser, shell=str(values)))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
