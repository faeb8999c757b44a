"""Reads the files that ``norm-align evaluate`` scores, and warns if their options look wrong.

Warnings and numbers of skipped links and lines go to standard error; standard output is for the report.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from alignment.aer import Change, find_correction, lacks_first_words
from alignment.commands.running import text_source
from alignment.formats import GoldFormat, parse_scored_pharaoh
from alignment.formats.gold import GoldFile, Texts, scan_gold
from alignment.links import Alignment, GoldAlignment, Link
from captum_norm import InvalidInputError
from captum_norm.bars import to_stderr
from captum_norm.text.lines import error_at, located, read_lines

Sides = tuple[Texts | None, Texts | None]
"""The tokenised source and target sentences; None if unknown."""


@dataclass(frozen=True)
class AlignmentFile:
    """A file of alignments, and how to read it.

    Attributes:
        name: its name in reports.
        path: the file; ``-`` is standard input.
        format: its format.
        base: the index of the first word; None for the format's default.
        swapped: whether links have the target first.
        talp: whether possible links are allowed.
        gold: whether it is the gold alignment.
    """

    name: str
    path: str
    format: GoldFormat = "talp"
    base: Literal[0, 1] | None = 0
    swapped: bool = False
    talp: bool = False
    gold: bool = False

    @property
    def argument(self) -> str:
        """How it is given on the command line: ``FILE:swapped:base1``, ``--gold-base 1 --gold-swapped``."""
        if self.gold:
            return f"--gold-base {self.base}{' --gold-swapped' if self.swapped else ''}"
        chosen = {"swapped": self.swapped, "base1": self.base == 1, "talp": self.talp}
        return ":".join([self.path, *(name for name, is_chosen in chosen.items() if is_chosen)])


_MARKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"swapped": {"swapped": True}, "base1": {"base": 1}, "talp": {"talp": True}}
)
_FILE = re.compile(rf"(.+?)((?::(?:{'|'.join(_MARKS)}))*)", re.DOTALL)
_NAMED = re.compile(r"([^=/]+)=(.*)", re.DOTALL)


def alignment_file(text: str) -> AlignmentFile:
    """An ``argparse`` type: ``FILE[:swapped][:base1][:talp]``."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError("got no file name")
    path, marks = match.groups()
    file = AlignmentFile(path, path)
    for mark in marks.split(":")[1:]:
        file = replace(file, **_MARKS[mark])
    return file


def system_file(text: str) -> AlignmentFile:
    """An ``argparse`` type: ``[NAME=]FILE[:swapped][:base1][:talp]``."""
    match = _NAMED.fullmatch(text)
    return alignment_file(text) if match is None else replace(alignment_file(match[2]), name=match[1])


def read_sentences(path: str | None) -> list[str] | None:
    """The sentences of one side, if they are in a file."""
    return None if path is None else [line for _, line in read_lines(text_source(path))]


def read_systems(
    gold: AlignmentFile, systems: Sequence[AlignmentFile], texts: Sides, *, skip_invalid: bool
) -> tuple[list[GoldAlignment], list[list[Alignment]]]:
    """Read gold alignments and the systems' alignments of the same sentence pairs; warn if they do not look right.

    Args:
        gold: the gold file.
        systems: the systems' files.
        texts: the sentences, to check that links lie inside them; None for those in the gold file, if any.
        skip_invalid: whether to skip invalid links, and sentence pairs for which a file has no valid line.

    Raises:
        InvalidInputError: a file cannot be read, the gold alignment has no link, a system has another number of lines,
            or a link or line is invalid and not skipped.
    """
    found = _read(gold, texts, skip_invalid)
    if not found.pairs:
        raise InvalidInputError(f"{gold.path}: got no line, expected gold alignments")
    if not any(pair.possible for pair in _valid(found.pairs)):
        raise InvalidInputError(f"{gold.path}: got no link in {len(found.pairs)} lines, expected gold alignments")
    columns = [found.pairs]
    for system in systems:
        columns.append(_read(system, (found.sources, found.targets), skip_invalid).pairs)
        if len(columns[-1]) != len(found.pairs):
            message = f"got {len(columns[-1])} alignments, expected {len(found.pairs)}, one for each gold alignment"
            raise InvalidInputError(f"{system.path}: {message}")
    rows = [row for row in zip(*columns, strict=True) if len(_valid(row)) == len(row)]
    if not rows:
        raise InvalidInputError(f"{gold.path}: got no sentence pair with a valid line in all files, expected one")
    if len(rows) < len(found.pairs):
        _warn(f"skipped {len(found.pairs) - len(rows)} of {len(found.pairs)} sentence pairs with these lines")
    pairs, *others = map(_valid, zip(*rows, strict=True))
    alignments = [[pair.possible for pair in other] for other in others]
    _doubt_base(gold, [pair.possible for pair in pairs])
    for system, links in zip(systems, alignments, strict=True):
        _doubt(system, links, pairs)
    return pairs, alignments


