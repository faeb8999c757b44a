"""The command line, ``captum-norm``.

A new subcommand is one file in :mod:`captum_norm.commands` and one entry in :data:`COMMANDS`.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from typing import Never

from captum_norm import __version__
from captum_norm.commands import demo, explain
from captum_norm.errors import CaptumNormError

COMMANDS = (explain.COMMAND, demo.COMMAND)

_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one sentence."""

    def error(self, message: str) -> Never:
        _complain(message)
        sys.exit(_BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; those of the process if None.

    Returns:
        The exit code: 0, or 2 for bad input, which has then been named in one sentence on standard error.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (0), and for arguments that do not parse (2).

    Example:
        >>> main(["explain", ""])
        2
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every token's characters
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except CaptumNormError as error:
        _complain(str(error))
        return _BAD_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="captum-norm", description="Explain Transformers by the norms of the vectors they add up.")
    parser.add_argument("--version", action="version", version=f"captum-norm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=f"{command.help}.".capitalize())
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _complain(message: str) -> None:
    sys.stderr.write(f"captum-norm: error: {' '.join(message.split())}\n")
