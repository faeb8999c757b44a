"""Files that a command is asked to read; ``-`` is standard input."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from alignment.formats import TextSource
from captum_norm import InvalidInputError


@contextmanager
def source(name: str) -> Iterator[TextSource]:
    """What the readers of :mod:`alignment.formats` take; to be read within the context.

    Raises:
        InvalidInputError: the system does not let the file be read.
    """
    try:
        yield sys.stdin.buffer if name == "-" else name
    except OSError as error:
        raise InvalidInputError(f"cannot read {name}: {error.strerror or error}") from error
