"""Runs ``norm-align inspect``: measures whether translations are about their source, and flags those that are not."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, cast

from alignment.commands import aligners, models
from alignment.inspection import FLAGS, MEASURES, Inspection
from alignment.pipeline import extract
from alignment.pipeline.blocks import Aligner, Pairs, Written
from captum_norm import InvalidInputError
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.commands.shared import index_or, positive

if TYPE_CHECKING:
    from alignment.inspector import Inspector

_DIGITS = 4
_INDICES = {"uncovered": 0, "added": 1, "repeated": 1}  # the side whose words these are
_COLUMNS = ("line", "flags", *MEASURES, *_INDICES, "source", "target")
_FEW = 5


@dataclass(frozen=True, kw_only=True)
class _Measures(Options, title="the measures"):
    layer: int | Literal["auto", "highest-norm"] = option(
        "the decoder layer whose links are read, as for extract",
        "auto",
        parse=aligners.LAYER,
        metavar="N|auto|highest-norm",
    )
    head: int | Literal["auto"] = option("the head that is read", "auto", parse=index_or("auto"), metavar="N|auto")
    all_measures: bool = option(
        "compute information and exchange for every pair, not only for improbable or badly linked ones", False
    )


@dataclass(frozen=True, kw_only=True)
class InspectOptions(_Measures, models.ModelOptions, models.RunOptions):
    """The options of ``norm-align inspect``."""

    source: str = argument(models.SOURCE, metavar="SOURCE")
    target: str | None = argument("their translations, tokenised, one per line", metavar="TARGET", nargs="?")
    tokenize: bool = models.tokenize_option()
    flagged: bool = option(
        "write only the lines that raise a flag; a negation or a single wrong word raises none", False
    )
    format: Literal["tsv", "json"] = option("a table with a header, or a line of JSON for each line of text", "tsv")
    block_lines: int = option(
        "the number of lines that are read and inspected together (default: %(default)s)",
        2048,
        parse=positive,
        metavar="N",
    )


def _run(options: InspectOptions) -> None:
    from alignment.inspector import Inspector

    splits = models.splits(options, tokenize=options.tokenize)
    with models.set_up(options) as report, models.text_sources(options, options.source, options.target) as inputs:
        inspector = Inspector(
            *models.load(options),
            layer=options.layer,
            head=options.head,
            all_measures=options.all_measures,
            max_tokens=options.max_tokens,
        )
        if inspector.aligner.choice is not None:
            dict(inspector.inspect_each([(["a"], ["a"])]))  # refuses layers and heads that are not there
        writing = _Writing(as_json=options.format == "json", flagged=options.flagged, report=report)
        if not writing.as_json:
            sys.stdout.buffer.write(writing.row(_COLUMNS).encode())
            sys.stdout.buffer.flush()
        counts = extract(
            inputs[0],
            inputs[1] if len(inputs) > 1 else None,
            cast(Aligner, inspector),
            sys.stdout.buffer,
            block_lines=options.block_lines,
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


class _Writing:
    """Writes the inspection of each pair, or of flagged ones alone, as JSON or a table; counts flags."""

    def __init__(self, *, as_json: bool, flagged: bool, report: Callable[[str], None]) -> None:
        self.as_json, self.only_flagged, self._report = as_json, flagged, report
        self.raised, self.flagged_lines = Counter[str](), 0

    def each(
        self, align: Aligner, pairs: Pairs, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Written | InvalidInputError]]:
        """Inspect the pairs, and yield what is written."""
        inspector = cast("Inspector", align)
        aligners.choose(inspector.aligner, pairs, self._report)
        for index, inspection in inspector.inspect_each(pairs):
            if isinstance(inspection, InvalidInputError):
                yield index, inspection
            else:
                self.raised.update(inspection.flags)
                self.flagged_lines += bool(inspection.flags)
                yield index, Written(self._text(numbers[index], *pairs[index], inspection), 0)

    def nothing(self, number: int) -> str:
        """Return what is written for a line that cannot be inspected."""
        if self.only_flagged:
            return ""
        return "null\n" if self.as_json else self.row([str(number), *[""] * (len(_COLUMNS) - 1)])

    @staticmethod
    def row(cells: Sequence[str]) -> str:
        """Return a row of the table."""
        return "\t".join(cells) + "\n"

    def _text(self, number: int, source: Sequence[str], target: Sequence[str], inspection: Inspection) -> str:
        if self.only_flagged and not inspection.flags:
            return ""
        values = {
            name: None if (value := getattr(inspection, name)) is None else round(value, _DIGITS) for name in MEASURES
        }
        if self.as_json:
            record = {"line": number, **asdict(inspection), **values, "source": source, "target": target}
            return f"{json.dumps(record, ensure_ascii=False)}\n"
        return self.row(
            [
                str(number),
                ",".join(inspection.flags),
                *("" if value is None else f"{value:.{_DIGITS}f}" for value in values.values()),
                *(
                    " ".join((source, target)[side][index] for index in getattr(inspection, name))
                    for name, side in _INDICES.items()
                ),
                " ".join(source),
                " ".join(target),
            ]
        )


COMMAND = Command(
    "inspect",
    "flag translations that do not match their source",
    InspectOptions,
    _run,
    "norm-align inspect corpus.fr corpus.en --flagged",
    ("flagged", "format", "tokenize", "model", "source_language", "target_language", "device"),
)
