"""Reads gold alignments: sure and possible links in the notations of the public test sets.

talp
    One sentence pair a line, sure links as ``i-j``, possible ones as ``ipj``. Some files count from 0, some from 1.
naacl
    One link a line, ``sentence i j [S|P] [confidence]``: sure unless marked P, sentences and words counted from 1
    [Mihalcea & Pedersen 2003]. A link listed as S and as P is sure; a sentence without a line has no links.
alibi
    One sentence pair a line: its id, then its links as in talp, counted from 0.
tsv
    One sentence pair a line: the tokenised sentences and the links as in talp, counted from 0, with tabs between them
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
from captum_norm.texts import TextSource, error_at, quoted, scan_lines, source_name

GoldFormat = Literal["talp", "naacl", "alibi", "tsv"]
"""The notation of a gold file; see ``read_gold``."""

_TALP_LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")
_NAACL_LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,9})\s+([0-9]{1,9})(?:\s+([SP]))?(?:\s+[0-9.]+)?", re.ASCII)
_MOST_WITHOUT_LINE = 1_000_000
_NOTHING = GoldAlignment(Alignment())

OnError = Callable[[InvalidInputError], None]
Texts = Sequence[str | None]
"""Tokenised sentences, None where one is not known."""


class GoldFile(NamedTuple):
    """What a file of gold alignments holds.

    Attributes:
        pairs: the gold alignment of each sentence pair, or the error that says why its line cannot be read.
        sources: the source sentences, as they were given or as the file has them; None if it has none.
        targets: likewise.
    """

    pairs: list[GoldAlignment | InvalidInputError]
    sources: Texts | None
    targets: Texts | None


class _Record(NamedTuple):
    """A link as the file has it, from its base and with its order of the sides."""

    line: int
    first: int
    second: int
    sure: bool


class _Sentence(NamedTuple):
    """The links of a sentence pair, and the two sentences where the file has them, in its order of the sides."""

    records: Sequence[_Record]
    texts: tuple[str, str] | None = None


_Sentences = Sequence[_Sentence | InvalidInputError]
_Parse = Callable[[TextSource, int, int | None, OnError], _Sentences]
"""What reads a file from its base and the number of its sentences, if that is known."""


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
    records = _talp_records(line.split(), 1, InvalidInputError, _refuse)
    return _gold([(_link(record, base), record.sure) for record in records])


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
        path: path (``.gz``, ``.xz`` and ``.bz2`` are decompressed) or open stream.
        format: ``"talp"`` (``i-j`` sure, ``ipj`` possible), ``"naacl"`` (``sentence i j [S|P] [confidence]``),
            ``"alibi"`` (sentence id, then talp links) or ``"tsv"`` (source TAB target TAB talp links).
        base: what the file counts from; None: 1 for naacl, 0 for alibi and tsv. For talp it must be said.
        swapped: the file has (target, source) where links are (source, target); the result never has.
        sources: the tokenised source sentences, if indices and number of sentences are to be checked against them;
            words are what ``split_words`` finds. None: those in the file, if it has any.
        targets: likewise.

    Raises:
        InvalidInputError: a line is malformed, an index lies outside its sentence, the numbers of sentences differ, or
            ``base`` is missing; file and line are named.

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
    on_error: OnError | None = None,
) -> GoldFile:
    """As :func:`read_gold`, but links and lines that are invalid may be left out.

    Args:
        path: as there.
        format: likewise.
        base: likewise.
        swapped: likewise.
        sources: likewise.
        targets: likewise.
        on_error: told of each link that is malformed or lies outside its sentences, and is left out; of a line that
            cannot be read, the result has the error. None raises them instead.

    Raises:
        InvalidInputError: the file cannot be read, the numbers of sentences differ, or ``base`` is missing.
    """
    base, parse = _reading(path, format, base)
    given = (targets, sources) if swapped else (sources, targets)
    counts = [len(texts) for texts in given if texts is not None]
    sentences = parse(path, base, min(counts, default=None), on_error or _refuse)
    for sentence in sentences:
        if on_error is None and isinstance(sentence, InvalidInputError):
            raise sentence
    for side, texts in (("source", sources), ("target", targets)):
        if texts is not None and len(sentences) != len(texts):
            found = f"got {len(sentences)} alignments, expected {len(texts)}, as many as {side} sentences"
            raise InvalidInputError(f"{source_name(path)}: {found}; give the texts that the file was made for")
    first, second = (_texts(sentences, side) if texts is None else texts for side, texts in enumerate(given))
    pairs = list[GoldAlignment | InvalidInputError]()
    for index, sentence in enumerate(sentences):
        if isinstance(sentence, InvalidInputError):
            pairs.append(sentence)
            continue
        lengths = [_length(texts, index) for texts in (first, second)]
        links = []
        for record in sentence.records:
            try:
                links.append((_link(record, base, swapped, lengths), record.sure))
            except InvalidInputError as error:
                (on_error or _refuse)(error_at(path, record.line, str(error)))
        pairs.append(_gold(links) if links else _NOTHING)
    return GoldFile(pairs, second, first) if swapped else GoldFile(pairs, first, second)


def _reading(
    path: TextSource,
    format: str,  # noqa: A002
    base: Literal[0, 1] | None,
) -> tuple[Literal[0, 1], _Parse]:
    """What a file counts from, and what reads it."""
    if format not in _FORMATS:
        raise InvalidInputError(f"got format {quoted(format)}, expected one of {', '.join(_FORMATS)}")
    usual_base, parse = _FORMATS[format]
    base = usual_base if base is None else base
    if base is None:
        raise InvalidInputError(f"{source_name(path)}: {format} files count from 0 or from 1; say base=0 or base=1")
    return base, parse


def _texts(sentences: _Sentences, side: int) -> Texts | None:
    """The sentences of one side, if the file has any."""
    texts = [None if isinstance(sentence, InvalidInputError) else sentence.texts for sentence in sentences]
    return [text and text[side] for text in texts] if any(texts) else None


def _length(texts: Texts | None, index: int) -> int | None:
    text = None if texts is None else texts[index]
    return None if text is None else len(split_words(text))


def _gold(links: list[tuple[Link, bool]]) -> GoldAlignment:
    return GoldAlignment(Alignment([link for link, sure in links if sure]), Alignment([link for link, _ in links]))


def _link(record: _Record, base: int, swapped: bool = False, lengths: Sequence[int | None] = (None, None)) -> Link:
    """The link that a record stands for, if it lies inside sentences of these lengths (None: not known)."""
    sides = ("target", "source") if swapped else ("source", "target")
    for side, position, length in zip(sides, (record.first, record.second), lengths, strict=True):
        found = f"got {side} index {position}"
        if position < base:
            raise InvalidInputError(f"{found}, expected at least {base}; check base, and drop links to the empty word")
        if length is not None and position >= base + length:
            expected = f"{base} to {base + length - 1}, counted from {base}" if length else "none, as there is no word"
            raise InvalidInputError(f"{found}, expected {expected}; check base, swapped and the sentences")
    link = (record.first - base, record.second - base)
    return link[::-1] if swapped else link


def _refuse(error: InvalidInputError) -> None:
    raise error


def _talp_records(
    tokens: Sequence[str], number: int, error: Callable[[str], InvalidInputError], on_error: OnError
) -> list[_Record]:
    """The links of a line, from its tokens; ``error`` is what an error about it is."""
    records = []
    for token in tokens:
        match = _TALP_LINK.fullmatch(token)
        if match is None:
            on_error(error(f"got {quoted(token)}, expected i-j (sure) or ipj (possible)"))
        else:
            records.append(_Record(number, int(match[1]), int(match[3]), sure=match[2] == "-"))
    return records


_Cut = Callable[[str, set[str]], tuple[list[str], tuple[str, str] | None]]


def _one_pair_a_line(cut: _Cut) -> _Parse:
    """Reads files with a sentence pair a line; ``cut`` finds a line's links and sentences, and notes its id."""

    def parse(path: TextSource, _: int, __: int | None, on_error: OnError) -> _Sentences:
        sentences, names = list[_Sentence | InvalidInputError](), set[str]()
        for number, line in scan_lines(path):
            if isinstance(line, InvalidInputError):
                sentences.append(line)
                continue
            try:
                tokens, texts = cut(line, names)
            except InvalidInputError as error:
                sentences.append(error_at(path, number, str(error)))
            else:
                records = _talp_records(tokens, number, partial(error_at, path, number), on_error)
                sentences.append(_Sentence(records, texts))
        return sentences

    return parse


