"""Reads gold alignments with sure and possible links, in the formats of the public test sets.

talp
    One sentence pair a line, sure links as ``i-j``, possible ones as ``ipj``. Some files count from 0, some from 1.
naacl
    One link a line, ``sentence i j [S|P] [confidence]``: sure unless marked P, sentences and words counted from 1
    [Mihalcea & Pedersen 2003]. A link listed as both S and P is sure; a sentence without a line has no links.
alibi
    One sentence pair a line: its id, then links as in talp, counted from 0.
tsv
    One sentence pair a line: source, target and links as in talp, counted from 0, separated by tabs
    [Martelli et al. 2023].
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from alignment.formats.text import split_words
from alignment.links import Alignment, GoldAlignment, Link
from captum_norm import InvalidInputError
from captum_norm.text.lines import TextSource, error_at, quoted, scan_lines, source_name

GoldFormat = Literal["talp", "naacl", "alibi", "tsv"]
"""The format of a gold file; see ``read_gold``."""

_TALP_LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})(?::[01](?:\.[0-9]{1,9})?)?")  # a score is left out
_NAACL_LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,9})\s+([0-9]{1,9})(?:\s+([SP]))?(?:\s+[0-9.]+)?", re.ASCII)
_MOST_WITHOUT_LINE = 1_000_000
_NOTHING = GoldAlignment(Alignment())

_Report = Callable[[InvalidInputError], None]
Texts = Sequence[str | None]
"""Tokenised sentences, None for an unknown one."""


class GoldFile(NamedTuple):
    """The content of a file of gold alignments.

    Attributes:
        pairs: the gold alignment of each sentence pair, or the error that says why its line is invalid.
        sources: the source sentences, if they were given or are in the file.
        targets: the target sentences, if they were given or are in the file.
    """

    pairs: list[GoldAlignment | InvalidInputError]
    sources: Texts | None
    targets: Texts | None


class _RawLink(NamedTuple):
    """A link as written in the file: with its index base and order of sides."""

    line: int
    first: int
    second: int
    sure: bool


class _RawPair(NamedTuple):
    """The links of a sentence pair and, if the file has them, its two sentences, in the file's order of sides."""

    links: Sequence[_RawLink]
    texts: tuple[str, str] | None = None


_RawPairs = Sequence[_RawPair | InvalidInputError]
_Parse = Callable[[TextSource, int, int | None, _Report], _RawPairs]
"""Parses a file, given its base and the number of its sentences, if known."""


def parse_talp(line: str, *, base: Literal[0, 1] = 0) -> GoldAlignment:
    """Parse a line of sure (``i-j``) and possible (``ipj``) links.

    Args:
        line: the links, separated by white space.
        base: the index of the first word.

    Raises:
        InvalidInputError: a token is neither, or an index is smaller than ``base``.

    >>> parse_talp("1-1 2p1", base=1)
    GoldAlignment(sure=Alignment([(0, 0)]), possible=Alignment([(0, 0), (1, 0)]))
    """
    links = _talp_links(line.split(), 1, InvalidInputError, _refuse)
    return _gold([(_link(link, base), link.sure) for link in links])


