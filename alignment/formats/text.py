"""Splits lines into words, and writes files of lines, compressed or not."""

import gzip
import lzma
from collections.abc import Iterable
from contextlib import ExitStack
from io import BufferedIOBase
from os import PathLike
from pathlib import Path

from captum_norm.files import whole_file


def split_words(sentence: str) -> list[str]:
    r"""Split a tokenised sentence into words at spaces and tabs.

    Other white space, such as the French no-break space, stays inside its word, as in the tools behind the gold
    alignments; ``str.split`` would shift the indices of all words after it.

    >>> split_words("15 h  , 1\u00a0000 francs")
    ['15', 'h', ',', '1\xa0000', 'francs']
    """
    return [word for word in sentence.replace("\t", " ").split(" ") if word]


def write_text(path: str | PathLike[str], parts: Iterable[bytes]) -> None:
    """Write the parts of a text to a file, all or nothing; ``.gz`` and ``.xz`` are compressed."""
    suffix = Path(path).resolve().suffix
    with ExitStack() as stack:
        stream: BufferedIOBase
        stream = file = stack.enter_context(whole_file(path))
        if suffix == ".gz":
            # No name or time in the header: equal lines give equal bytes.
            stream = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        elif suffix == ".xz":
            stream = stack.enter_context(lzma.open(file, "wb"))
        stream.writelines(parts)
