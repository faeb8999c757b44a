"""Files that a command is asked to write: checked before the work, written when all of them are drawn."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from captum_norm.errors import InvalidInputError


def output_path(suffixes: Iterable[str]) -> Callable[[str], Path]:
    """An ``argparse`` type: a file with one of the suffixes in a folder that exists."""
    known = tuple(suffixes)

    def parse(name: str) -> Path:
        path = Path(name)
        if path.suffix.lower() not in known:
            raise argparse.ArgumentTypeError(f"cannot write {name}: the name must end in one of {', '.join(known)}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"cannot write {name}: there is no folder {path.parent}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"cannot write {name}: it is a folder")
        return path

    return parse


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