def _cut_talp(line: str, _: set[str]) -> tuple[list[str], None]:
    return line.split(), None


def _cut_alibi(line: str, names: set[str]) -> tuple[list[str], None]:
    name, *tokens = line.split() or [""]
    if not name or _TALP_LINK.fullmatch(name):
        raise InvalidInputError(f"got {quoted(name)}, expected a sentence id before the links; is this talp?")
    if name in names:
        raise InvalidInputError(f"got the sentence id {quoted(name)} again, expected each once")
    names.add(name)
    return tokens, None


def _cut_tsv(line: str, _: set[str]) -> tuple[list[str], tuple[str, str]]:
    columns = line.split("\t")
    if len(columns) < 3 or any(columns[3:]):  # spreadsheets write empty columns behind
        raise InvalidInputError(f"got {len(columns)} columns, expected source TAB target TAB links")
    return columns[2].split(), (columns[0], columns[1])


def _parse_naacl_file(path: TextSource, base: int, count: int | None, on_error: OnError) -> _Sentences:
    sentences: defaultdict[int, list[_Record]] = defaultdict(list)
    for number, line in scan_lines(path):
        try:
            if isinstance(line, InvalidInputError):
                raise line
            index, record = _naacl_record(number, line, base, count)
        except InvalidInputError as error:
            on_error(error if error is line else error_at(path, number, str(error)))
        else:
            sentences[index].append(record)
    last = max(sentences, default=-1)
    if count is None and last + 1 - len(sentences) > _MOST_WITHOUT_LINE:
        found = f"got sentence number {last + base}, but lines for {len(sentences)} sentences alone"
        raise error_at(path, sentences[last][0].line, f"{found}; give the sentences, too, if that is right")
    # The last sentences may be those without a line.
    nothing = _Sentence(())
    return [
        _Sentence(sentences[index]) if index in sentences else nothing for index in range(max(last + 1, count or 0))
    ]


def _naacl_record(number: int, line: str, base: int, count: int | None) -> tuple[int, _Record]:
    """The link of a line, and the index of its sentence."""
    match = _NAACL_LINE.fullmatch(line.strip())
    if match is None:
        raise InvalidInputError(f"got {quoted(line)}, expected: sentence i j [S|P] [confidence]")
    sentence, first, second = int(match[1]), int(match[2]), int(match[3])
    if sentence < base:
        raise InvalidInputError(f"got sentence number {sentence}, expected at least {base}; check base")
    if count is not None and sentence >= base + count:
        expected = f"expected {base} to {base + count - 1}, as there are {count} sentences"
        raise InvalidInputError(f"got sentence number {sentence}, {expected}; check base and the sentences")
    return sentence - base, _Record(number, first, second, sure=match[4] != "P")


_FORMATS: Mapping[str, tuple[Literal[0, 1] | None, _Parse]] = MappingProxyType(
    {
        "talp": (None, _one_pair_a_line(_cut_talp)),
        "naacl": (1, _parse_naacl_file),
        "alibi": (0, _one_pair_a_line(_cut_alibi)),
        "tsv": (0, _one_pair_a_line(_cut_tsv)),
    }
)
"""The usual base of each notation, and what reads its files."""
