"""Declares the options of commands as dataclasses, parses a command line, and runs its command.

``argparse`` does the parsing: tyro and jsonargparse, which also read signatures, take longer to import than ``--help``
takes, and neither says what is wrong in one sentence.
"""

import argparse
import dataclasses
import errno
import inspect
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Never, get_args, get_origin, get_type_hints

from captum_norm.checks import did_you_mean, quoted_name
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.loading.files import logging_at
from captum_norm.text.characters import spelled_lines, spelled_out
from captum_norm.versions import __version__

__all__ = ["Command", "Options", "Program", "argument", "option"]

_LONGEST_MESSAGE = 1000
_READER_GONE = 1
_BAD_INPUT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = 130
# Libraries that log each kernel which is not for this machine, and each rounding; torch's on behalf of torchao, which
# transformers imports if it is installed.
_TALKATIVE = ("bitsandbytes", "torch.utils._pytree", "torchao")
# From the first semicolon to the default, if it is told.
_SHORTENED = re.compile(r"; .*?( \(default: .*)?$")


class Options:
    """Options of a command, one for each field of a dataclass; a class with a title is a group of ``--help``."""

    title: ClassVar[str | None] = None

    def __init_subclass__(cls, title: str | None = None) -> None:
        cls.title = title


def option(
    explanation: str,
    default: Any = None,
    *,
    exclusive: bool = False,
    positional: bool = False,
    parse: Callable[[str], Any] | None = None,
    **settings: Any,
) -> Any:
    """Declare an option as a field of a dataclass, whose type says how it is given; ``settings`` are for argparse."""
    # A bool is given by its name alone, bool | None by its name or --no-NAME, a Literal as one of its values, a list by
    # several options, anything else by its text.
    if not (default is None or default is False or default == [] or "(default" in explanation):
        explanation += " (default: %(default)s)"
    settings = {"help": explanation, **settings} | ({} if parse is None else {"type": _argument_type(parse)})
    metadata = {"settings": settings, "positional": positional, "exclusive": exclusive}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a parser one of ``argparse``, which tells its own errors from others."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except InvalidInputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def argument(explanation: str, default: Any = None, **settings: Any) -> Any:
    """Declare an argument without a name as a field of a dataclass; see :func:`option`."""
    return option(explanation, default, positional=True, **settings)


def add_options(parser: argparse.ArgumentParser, options: type[Options], common: Sequence[str] | None = None) -> None:
    """Declare the options of a class and its bases, or arguments without a name and the ``common`` ones in order."""
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    types = get_type_hints(options)
    if common is not None:
        arguments = [name for name, field in fields.items() if field.metadata["positional"]]
        _declare(parser, {name: fields[name] for name in (*arguments, *common)}, types, short=True)
        return
    groups: dict[str | None, Any] = {None: parser}
    for declaring in options.__mro__:
        names = [name for name in inspect.get_annotations(declaring) if name in fields]
        title = getattr(declaring, "title", None)
        if names and title not in groups:
            groups[title] = parser.add_argument_group(title)
        _declare(groups.get(title), {name: fields.pop(name) for name in names}, types)


def _declare(group: Any, fields: Mapping[str, Any], types: Mapping[str, Any], *, short: bool = False) -> None:
    """Declare fields as options of a parser or one of its groups."""
    alternatives: Any = None
    for name, field in fields.items():
        if field.metadata["exclusive"]:
            alternatives = alternatives or group.add_mutually_exclusive_group()
        settings = _type_settings(types[name]) | field.metadata["settings"]
        settings["default"] = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if short:
            settings["help"] = _SHORTENED.sub(r"\1", settings["help"])
        if field.metadata["positional"]:
            settings.pop("action", None)  # a list has several words
            group.add_argument(name, **settings)
        else:
            flag = f"--{name.replace('_', '-')}"
            (alternatives if field.metadata["exclusive"] else group).add_argument(flag, dest=name, **settings)


