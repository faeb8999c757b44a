"""Gold alignments: sure and possible links in the notations of the public test sets.

talp
    One sentence pair a line, sure links as ``i-j``, possible ones as ``ipj``. Some files count from 0, some from 1.
naacl
    One link a line, ``sentence i j [S|P] [confidence]``: sure unless marked P, sentences and words counted from 1
    [Mihalcea & Pedersen 2003]. A link listed as S and as P is sure; a sentence without a line has no links.
alibi
    One sentence pair a line: its id, then its links as in talp, counted from 0.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from alignment.formats.text import TextSource, located, read_lines, source_name, split_words
from alignment.links import Alignment, GoldAlignment, Link
from captum_norm import InvalidInputError

GoldFormat = Literal["talp", "naacl", "alibi"]
"""The notation of a gold file; see ``read_gold``."""

_TALP_LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")
_NAACL_LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,9})\s+([0-9]{1,9})(?:\s+([SP]))?(?:\s+[0-9.]+)?", re.ASCII)


class _Record(NamedTuple):
    """A link as the file has it, from its base and with its order of the sides."""

    line: int
    first: int
    second: int
    sure: bool


def parse_talp(line: str, *, base: Literal[0, 1] = 0) -> GoldAlignment:
    """The gold alignment that a line of sure (``i-j``) and possible (``ipj``) links holds.

    Args:
        line: the links, separated by white space.
        base: what the indices are counted from.

    Raises:
        InvalidInputError: something in the line is neither, or an index is smaller than ``base``.

    >>> parse_talp("1-1 2p1", base=1)
    GoldAlignment(sure=Alignment([(0, 0)]), possible=Alignment([(0, 0), (1, 0)]))
    """
    return _gold([(_link(record, base), record.sure) for record in _talp_records(1, line.split())])


def read_gold(
    path: TextSource,
    *,
    format: GoldFormat,  # noqa: A002 - the field's word for it
    base: Literal[0, 1] | None = None,
    swapped: bool = False,
    sources: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> list[GoldAlignment]:
    r"""The gold alignments in a file, one for each sentence pair.

    Args:
        path: path (``.gz`` and ``.xz`` are decompressed) or open stream.
        format: ``"talp"`` (``i-j`` sure, ``ipj`` possible), ``"naacl"`` (``sentence i j [S|P] [confidence]``) or
            ``"alibi"`` (sentence id, then talp links).
        base: what the file counts from; None: 1 for naacl, 0 for alibi. For talp it must be said.
        swapped: the file has (target, source) where links are (source, target); the result never has.
        sources: the tokenised source sentences, if indices and number of sentences are to be checked against them;
            words are what ``split_words`` finds.
        targets: likewise.

    Raises:
        InvalidInputError: a line is malformed, an index lies outside its sentence, the numbers of sentences differ, or
            ``base`` is missing; file and line are named.

    >>> import io
    >>> read_gold(io.StringIO("1 1 1 S\n1 2 1 P\n"), format="naacl", sources=["das Haus"], targets=["house"])
    [GoldAlignment(sure=Alignment([(0, 0)]), possible=Alignment([(0, 0), (1, 0)]))]
    """
    if format not in _FORMATS:
        raise InvalidInputError(f"got format {format!r}, expected one of {', '.join(_FORMATS)}")
    usual_base, parse = _FORMATS[format]
    base = usual_base if base is None else base
    if base is None:
        raise InvalidInputError(f"{source_name(path)}: {format} files count from 0 or from 1; say base=0 or base=1")
    sentences = parse(path, base)
    for side, texts in (("source", sources), ("target", targets)):
        if texts is not None:
            if format == "naacl":  # the last sentences may be those without a line
                sentences.extend([[]] * (len(texts) - len(sentences)))
            if len(sentences) != len(texts):
                found = f"got {len(sentences)} alignments, expected {len(texts)}, as many as {side} sentences"
                raise InvalidInputError(f"{source_name(path)}: {found}; give the texts that the file was made for")
    gold = []
    for index, records in enumerate(sentences):
        lengths = [None if texts is None else len(split_words(texts[index])) for texts in (sources, targets)]
        links = []
        for record in records:
            with located(path, record.line):
                links.append((_link(record, base, swapped, lengths), record.sure))
        gold.append(_gold(links))
    return gold


def _gold(links: list[tuple[Link, bool]]) -> GoldAlignment:
    return GoldAlignment(Alignment([link for link, sure in links if sure]), Alignment([link for link, _ in links]))


def _link(record: _Record, base: int, swapped: bool = False, lengths: Sequence[int | None] = (None, None)) -> Link:
    """The link that a record stands for, if it lies inside sentences of these lengths (None: not known)."""
    positions = (record.second, record.first) if swapped else (record.first, record.second)
    for side, position, length in zip(("source", "target"), positions, lengths, strict=True):
        found = f"got {side} index {position}"
        if position < base:
            raise InvalidInputError(f"{found}, expected at least {base}; check base, and drop links to the empty word")
        if length is not None and position >= base + length:
            expected = f"expected {base} to {base + length - 1}, counted from {base}"
            raise InvalidInputError(f"{found}, {expected}; check base, swapped and the sentences")
    return (positions[0] - base, positions[1] - base)


def _talp_records(number: int, tokens: list[str]) -> list[_Record]:
    records = []
    for token in tokens:
        match = _TALP_LINK.fullmatch(token)
        if match is None:
            raise InvalidInputError(f"got {token!r}, expected i-j (sure) or ipj (possible)")
        records.append(_Record(number, int(match[1]), int(match[3]), sure=match[2] == "-"))
    return records


def _parse_talp_file(path: TextSource, _: int) -> list[list[_Record]]:
    sentences = []
    for number, line in read_lines(path):
        with located(path, number):
            sentences.append(_talp_records(number, line.split()))
    return sentences


def _parse_alibi_file(path: TextSource, _: int) -> list[list[_Record]]:
    sentences: dict[str, list[_Record]] = {}
    for number, line in read_lines(path):
        with located(path, number):
            name, *tokens = line.split() or [""]
            if not name or _TALP_LINK.fullmatch(name):
                raise InvalidInputError(f"got {name!r}, expected a sentence id before the links; is this talp?")
            if name in sentences:
                raise InvalidInputError(f"got the sentence id {name!r} again, expected each once")
            sentences[name] = _talp_records(number, tokens)
    return list(sentences.values())


def _parse_naacl_file(path: TextSource, base: int) -> list[list[_Record]]:
    sentences: defaultdict[int, list[_Record]] = defaultdict(list)
    for number, line in read_lines(path):
        with located(path, number):
            match = _NAACL_LINE.fullmatch(line.strip())
            if match is None:
                raise InvalidInputError(f"got {line!r}, expected: sentence i j [S|P] [confidence]")
            sentence, first, second = int(match[1]), int(match[2]), int(match[3])
            if sentence < base:
                raise InvalidInputError(f"got sentence number {sentence}, expected at least {base}; check base")
            sentences[sentence - base].append(_Record(number, first, second, sure=match[4] != "P"))
    return [sentences[index] for index in range(max(sentences, default=-1) + 1)]


_FORMATS: Mapping[str, tuple[Literal[0, 1] | None, Callable[[TextSource, int], list[list[_Record]]]]] = (
    MappingProxyType(
        {"talp": (None, _parse_talp_file), "naacl": (1, _parse_naacl_file), "alibi": (0, _parse_alibi_file)}
    )
)
