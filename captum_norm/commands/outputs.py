"""Checks the output files of a command before the work, and writes them afterwards."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from captum_norm.errors import InvalidInputError
from captum_norm.files import check_file, check_folder, check_writable, write_whole
from captum_norm.texts import named


def add_reports(parser: argparse.ArgumentParser, suffixes: Iterable[str]) -> None:
    """Declare ``--out`` for files with these suffixes."""
    *others, last = suffixes
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        type=output_path([*others, last]),
        metavar="FILE",
        help=f"also write a {', '.join(others)} or {last} file; may be given several times",
    )


def output_path(suffixes: Iterable[str]) -> Callable[[str], Path]:
    """Return an ``argparse`` type for a writable file with one of the suffixes."""
    known = tuple(suffixes)

    def parse(name: str) -> Path:
        path = Path(name)
        if path.suffix.lower() not in known:
            raise argparse.ArgumentTypeError(
                f"cannot write {named(name)}: the name must end in one of {', '.join(known)}"
            )
        try:
            check_file(path)
            check_writable(path.parent)
        except InvalidInputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return path

    return parse


def output_folder(name: str) -> Path:
    """Parse a folder to write into, for ``argparse``; it exists, or its parent does.

    Raises:
        argparse.ArgumentTypeError: it is a file, its parent does not exist, or it is not writable.
    """
    if not name:
        raise argparse.ArgumentTypeError("cannot write into a folder without a name")
    path = Path(name)
    try:
        check_folder(path)
        check_writable(path if path.exists() else path.parent)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def write_outputs(contents: Mapping[Path, bytes]) -> None:
    """Write files, each atomically.

    Raises:
        InvalidInputError: a file cannot be written.
    """
    for path, content in contents.items():
        try:
            write_whole(path, content)
        except OSError as error:
            raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error
