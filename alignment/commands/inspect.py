"""Runs ``norm-align inspect`` and ``monitor``: measures whether translations are about their source, each or many."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import numpy as np

from alignment.commands import aligners, models
from alignment.inspection import COVERED, FLAGS, MEASURES, Inspection, coverage, link_entropy
from alignment.links import calibrated
from alignment.pipeline.blocks import Pairs, Written
from alignment.recipes import RECIPES
from captum_norm import InvalidInputError
from captum_norm.bars import to_stderr
from captum_norm.checks import check_choice
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.commands.shared import index_or, positive, share
from captum_norm.runs import cut

if TYPE_CHECKING:
    from alignment.inspector import Inspector

_DIGITS = 4
_INDICES = {"uncovered": 0, "added": 1, "repeated": 1}  # the side whose words these are
_COLUMNS = ("line", "flags", *MEASURES, *_INDICES, "source", "target")
_FEW = 5
_MONITORED = ("entropy", "uncovered", "disagreement", "unusable")


@dataclass(frozen=True, kw_only=True)
class _Measures(Options, title="the measures"):
    layer: int | Literal["auto", "highest-norm"] = aligners.layer_option(
        "the decoder layer whose links are read, as for extract", "auto"
    )
    head: int | Literal["auto"] = option("the head that is read", "auto", parse=index_or("auto"), metavar="N|auto")
    all_measures: bool = option(
        "compute information and exchange for every pair, not only for improbable or badly linked ones", False
    )


@dataclass(frozen=True, kw_only=True)
class InspectOptions(_Measures, models.ModelOptions, models.BlockOptions, models.RunOptions):
    """The options of ``norm-align inspect``."""

    source: str = argument(models.SOURCE, metavar="SOURCE")
    target: str | None = argument("their translations, tokenised, one per line", metavar="TARGET", nargs="?")
    tokenize: bool = models.tokenize_option()
    flagged: bool = option(
        "write only the lines that raise a flag; a negation or a single wrong word raises none", False
    )
    format: Literal["tsv", "json"] = option("a table with a header, or a line of JSON for each line of text", "tsv")


def _limit(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    return check_choice("limit", name, _MONITORED), share(number)


@dataclass(frozen=True, kw_only=True)
class MonitorOptions(aligners.LexiconOptions):
    """The options of ``norm-align monitor``."""

    matrices: str = argument("what extract or decode --format matrix wrote; - is standard input", metavar="MATRICES")
    window: int = option("how many lines are measured together (default: 1,000)", 1000, parse=positive, metavar="N")
    limit: list[tuple[str, float]] = option(
        f"end with exit code 3 behind the first window with more than NUMBER of NAME: {', '.join(_MONITORED)}; may be "
        "given several times",
        [],
        parse=_limit,
        metavar="NAME=NUMBER",
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
        counts = options.extract(inputs, inspector, sys.stdout.buffer, report, splits=splits, writing=writing)
        raised = ", ".join(f"{writing.raised[flag]:,} {flag}" for flag in FLAGS if writing.raised[flag])
        report(f"{counts.lines:,} lines, {writing.flagged_lines:,} flagged{raised and ': '}{raised}; {counts.bad}")
        if writing.raised["exchanged"] > max(_FEW, (counts.lines - counts.bad_lines) / 2):
            report("most pairs are more probable with source and target exchanged: exchange SOURCE and TARGET")


class _Writing:
    """Writes the inspection of each pair, or of flagged ones alone, as JSON or a table; counts flags."""

    def __init__(self, *, as_json: bool, flagged: bool, report: Callable[[str], None]) -> None:
        self.as_json, self.only_flagged, self._report = as_json, flagged, report
        self.raised, self.flagged_lines = Counter[str](), 0

    def answers(self, align: "Inspector", pairs: Pairs) -> Iterator[tuple[int, Inspection | InvalidInputError]]:
        """Yield each pair's index and inspection."""
        aligners.choose(align.aligner, pairs, self._report)
        return align.inspect_each(pairs)

    def written(self, number: int, source: Sequence[str], target: Sequence[str], answer: Inspection) -> Written:
        """Count the flags of a pair, and return what is written."""
        self.raised.update(answer.flags)
        self.flagged_lines += bool(answer.flags)
        return Written(self._text(number, source, target, answer), 0)

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


def _monitor(options: MonitorOptions) -> int:
    from alignment.matrices import MatrixAligner

    lexicon = options.load_lexicon()
    if lexicon is None and "disagreement" in dict(options.limit):
        raise InvalidInputError("got a limit of disagreement without a lexicon; give one with --use-lexicon")
    reader = MatrixAligner(RECIPES["hmm"], None, count_text=False, languages=(None, None))
    matrices = models.text_source(options.matrices)
    sys.stdout.write(_Writing.row(["lines", *_MONITORED]))
    for block in cut([matrices], options.window):
        numbers: dict[str, list[float]] = {name: [] for name in _MONITORED}
        for pair in reader.read_block(block):
            numbers["unusable"].append(isinstance(pair, InvalidInputError))
            if isinstance(pair, InvalidInputError):
                to_stderr(str(pair))
            elif all(pair):
                if getattr(pair[1], "statistics", None) is None:
                    raise InvalidInputError(
                        "got attention; norm-align decode --format matrix makes probabilities of it"
                    )
                links = reader.read(np.zeros(0), *pair)
                probabilities = links.all_probabilities()
                numbers["entropy"].append(link_entropy(probabilities))
                numbers["uncovered"] += (np.concatenate(coverage(calibrated(probabilities))) < COVERED).tolist()
                if lexicon is not None:
                    dice = lexicon.dice(*pair)
                    numbers["disagreement"] += [bool(dice[j].max() > dice[j, i]) for i, j in links.links]
        means = {name: fmean(values) if values else nan for name, values in numbers.items()}
        cells = [f"{block.first}-{block.last}", *(f"{mean:.{_DIGITS}f}" for mean in means.values())]
        sys.stdout.write(_Writing.row(cells))
        sys.stdout.flush()
        for name, most in options.limit:
            if means[name] > most:
                to_stderr(f"lines {block.first}-{block.last}: {name} is {means[name]:.{_DIGITS}f}, above {most}")
                return 3
    return 0


MONITOR = Command(
    "monitor",
    "measure how links drift over a document or stream, and end a pipeline",
    MonitorOptions,
    _monitor,
    "norm-align monitor links.jsonl --limit uncovered=0.4",
    ("window", "limit", "use_lexicon"),
)
