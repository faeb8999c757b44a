"""Reads gold alignments with sure and possible links, in the formats of the public test sets."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from alignment.formats.text import split_words
from alignment.links import Alignment, GoldAlignment, Link
from captum_norm import InvalidInputError
from captum_norm.checks import check_choice, quoted
from captum_norm.text.lines import TextSource, error_at, located, read_lines, source_name

GoldFormat = Literal["talp", "naacl", "alibi", "tsv"]
"""The format of a gold file; see ``read_gold``."""

_TALP_LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})(?::[01](?:\.[0-9]{1,9})?)?")  # a score is left out
_NAACL_LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,9})\s+([0-9]{1,9})(?:\s+([SP]))?(?:\s+[0-9.]+)?", re.ASCII)
_BASES: Mapping[str, Literal[0, 1] | None] = {"talp": None, "naacl": 1, "alibi": 0, "tsv": 0}
_MOST_WITHOUT_LINE = 1_000_000


class GoldFile(NamedTuple):
    """Gold alignments, and the tokenised sentences that were given or are in the file; None if they are unknown."""

    pairs: list[GoldAlignment]
    sources: Sequence[str] | None
    targets: Sequence[str] | None


class _RawLink(NamedTuple):
    """A link as written in the file: with its index base and order of sides."""

    line: int
    first: int
    second: int
    sure: bool


class _RawPair(NamedTuple):
    """The links of a sentence pair and, in tsv, its two sentences, in the file's order of sides."""

    links: Sequence[_RawLink]
    texts: tuple[str, str] = ("", "")


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
    return _gold([(_link(raw, base), raw.sure) for raw in (_talp_link(1, token) for token in line.split())])


_NOTHING = GoldAlignment(Alignment())


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
        format: ``"talp"`` (``i-j`` sure, ``ipj`` possible), ``"naacl"`` (``sentence i j [S|P] [confidence]``: sure
            unless marked P or listed as S, too; a sentence without a line has no links [Mihalcea & Pedersen 2003]),
            ``"alibi"`` (sentence id, then talp links) or ``"tsv"`` (source TAB target TAB talp links [Martelli et al.
            2023]).
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
    return scan_gold(path, format=format, base=base, swapped=swapped, sources=sources, targets=targets).pairs


def scan_gold(
    path: TextSource,
    *,
    format: GoldFormat,  # noqa: A002 - the field's word for it
    base: Literal[0, 1] | None = None,
    swapped: bool = False,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> GoldFile:
    """Like :func:`read_gold`, with the sentences."""
    check_choice("format", format, _BASES)
    base = _BASES[format] if base is None else base
    if base is None:
        raise InvalidInputError(f"{source_name(path)}: {format} files count from 0 or from 1; give base=0 or base=1")
    sides = (targets, sources) if swapped else (sources, targets)
    count = min((len(texts) for texts in sides if texts is not None), default=None)
    sentences = _naacl_pairs(path, base, count) if format == "naacl" else _line_pairs(path, format)
    for name, texts in (("source", sources), ("target", targets)):
        if texts is not None and len(sentences) != len(texts):
            expected = f"expected {len(texts)}, as many as {name} sentences; give the sentences that the file was made"
            raise InvalidInputError(f"{source_name(path)}: got {len(sentences)} alignments, {expected} for")
    if format == "tsv":
        inside = [[sentence.texts[side] for sentence in sentences] for side in (0, 1)]
        sides = (inside[0] if sides[0] is None else sides[0], inside[1] if sides[1] is None else sides[1])
    pairs = []
    for index, sentence in enumerate(sentences):
        if not sentence.links:  # of many sentences, if they are numbered
            pairs.append(_NOTHING)
            continue
        lengths = [None if texts is None else len(split_words(texts[index])) for texts in sides]
        links = []
        for raw in sentence.links:
            with located(path, raw.line):
                links.append((_link(raw, base, swapped, lengths), raw.sure))
        pairs.append(_gold(links))
    return GoldFile(pairs, *(sides[::-1] if swapped else sides))


def _gold(links: list[tuple[Link, bool]]) -> GoldAlignment:
    return GoldAlignment(Alignment([link for link, sure in links if sure]), Alignment([link for link, _ in links]))


def _link(raw: _RawLink, base: int, swapped: bool = False, lengths: Sequence[int | None] = (None, None)) -> Link:
    """The link with indices from 0, source first; checked against the sentences' lengths (None: unknown)."""
    sides = ("target", "source") if swapped else ("source", "target")
    for side, position, length in zip(sides, (raw.first, raw.second), lengths, strict=True):
        message = f"got {side} index {position}"
        if position < base:
            raise InvalidInputError(f"{message}, expected at least {base}; check base, and drop links to the null word")
        if length is not None and position >= base + length:
            expected = (
                f"{base} to {base + length - 1}, counted from {base}" if length else "none, since there is no word"
            )
            raise InvalidInputError(f"{message}, expected {expected}; check base, swapped and the sentences")
    link = (raw.first - base, raw.second - base)
    return link[::-1] if swapped else link


def _talp_link(number: int, token: str) -> _RawLink:
    """The link of a token in a line."""
    match = _TALP_LINK.fullmatch(token)
    if match is None:
        raise InvalidInputError(f"got {quoted(token)}, expected i-j (sure) or ipj (possible)")
    return _RawLink(number, int(match[1]), int(match[3]), sure=match[2] == "-")


def _line_pairs(path: TextSource, format: str) -> list[_RawPair]:  # noqa: A002
    """The pairs of a file with one per line: talp, alibi or tsv."""
    pairs, ids = list[_RawPair](), set[str]()
    for number, line in read_lines(path):
        with located(path, number):
            tokens, texts = _split_tsv(line) if format == "tsv" else (line.split(), ("", ""))
            if format == "alibi":
                _check_id(tokens.pop(0) if tokens else "", ids)
            pairs.append(_RawPair([_talp_link(number, token) for token in tokens], texts))
    return pairs


def _check_id(name: str, ids: set[str]) -> None:
    """Refuse what is no sentence id or was seen before, and note it."""
    if not name or _TALP_LINK.fullmatch(name):
        raise InvalidInputError(f"got {quoted(name)}, expected a sentence id before the links; is this talp?")
    if name in ids:
        raise InvalidInputError(f"got the sentence id {quoted(name)} again, expected each once")
    ids.add(name)


def _split_tsv(line: str) -> tuple[list[str], tuple[str, str]]:
    columns = line.split("\t")
    if len(columns) < 3 or any(columns[3:]):  # spreadsheets append empty columns
        raise InvalidInputError(f"got {len(columns)} columns, expected source TAB target TAB links")
    return columns[2].split(), (columns[0], columns[1])


def _naacl_pairs(path: TextSource, base: int, count: int | None) -> list[_RawPair]:
    """The pairs of a file with a link a line, as many as sentences if their number is known."""
    sentences: defaultdict[int, list[_RawLink]] = defaultdict(list)
    for number, line in read_lines(path):
        with located(path, number):
            index, raw = _naacl_link(number, line, base, count)
        sentences[index].append(raw)
    last = max(sentences, default=-1)
    if count is None and last + 1 - len(sentences) > _MOST_WITHOUT_LINE:
        message = f"got sentence number {last + base}, but lines for only {len(sentences)} sentences"
        raise error_at(path, sentences[last][0].line, f"{message}; if that is right, give the sentences too")
    # Sentences without a line may come last.
    empty = _RawPair(())
    return [_RawPair(sentences[index]) if index in sentences else empty for index in range(max(last + 1, count or 0))]


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