def read_gold(
    path: TextSource,
    *,
    format: GoldFormat,  # noqa: A002 - the field's word for it
    base: Literal[0, 1] | None = None,
    swapped: bool = False,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> list[GoldAlignment]:
    r"""Read the gold alignments in a file, one for each sentence pair.

    Args:
        path: path (``.gz``, ``.xz`` and ``.bz2`` are decompressed) or open stream.
        format: ``"talp"`` (``i-j`` sure, ``ipj`` possible), ``"naacl"`` (``sentence i j [S|P] [confidence]``),
            ``"alibi"`` (sentence id, then talp links) or ``"tsv"`` (source TAB target TAB talp links).
        base: the index of the first word; None for 1 in naacl and 0 in alibi and tsv. talp files need it.
        swapped: whether links in the file are (target, source); those returned are always (source, target).
        sources: the tokenised source sentences, to check the indices and the number of sentences; words are separated
            as by ``split_words``. None for those in the file, if it has any.
        targets: the target sentences, likewise.

    Raises:
        InvalidInputError: a line is malformed, an index is out of range, the numbers of sentences differ, or ``base``
            is missing; file and line are named.

    >>> import io
    >>> read_gold(io.StringIO("1 1 1 S\n1 2 1 P\n"), format="naacl", sources=["das Haus"], targets=["house"])
    [GoldAlignment(sure=Alignment([(0, 0)]), possible=Alignment([(0, 0), (1, 0)]))]
    """
    found = scan_gold(path, format=format, base=base, swapped=swapped, sources=sources, targets=targets)
    return [pair for pair in found.pairs if not isinstance(pair, InvalidInputError)]  # it has raised those


def scan_gold(
    path: TextSource,
    *,
    format: GoldFormat,  # noqa: A002 - the field's word for it
    base: Literal[0, 1] | None = None,
    swapped: bool = False,
    sources: Texts | None = None,
    targets: Texts | None = None,
    on_error: _Report | None = None,
) -> GoldFile:
    """Like :func:`read_gold`, but can skip invalid links and lines.

    Args:
        path: see :func:`read_gold`, as for the other arguments but the last.
        format: see there.
        base: see there.
        swapped: see there.
        sources: see there.
        targets: see there.
        on_error: called with the error of each link that is malformed or out of range, which is left out; the error of
            an invalid line is in the result. None raises the errors instead.

    Raises:
        InvalidInputError: the file cannot be read, the numbers of sentences differ, or ``base`` is missing.
    """
    base, parse = _base_and_parser(path, format, base)
    given = (targets, sources) if swapped else (sources, targets)
    counts = [len(texts) for texts in given if texts is not None]
    sentences = parse(path, base, min(counts, default=None), on_error or _refuse)
    for sentence in sentences:
        if on_error is None and isinstance(sentence, InvalidInputError):
            raise sentence
    for side, texts in (("source", sources), ("target", targets)):
        if texts is not None and len(sentences) != len(texts):
            found = f"got {len(sentences)} alignments, expected {len(texts)}, as many as {side} sentences"
            raise InvalidInputError(f"{source_name(path)}: {found}; give the sentences that the file was made for")
    first, second = (_texts(sentences, side) if texts is None else texts for side, texts in enumerate(given))
    pairs = list[GoldAlignment | InvalidInputError]()
    for index, sentence in enumerate(sentences):
        if isinstance(sentence, InvalidInputError):
            pairs.append(sentence)
            continue
        lengths = [_length(texts, index) for texts in (first, second)]
        links = []
        for link in sentence.links:
            try:
                links.append((_link(link, base, swapped, lengths), link.sure))
            except InvalidInputError as error:
                (on_error or _refuse)(error_at(path, link.line, str(error)))
        pairs.append(_gold(links) if links else _NOTHING)
    return GoldFile(pairs, second, first) if swapped else GoldFile(pairs, first, second)


def _base_and_parser(
    path: TextSource,
    format: str,  # noqa: A002
    base: Literal[0, 1] | None,
) -> tuple[Literal[0, 1], _Parse]:
    if format not in _FORMATS:
        raise InvalidInputError(f"got format {quoted(format)}, expected one of {', '.join(_FORMATS)}")
    usual_base, parse = _FORMATS[format]
    base = usual_base if base is None else base
    if base is None:
        raise InvalidInputError(f"{source_name(path)}: {format} files count from 0 or from 1; give base=0 or base=1")
    return base, parse


def _texts(sentences: _RawPairs, side: int) -> Texts | None:
    """The sentences of one side, if they are in the file."""
    texts = [None if isinstance(sentence, InvalidInputError) else sentence.texts for sentence in sentences]
    return [text and text[side] for text in texts] if any(texts) else None


def _length(texts: Texts | None, index: int) -> int | None:
    text = None if texts is None else texts[index]
    return None if text is None else len(split_words(text))


def _gold(links: list[tuple[Link, bool]]) -> GoldAlignment:
    return GoldAlignment(Alignment([link for link, sure in links if sure]), Alignment([link for link, _ in links]))


def _link(raw: _RawLink, base: int, swapped: bool = False, lengths: Sequence[int | None] = (None, None)) -> Link:
    """The link with indices from 0, source first; checked against the sentences' lengths (None: unknown)."""
    sides = ("target", "source") if swapped else ("source", "target")
    for side, position, length in zip(sides, (raw.first, raw.second), lengths, strict=True):
        found = f"got {side} index {position}"
        if position < base:
            raise InvalidInputError(f"{found}, expected at least {base}; check base, and drop links to the null word")
        if length is not None and position >= base + length:
            expected = (
                f"{base} to {base + length - 1}, counted from {base}" if length else "none, since there is no word"
            )
            raise InvalidInputError(f"{found}, expected {expected}; check base, swapped and the sentences")
    link = (raw.first - base, raw.second - base)
    return link[::-1] if swapped else link


def _refuse(error: InvalidInputError) -> None:
    raise error


def _talp_links(
    tokens: Sequence[str], number: int, error: Callable[[str], InvalidInputError], on_error: _Report
) -> list[_RawLink]:
    """The links of a line, from its tokens; ``error`` makes an error about the line from a message."""
    links = []
    for token in tokens:
        match = _TALP_LINK.fullmatch(token)
        if match is None:
            on_error(error(f"got {quoted(token)}, expected i-j (sure) or ipj (possible)"))
        else:
            links.append(_RawLink(number, int(match[1]), int(match[3]), sure=match[2] == "-"))
    return links


_Split = Callable[[str, set[str]], tuple[list[str], tuple[str, str] | None]]


def _one_pair_per_line(split: _Split) -> _Parse:
    """A parser of files with a sentence pair a line; ``split`` separates links from sentences, and records ids."""

    def parse(path: TextSource, _: int, __: int | None, on_error: _Report) -> _RawPairs:
        sentences, ids = list[_RawPair | InvalidInputError](), set[str]()
        for number, line in scan_lines(path):
            if isinstance(line, InvalidInputError):
                sentences.append(line)
                continue
            try:
                tokens, texts = split(line, ids)
            except InvalidInputError as error:
                sentences.append(error_at(path, number, str(error)))
            else:
                links = _talp_links(tokens, number, partial(error_at, path, number), on_error)
                sentences.append(_RawPair(links, texts))
        return sentences

    return parse


def _split_talp(line: str, _: set[str]) -> tuple[list[str], None]:
    return line.split(), None


def _split_alibi(line: str, ids: set[str]) -> tuple[list[str], None]:
    name, *tokens = line.split() or [""]
    if not name or _TALP_LINK.fullmatch(name):
        raise InvalidInputError(f"got {quoted(name)}, expected a sentence id before the links; is this talp?")
    if name in ids:
        raise InvalidInputError(f"got the sentence id {quoted(name)} again, expected each once")
    ids.add(name)
    return tokens, None


def _split_tsv(line: str, _: set[str]) -> tuple[list[str], tuple[str, str]]:
    columns = line.split("\t")
    if len(columns) < 3 or any(columns[3:]):  # spreadsheets append empty columns
        raise InvalidInputError(f"got {len(columns)} columns, expected source TAB target TAB links")
    return columns[2].split(), (columns[0], columns[1])


def _parse_naacl(path: TextSource, base: int, count: int | None, on_error: _Report) -> _RawPairs:
    sentences: defaultdict[int, list[_RawLink]] = defaultdict(list)
    for number, line in scan_lines(path):
        try:
            if isinstance(line, InvalidInputError):
                raise line
            index, link = _naacl_link(number, line, base, count)
        except InvalidInputError as error:
            on_error(error if error is line else error_at(path, number, str(error)))
        else:
            sentences[index].append(link)
    last = max(sentences, default=-1)
    if count is None and last + 1 - len(sentences) > _MOST_WITHOUT_LINE:
        found = f"got sentence number {last + base}, but lines for only {len(sentences)} sentences"
        raise error_at(path, sentences[last][0].line, f"{found}; if that is right, give the sentences too")
    # Sentences without a line may come last.
    nothing = _RawPair(())
    return [_RawPair(sentences[index]) if index in sentences else nothing for index in range(max(last + 1, count or 0))]


def _naacl_link(number: int, line: str, base: int, count: int | None) -> tuple[int, _RawLink]:
    """The sentence index and the link of a line."""
    match = _NAACL_LINE.fullmatch(line.strip())
    if match is None:
        raise InvalidInputError(f"got {quoted(line)}, expected: sentence i j [S|P] [confidence]")
    sentence, first, second = int(match[1]), int(match[2]), int(match[3])
    if sentence < base:
        raise InvalidInputError(f"got sentence number {sentence}, expected at least {base}; check base")
    if count is not None and sentence >= base + count:
        expected = f"expected {base} to {base + count - 1} for {count} sentences"
        raise InvalidInputError(f"got sentence number {sentence}, {expected}; check base and the sentences")
    return sentence - base, _RawLink(number, first, second, sure=match[4] != "P")


_FORMATS: Mapping[str, tuple[Literal[0, 1] | None, _Parse]] = MappingProxyType(
    {
        "talp": (None, _one_pair_per_line(_split_talp)),
        "naacl": (1, _parse_naacl),
        "alibi": (0, _one_pair_per_line(_split_alibi)),
        "tsv": (0, _one_pair_per_line(_split_tsv)),
    }
)
"""The default base and the parser of each format."""
