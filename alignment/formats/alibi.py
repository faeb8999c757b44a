"""Reads files with a sentence id on each line, ``id TAB text``, as in AlibiWordAlignments."""

from itertools import zip_longest

from captum_norm import InvalidInputError
from captum_norm.text.lines import TextSource, error_at, located, quoted, read_lines, source_name


def read_identified(*sources: TextSource) -> list[tuple[str, ...]]:
    r"""Read files with the same ids: a tuple for each id, with the text from each file.

    Args:
        sources: the files, such as sentences in two languages, and links; each a path (``.gz``, ``.xz`` and ``.bz2``
            are decompressed) or open stream.

    Raises:
        InvalidInputError: a line has no id or no tab, an id is repeated in a file, or the ids or their order differ
            from the first file's; file and line are named.

    >>> import io
    >>> read_identified(io.StringIO("a\tdas Haus\nb\tja\n"), io.StringIO("a\tthe house\nb\tyes\n"))
    [('das Haus', 'the house'), ('ja', 'yes')]
    """
    files = [_read_file(source) for source in sources]
    for source, texts in zip(sources[1:], files[1:], strict=True):
        for number, (name, expected) in enumerate(zip_longest(texts, files[0]), 1):
            if name != expected:
                found, wanted = (
                    "the end" if one is None else f"the sentence id {quoted(one)}" for one in (name, expected)
                )
                raise error_at(source, number, f"got {found}, expected {wanted}, as in {source_name(sources[0])}")
    return list(zip(*(texts.values() for texts in files), strict=True))


def _read_file(source: TextSource) -> dict[str, str]:
    texts: dict[str, str] = {}
    for number, line in read_lines(source):
        with located(source, number):
            name, tab, text = line.partition("\t")
            if not (name and tab):
                raise InvalidInputError(f"got {quoted(line)}, expected a sentence id, a tab and the text")
            if name in texts:
                raise InvalidInputError(f"got the sentence id {quoted(name)} again, expected each once")
            texts[name] = text
    return texts
