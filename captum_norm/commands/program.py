"""Runs a command line with subcommands, such as ``captum-norm`` and ``norm-align``."""

import argparse
import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never

from captum_norm.commands.command import Command
from captum_norm.commands.completion import SHELLS, CompletionAction
from captum_norm.errors import CaptumNormError, InvalidInputError, MissingGlyphsWarning
from captum_norm.text.characters import spelled_lines, spelled_out
from captum_norm.versions import __version__

_LONGEST_MESSAGE = 1000
_READER_GONE = 1
_BAD_INPUT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = 130
# torch's on behalf of torchao, which transformers imports if it is installed.
_TALKATIVE = ("bitsandbytes", "torch.utils._pytree", "torchao")


class _Parser(argparse.ArgumentParser):
    """A parser that raises InvalidInputError."""

    def error(self, message: str) -> Never:
        raise InvalidInputError(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} …")


@dataclass(frozen=True)
class Program:
    """A command line with subcommands.

    Attributes:
        name: its name in the shell.
        description: a sentence for ``--help``.
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
            The exit code: 0; 2 for bad input and system errors, such as a full disk, after one sentence on standard
            error; 1 if the reader of standard output stops early, as ``head`` does; 130 after Ctrl-C.

        Raises:
            SystemExit: after ``--help``, ``--version`` and ``--completion`` (0).

        Example:
            >>> Program("trial", "Nothing yet.", ()).main(["--no-such-option"])
            2
        """
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may not support all characters
        try:
            try:
                options = self._parser().parse_args(argv)
                with self._warnings_printed(), _libraries_quiet():
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
                raise  # not an error of the system, but a bug
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
    def _warnings_printed(self) -> Iterator[None]:
        """Print warnings of missing glyphs as a sentence, without the line of code that Python adds."""
        with warnings.catch_warnings():
            show = warnings.showwarning

            def print_warning(message: Warning | str, category: type[Warning], *where: Any, **further: Any) -> None:
                if issubclass(category, MissingGlyphsWarning):
                    self._complain("warning", str(message))
                else:
                    show(spelled_lines(str(message)), category, *where, **further)

            warnings.simplefilter("always", MissingGlyphsWarning)
            warnings.showwarning = print_warning
            yield

    def _complain(self, kind: str, message: str) -> None:
        """Print one line to standard error."""
        sys.stderr.write(f"{self.name}: {kind}: {spelled_out(' '.join(message.split()))}\n")

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=self.name, description=self.description)
        parser.add_argument("--version", action="version", version=f"{self.name} {__version__}")
        parser.add_argument(
            "--completion",
            action=CompletionAction,
            metavar="|".join(SHELLS),
            help=f'print what makes a shell complete this command: eval "$({self.name} --completion bash)"',
        )
        commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for command in self.commands:
            description = f"{command.help[0].upper()}{command.help[1:]}."
            subparser = commands.add_parser(command.name, help=command.help, description=description)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
        return parser


@contextmanager
def _libraries_quiet() -> Iterator[None]:
    """Print only errors of libraries that log each kernel which is not for this machine, and each rounding."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _drop_output() -> None:
    """Discard buffered output, which Python would fail to flush again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
