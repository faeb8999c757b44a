"""Runs ``norm-align inspect``: measures whether translations are about their source, and flags those that are not."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from alignment.commands import aligners, models, running
from alignment.inspection import FLAGS, MEASURES, RULES, Inspection
from alignment.pipeline import extract
from alignment.pipeline.blocks import Aligner, Pairs, Written
from captum_norm import InvalidInputError
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import positive
from captum_norm.text.lines import is_regular_file

if TYPE_CHECKING:
    from alignment.inspector import Inspector

_BLOCK_LINES = 2048
_DIGITS = 4
_COLUMNS = ("line", "flags", *MEASURES, "uncovered", "repeated", "source", "target")
_FEW = 5


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="the tokenised source sentences, one a line; without TARGET, lines source ||| target. A file or URL; "
        ".gz, .xz and .bz2 are decompressed, - is standard input",
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="their translations, tokenised, one a line")
    parser.add_argument(
        "--tokenize", action="store_true", help="split raw text into words as Moses does, for the shipped models"
    )
    parser.add_argument("--flagged", action="store_true", help="write the lines that raise a flag alone")
    parser.add_argument(
        "--format",
        choices=("tsv", "json"),
        default="tsv",
        help="tsv: a table with a head; json: a line of JSON for each line of text (default: %(default)s)",
    )
    parser.add_argument(
        "--block-lines",
        type=positive,
        default=_BLOCK_LINES,
        metavar="N",
        help="lines that are read and inspected together (default: %(default)s; from a stream, as many as there are "
        "when it pauses)",
    )
    measures = parser.add_argument_group("the measures")
    measures.add_argument(
        "--layer",
        type=aligners.LAYER,
        default="auto",
        metavar="N|auto|highest-norm",
        help="the decoder layer whose links are read, as for extract (default: %(default)s)",
    )
    measures.add_argument(
        "--head", type=aligners.ONE_HEAD, default="auto", metavar="N|auto", help="its head (default: %(default)s)"
    )
    measures.add_argument(
        "--alti", action="store_true", help="also compute the source's share by ALTI+, which takes a pass of its own"
    )
    measures.add_argument(
        "--all-measures",
        action="store_true",
        help="compute information and exchange for every pair, not only for improbable or badly linked ones",
    )
    rules = ", ".join(
        f"{rule.flag} where {measure} {'>' if rule.above else '<'} {rule.limit:g}" for measure, rule in RULES.items()
    )
    measures.add_argument(
        "--limit",
        type=_limit,
        action="append",
        default=[],
        metavar="MEASURE=NUMBER",
        help=f"another limit of a flag; may be repeated. By default: {rules}",
    )
    models.add_arguments(parser)
    running.add_arguments(parser)


def _limit(text: str) -> tuple[str, float]:
    measure, _, number = text.partition("=")
    try:
        return measure, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text}; expected a measure and a number, as in gap=0.5") from None


def _run(options: argparse.Namespace) -> None:
    if options.source == options.target == "-":
        raise InvalidInputError("got - for both sides; standard input can be read only once")
    splits = models.splits(options)
    with running.set_up(options) as report:
        source = running.text_source(options.source)
        target = None if options.target is None else running.text_source(options.target)
        inspector = _inspector(options)
        if inspector.aligner.choice is not None:
            dict(inspector.inspect_each([(["a"], ["a"])]))  # refuses layers and heads that are not there
        elif not all(isinstance(side, str) and is_regular_file(side) for side in (source, target) if side is not None):
            running.report_waiting(report, options)
        writing = _Writing(as_json=options.format == "json", flagged=options.flagged, report=report)
        if not writing.as_json:
            sys.stdout.buffer.write(writing.row(_COLUMNS).encode())
            sys.stdout.buffer.flush()
        counts = extract(
            source,
            target,
            cast(Aligner, inspector),
            sys.stdout.buffer,
            block_lines=options.block_lines,
            pause=None if inspector.aligner.choice is None else running.PAUSE,
            max_words=options.max_words,
            bad_lines=options.bad_lines,
            report=report,
            progress=False if options.quiet else None,
            splits=splits,
            writing=writing,
        )
        raised = ", ".join(f"{writing.raised[flag]:,} {flag}" for flag in FLAGS if writing.raised[flag])
        report(f"{counts.lines:,} lines, {writing.flagged_lines:,} flagged{raised and ': '}{raised}; {counts.bad}")
        if writing.raised["exchanged"] > max(_FEW, (counts.lines - counts.bad_lines) / 2):
            report("most pairs are more probable with source and target exchanged: exchange SOURCE and TARGET")


def _inspector(options: argparse.Namespace) -> "Inspector":
    from alignment.inspector import Inspector

    return Inspector(
        *models.load(options),
        layer=options.layer,
        head=options.head,
        alti=options.alti,
        all_measures=options.all_measures,
        limits=dict(options.limit),
        max_tokens=options.max_tokens,
    )


class _Writing:
    """Writes the inspection of each pair, and counts flags.

    Args:
        as_json: whether to write JSON, not a table.
        flagged: whether to write flagged pairs alone.
        report: is told which layer and head were chosen.
    """

    def __init__(self, *, as_json: bool, flagged: bool, report: Callable[[str], None]) -> None:
        self.as_json, self.only_flagged, self._report = as_json, flagged, report
        self.raised, self.flagged_lines = Counter[str](), 0

    def each(
        self, align: Aligner, pairs: Pairs, numbers: Sequence[int], known: Container[int]
    ) -> Iterator[tuple[int, Written | InvalidInputError]]:
        """Inspect the pairs, and yield what is written."""
        inspector = cast("Inspector", align)
        aligners.choose(inspector.aligner, pairs, self._report)
        for index, found in inspector.inspect_each(pairs, known):
            if isinstance(found, InvalidInputError):
                yield index, found
            else:
                self.raised.update(found.flags)
                self.flagged_lines += bool(found.flags)
                yield index, Written(self._text(numbers[index], *pairs[index], found), 0)

    def nothing(self, number: int) -> str:
        """Return what is written for a line that cannot be inspected."""
        if self.only_flagged:
            return ""
        return "null\n" if self.as_json else self.row([str(number), *[""] * (len(_COLUMNS) - 1)])

    @staticmethod
    def row(cells: Sequence[str]) -> str:
        """Return a row of the table."""
        return "\t".join(cells) + "\n"

    def _text(self, number: int, source: Sequence[str], target: Sequence[str], found: Inspection) -> str:
        if self.only_flagged and not found.flags:
            return ""
        values = {name: None if (value := getattr(found, name)) is None else round(value, _DIGITS) for name in MEASURES}
        if self.as_json:
            record = {"line": number, **asdict(found), **values, "source": source, "target": target}
            return f"{json.dumps(record, ensure_ascii=False)}\n"
        return self.row(
            [
                str(number),
                ",".join(found.flags),
                *("" if value is None else f"{value:.{_DIGITS}f}" for value in values.values()),
                " ".join(source[index] for index in found.uncovered),
                " ".join(target[index] for index in found.repeated),
                " ".join(source),
                " ".join(target),
            ]
        )


COMMAND = Command("inspect", "flag translations that are not about their source", _add_arguments, _run)
