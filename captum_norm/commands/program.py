"""Runs a command line made of subcommands, as ``captum-norm`` and ``norm-align`` are."""

import argparse
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never

from captum_norm.characters import spelled_lines, spelled_out
from captum_norm.commands.command import Command
from captum_norm.errors import CaptumNormError, InvalidInputError, MissingGlyphsWarning
from captum_norm.versions import __version__

_LONGEST_COMPLAINT = 1000
_READER_GONE = 1
_BAD_INPUT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is that of every other bad input."""

    def error(self, message: str) -> Never:
        raise InvalidInputError(message if len(message) <= _LONGEST_COMPLAINT else f"{message[:_LONGEST_COMPLAINT]} …")


@dataclass(frozen=True)
class Program:
    """A command line made of subcommands.

    Attributes:
        name: what the shell calls it.
        description: one sentence for ``--help``.
        commands: the subcommands, in the order of ``--help``.
    """

    name: str
    description: str
    commands: Sequence[Command]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line.

        Args:
            argv: the arguments, without the program's name; those of the process if None.

        Returns:
            The exit code: 0; 2 for bad input and for what the system refuses, such as a write to a full disk, which has
            then been named in one sentence on standard error; 1 if who reads standard output left before the end, as
            ``head`` does; 130 after Ctrl-C.

        Raises:
            SystemExit: after ``--help`` and ``--version`` (0).

        Example:
            >>> Program("trial", "Nothing yet.", ()).main(["--no-such-option"])
            2
        """
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may not know every token's characters
        try:
            try:
                options = self._parser().parse_args(argv)
                with self._warnings_told():
                    options.run(options)
            finally:
                sys.stdout.flush()
        except CaptumNormError as error:
            self._complain("error", str(error))
            return _BAD_INPUT
        except BrokenPipeError:
            _drop_output()
            return _READER_GONE
        except OSError as error:
            if error.errno is None:
                raise  # what the system refuses is the user's to mend, all else is ours
            if error.filename is None:
                _drop_output()
            done = "write" if error.errno in _FULL else "read or write"
            what = "" if error.filename is None else f" {error.filename}"
            self._complain("error", f"cannot {done}{what}: {error.strerror}")
            return _BAD_INPUT
        except KeyboardInterrupt:
            return _INTERRUPTED
        return 0

    @contextmanager
    def _warnings_told(self) -> Iterator[None]:
        """Tell of missing glyphs in a sentence, not with the line of code that Python's own way adds."""
        with warnings.catch_warnings():
            show = warnings.showwarning

            def tell(message: Warning | str, category: type[Warning], *where: Any, **further: Any) -> None:
                if issubclass(category, MissingGlyphsWarning):
                    self._complain("warning", str(message))
                else:
                    show(spelled_lines(str(message)), category, *where, **further)

            warnings.simplefilter("always", MissingGlyphsWarning)
            warnings.showwarning = tell
            yield

    def _complain(self, kind: str, message: str) -> None:
        """One line on standard error."""
        sys.stderr.write(f"{self.name}: {kind}: {spelled_out(' '.join(message.split()))}\n")

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=self.name, description=self.description)
        parser.add_argument("--version", action="version", version=f"{self.name} {__version__}")
        commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for command in self.commands:
            description = f"{command.help[0].upper()}{command.help[1:]}."
            subparser = commands.add_parser(command.name, help=command.help, description=description)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
        return parser


def _drop_output() -> None:
    """Forget what standard output still holds: it would fail once more when Python flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
