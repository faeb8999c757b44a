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
    r"""The words of a tokenised sentence: what stands between spaces and tabs.

    Other white space, such as the no-break space of French, stays inside its word, as in the tools that made the gold
    alignments; ``str.split`` would shift every index after one.

    >>> split_words("15 h  , 1\u00a0000 francs")
    ['15', 'h', ',', '1\xa0000', 'francs']
    """
    return [word for word in sentence.replace("\t", " ").split(" ") if word]


def write_text(path: str | PathLike[str], parts: Iterable[bytes]) -> None:
    """Write a text, given in parts, at once or not at all; ``.gz`` and ``.xz`` are compressed."""
    suffix = Path(path).resolve().suffix
    with ExitStack() as stack:
        stream: BufferedIOBase
        stream = file = stack.enter_context(whole_file(path))
        if suffix == ".gz":
            # Neither name nor time in the header: the same lines give the same bytes.
            stream = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        elif suffix == ".xz":
            stream = stack.enter_context(lzma.open(file, "wb"))
        stream.writelines(parts)