def _type_settings(kind: Any) -> dict[str, Any]:
    """The arguments of ``argparse`` for the type of a field."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    optional = type(None) in get_args(kind)
    kind = parts[0] if optional else kind
    if get_origin(kind) is list:
        return _type_settings(get_args(kind)[0]) | {"action": "append"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if optional else "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "type": type(get_args(kind)[0])}
    return {"type": _argument_type(_integer) if kind is int else kind}


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(f"got {quoted_name(text)}; expected a whole number, such as 0 or -1") from error


@dataclass(frozen=True)
class Command:
    """A subcommand; ``run`` returns its exit code or None, a CaptumNormError becomes one sentence and exit code 2."""

    name: str
    help: str
    options: type[Options]
    run: Callable[[Any], int | None]
    example: str = ""
    common: Sequence[str] | None = None  # what --help shows, up to its first semicolon; --help-all shows all by group

    def declare(self, parser: argparse.ArgumentParser, *, short: bool) -> None:
        """Declare all options on a parser, or with ``short`` the common ones; its usage names no option."""
        fields = dataclasses.fields(self.options)  # type: ignore[arg-type]
        arguments = [field.metadata["settings"] for field in fields if field.metadata["positional"]]
        parser.usage = " ".join(["%(prog)s", *map(_argument_name, arguments), "[options]"])
        parser.description = f"{self.help[0].upper()}{self.help[1:]}."
        parser.epilog = self.example and f"example:\n  $ {self.example}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        for flags, explanation in ((("-h", "--help"), "show common options"), (("--help-all",), "show all options")):
            parser.add_argument(*flags, action=_Help, const=self, help=explanation)
        add_options(parser, self.options, self.common if short else None)


def _argument_name(settings: Mapping[str, Any]) -> str:
    """An argument without a name as usage shows it."""
    name: str = settings["metavar"]
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(settings.get("nargs", ""), name)


class _Help(argparse.Action):
    """Prints the help of the command ``const``, by a parser that is made only now, and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        del dest
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, **settings)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        del namespace, values
        shown = _Parser(prog=parser.prog, add_help=False)
        self.const.declare(shown, short=option_string != "--help-all")
        shown.print_help()
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser that raises InvalidInputError, and knows what a misspelt name may mean."""

    def error(self, message: str) -> Never:
        raise InvalidInputError(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} …")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, action.choices or ())
            raise


@dataclass(frozen=True)
class Program:
    """A command line with subcommands."""

    name: str
    description: str
    commands: Sequence[Command]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line; return its code, 2 for bad input, 1 if the output's reader left, 130 after Ctrl-C."""
        try:
            return self._run(argv)
        except KeyboardInterrupt:
            sys.stderr.write(f"{self.name}: interrupted\n")
            return _INTERRUPTED

    def _run(self, argv: Sequence[str] | None) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal may not support all characters, and Windows writes files in the encoding of its language.
            sys.stdout.reconfigure(encoding="utf-8" if os.name == "nt" else None, errors="replace")
        try:
            try:
                options = vars(self._parser().parse_args(argv))
                command = options.pop("command")
                with _warnings_spelled(), logging_at(logging.ERROR, *_TALKATIVE):
                    return command.run(command.options(**options)) or 0
            finally:
                sys.stdout.flush()
        except CaptumNormError as error:
            self._complain(str(error))
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
            self._complain(f"cannot {done}{what}: {error.strerror}")
            return _BAD_INPUT

    def _complain(self, message: str) -> None:
        """Print one line to standard error."""
        sys.stderr.write(f"{self.name}: error: {spelled_out(' '.join(message.split()))}\n")

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=self.name, description=self.description)
        parser.add_argument("--version", action="version", version=f"{self.name} {__version__}")
        commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for command in self.commands:
            subparser = commands.add_parser(command.name, help=command.help, add_help=False)
            command.declare(subparser, short=False)
            subparser.set_defaults(command=command)
        return parser


@contextmanager
def _warnings_spelled() -> Iterator[None]:
    """Spell out what controls the terminal in warnings."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = lambda message, *rest, **options: show(spelled_lines(str(message)), *rest, **options)
        yield


def _drop_output() -> None:
    """Discard buffered output, which Python would fail to flush again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
