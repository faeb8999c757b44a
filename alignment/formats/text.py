"""Splits lines into words, and writes files whole or not at all."""

import gzip
import lzma
import os
from collections.abc import Iterable
from contextlib import ExitStack
from io import BufferedIOBase
from os import PathLike
from pathlib import Path


def split_words(sentence: str) -> list[str]:
    r"""The words of a tokenised sentence: what stands between spaces and tabs.

    Other white space, such as the no-break space of French, stays inside its word, as in the tools that made the gold
    alignments; ``str.split`` would shift every index after one.

    >>> split_words("15 h  , 1\u00a0000 francs")
    ['15', 'h', ',', '1\xa0000', 'francs']
    """
    return [word for word in sentence.replace("\t", " ").split(" ") if word]


def write_lines(path: str | PathLike[str], lines: Iterable[str]) -> None:
    """Write a text at once or not at all; ``.gz`` and ``.xz`` are compressed.

    The lines go to a temporary file in the same directory, which takes the place of ``path`` when it is complete.
    """
    # A link stays a link: it is the file behind it that is replaced.
    final = Path(path).resolve()
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as raw, ExitStack() as stack:
            stream: BufferedIOBase = raw
            if final.suffix == ".gz":
                # Neither name nor time in the header: the same lines give the same bytes.
                stream = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            elif final.suffix == ".xz":
                stream = stack.enter_context(lzma.open(raw, "wb"))
            stream.writelines(line.encode() + b"\n" for line in lines)
            stack.close()
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
