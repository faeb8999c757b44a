"""Checks the files that a command is asked to write before the work, and writes them after it."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

from captum_norm.errors import InvalidInputError
from captum_norm.runs import check_folder
from captum_norm.texts import named


def output_path(suffixes: Iterable[str]) -> Callable[[str], Path]:
    """An ``argparse`` type: a file with one of the suffixes in a folder that exists."""
    known = tuple(suffixes)

    def parse(name: str) -> Path:
        path = Path(name)
        if path.suffix.lower() not in known:
            raise argparse.ArgumentTypeError(
                f"cannot write {named(name)}: the name must end in one of {', '.join(known)}"
            )
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"cannot write {name}: there is no folder {path.parent}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"cannot write {name}: it is a folder")
        try:
            check_writable(path.parent)
        except InvalidInputError as error:
            raise argparse.ArgumentTypeError(f"cannot write {name}: {error}") from error
        return path

    return parse


def output_folder(name: str) -> Path:
    """An ``argparse`` type: a folder to write into, there already or to be made in one that is.

    Raises:
        argparse.ArgumentTypeError: it is a file, there is no folder to make it in, or nothing can be written there.
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


def check_writable(folder: Path) -> None:
    """Find out whether files can be made in a folder; nothing stays there.

    Raises:
        InvalidInputError: they cannot.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(f"the folder {folder} cannot be written to ({error.strerror})") from error


def write_outputs(contents: Mapping[Path, bytes]) -> None:
    """Write files, each whole or not at all.

    Raises:
        InvalidInputError: a file cannot be written.
    """
    from captum_norm.visualization.files import write_whole

    for path, content in contents.items():
        try:
            write_whole(path, content)
        except OSError as error:
            raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error