def read_scores(file: AlignmentFile) -> list[dict[Link, float]]:
    """Read the scored links of each sentence pair, ``i-j:p``, as (source, target) from 0.

    Raises:
        InvalidInputError: a line is malformed, or a link has no score.
    """
    if file.path == "-":
        raise InvalidInputError("got standard input, whose scores cannot be read again; give a file")
    pairs = []
    source = text_source(file.path)
    for number, line in read_lines(source):
        with located(source, number):
            scores = parse_scored_pharaoh(line)
        base = file.base or 0
        links = {(i - base, j - base): score for (i, j), score in scores.items()}
        pairs.append({link[::-1] if file.swapped else link: score for link, score in links.items()})
    return pairs


def _warn(message: str) -> None:
    to_stderr(f"norm-align: warning: {message}")


def _valid(pairs: Sequence[GoldAlignment | InvalidInputError]) -> list[GoldAlignment]:
    return [pair for pair in pairs if not isinstance(pair, InvalidInputError)]


def _read(file: AlignmentFile, texts: Sides, skip_invalid: bool) -> GoldFile:
    links: list[InvalidInputError] = []
    try:
        found = _scan(file, texts, links.append if skip_invalid else None)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}{_hint(file, texts)}") from error
    lines = [pair for pair in found.pairs if isinstance(pair, InvalidInputError)]
    if links or lines:
        numbers = ((len(links), "link"), (len(lines), "line"))
        counts = " and ".join(f"{number} {name}{'s' * (number > 1)}" for number, name in numbers if number)
        _warn(f"{file.path}: skipped {counts}, such as: {[*links, *lines][0]}{_hint(file, texts)}")
    for number, pair in enumerate(found.pairs, 1):
        if not (file.gold or file.talp or isinstance(pair, InvalidInputError)) and pair.sure != pair.possible:
            message = "got possible links (ipj), expected i-j; write FILE:talp to count them"
            raise error_at(text_source(file.path), number, message)
    return found


def _scan(file: AlignmentFile, texts: Sides, on_error: Callable[[InvalidInputError], None] | None) -> GoldFile:
    return scan_gold(
        text_source(file.path),
        format=file.format,
        base=file.base,
        swapped=file.swapped,
        sources=texts[0],
        targets=texts[1],
        on_error=on_error,
    )


def _hint(file: AlignmentFile, texts: Sides) -> str:
    """Base and order of sides with which all links lie inside known sentences, as a hint; empty if there are none."""
    options: list[tuple[Literal[0, 1], bool]] = [(0, False), (0, True), (1, False), (1, True)]
    for base, swapped in [] if file.path == "-" or texts == (None, None) else options:
        other = replace(file, base=base, swapped=swapped)
        try:
            _scan(other, texts, None)
        except InvalidInputError:
            continue
        return f"; as {other.argument} all its links would lie inside the sentences"
    return ""


def _doubt(file: AlignmentFile, alignments: list[Alignment], gold: list[GoldAlignment]) -> None:
    """Warn if a system's links look as if they were read with the wrong base or order of sides."""
    correction = find_correction(alignments, gold)
    if correction is None:
        _doubt_base(file, alignments)
        return
    how, advice = _advice(file, correction.change)
    rates = f"AER {correction.corrected_aer:.1f} instead of {correction.aer:.1f}"
    _warn(f"{file.path}: with {how} its links would fit the gold far better ({rates}); {advice}")


def _advice(file: AlignmentFile, change: Change) -> tuple[str, str]:
    if change == "swapped":
        first = "source" if file.swapped else "target"
        other = replace(file, swapped=not file.swapped).argument
        return "the sides exchanged", f"if it has the {first} first, write {other}, else check --gold-swapped"
    how = f"indices {change}"
    if change == "one less" or file.base == 1:
        base: Literal[0, 1] = 1 if change == "one less" else 0
        return how, f"if it counts from {base}, write {replace(file, base=base).argument}, else check --gold-base"
    return how, "if the gold counts from 1, write --gold-base 1"


def _doubt_base(file: AlignmentFile, alignments: list[Alignment]) -> None:
    from_0 = file.base == 0 or (file.base is None and file.format != "naacl")
    if from_0 and lacks_first_words(alignments):
        found = f"none of its {sum(map(len, alignments))} links has the index 0"
        _warn(f"{file.path}: {found}; if it counts from 1, write {replace(file, base=1).argument}")
