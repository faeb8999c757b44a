"""Checks the output files of a command before the work, and writes them afterwards."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from captum_norm.errors import InvalidInputError
from captum_norm.text.files import check_file, check_folder, check_writable, is_url, place_of, write_whole
from captum_norm.text.lines import named


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
        _check_suffix(name, known)
        with _one_sentence(name):
            check_file(path)
            check_writable(path.parent)
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
    with _one_sentence(name):
        check_folder(path)
        check_writable(path if path.exists() else path.parent)
    return path


def output_folder_or_url(name: str) -> Path | str:
    """Parse a folder to write into, see :func:`output_folder`, or its URL.

    Raises:
        argparse.ArgumentTypeError: it is a file, or the file system cannot be reached.
    """
    if not is_url(name):
        return output_folder(name)
    with _one_sentence(name):
        check_folder(name)
    return name


def output_path_or_url(suffixes: Iterable[str]) -> Callable[[str], Path | str]:
    """Return an ``argparse`` type for a file with one of the suffixes, see :func:`output_path`, or its URL."""
    known = tuple(suffixes)

    def parse(name: str) -> Path | str:
        if not is_url(name):
            return output_path(known)(name)
        _check_suffix(name, known)
        with _one_sentence(name):
            check_file(name)
        return name

    return parse


def _check_suffix(name: str, known: Sequence[str]) -> None:
    if Path(name).suffix.lower() not in known:
        raise argparse.ArgumentTypeError(f"cannot write {named(name)}: the name must end in one of {', '.join(known)}")


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Convert errors for ``argparse``."""
    try:
        yield
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {named(name)}: {error.strerror}") from error


@contextmanager
def local_folder(out: Path | str) -> Iterator[Path]:
    """A folder to write into; for a URL, a temporary one whose files are copied there at the end of the context.

    Raises:
        OSError: the files cannot be copied.
    """
    if isinstance(out, Path):
        yield out
        return
    with TemporaryDirectory(prefix="captum-norm-") as name:
        yield Path(name)
        for path in sorted(Path(name).iterdir()):
            (place_of(out) / path.name).write(path.read_bytes())


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
