"""Splits lines into words, and writes files of lines, compressed or not."""

import bz2
import gzip
import lzma
from collections.abc import Iterable
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from captum_norm.text.files import whole_file
from captum_norm.text.lines import suffix_of


def split_words(sentence: str) -> list[str]:
    r"""Split a tokenised sentence into words at spaces and tabs.

    Other white space, such as the French no-break space, stays inside its word, as in the tools behind the gold
    alignments; ``str.split`` would shift the indices of all words after it.

    >>> split_words("15 h  , 1\u00a0000 francs")
    ['15', 'h', ',', '1\xa0000', 'francs']
    """
    return [word for word in sentence.replace("\t", " ").split(" ") if word]


def write_text(path: str | PathLike[str], parts: Iterable[bytes]) -> None:
    """Write the parts of a text to a file, all or nothing; ``.gz``, ``.xz`` and ``.bz2`` are compressed."""
    with whole_file(path) as file:
        write_parts(file, suffix_of(Path(path).resolve()), parts)


def write_parts(file: BinaryIO, suffix: str, parts: Iterable[bytes]) -> None:
    """Write the parts of a text to an open file, compressed as its suffix says."""
    with ExitStack() as stack:
        stream: BinaryIO | gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File = file
        if suffix == ".gz":
            # No name or time in the header: equal lines give equal bytes.
            stream = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        elif suffix == ".xz":
            stream = stack.enter_context(lzma.open(file, "wb"))
        elif suffix == ".bz2":
            stream = stack.enter_context(bz2.open(file, "wb"))
        for part in parts:
            stream.write(part)
