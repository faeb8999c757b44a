"""Runs ``norm-align evaluate``, which scores files of alignments against a gold alignment, and ``symmetrize``."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from alignment.aer import AER, AERScore, Change, find_correction, paired_significance
from alignment.commands.models import print_whole, refuse_two_streams, regular_output, text_source
from alignment.formats import GoldFormat, TextSource, format_pharaoh, parse_pharaoh, read_parallel
from alignment.formats.gold import GoldFile, scan_gold
from alignment.formats.text import write_text
from alignment.links import Alignment, GoldAlignment
from alignment.symmetrization import SYMMETRIZATIONS
from captum_norm import InvalidInputError, __version__
from captum_norm.bars import to_stderr
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.commands.shared import resamples
from captum_norm.results.tables import csv_records, json_text
from captum_norm.text.characters import spelled_out
from captum_norm.text.lines import error_at, located, read_lines

Sides = tuple[Sequence[str] | None, Sequence[str] | None]
"""The tokenised source and target sentences; None if unknown."""

_UNBOUNDED = 10_000  # columns: outside a terminal, lines are neither folded nor cut
_MARKS: dict[str, dict[str, Any]] = {"swapped": {"swapped": True}, "base1": {"base": 1}}
_FILE = re.compile(rf"(.+?)((?::(?:{'|'.join(_MARKS)}))*)", re.DOTALL)
_NAMED = re.compile(r"([^=/]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class AlignmentFile:
    """A file of alignments (``-`` is standard input), and how to read it."""

    name: str
    path: str
    format: GoldFormat = "talp"
    base: Literal[0, 1] | None = 0
    swapped: bool = False
    gold: bool = False

    @property
    def argument(self) -> str:
        """How it is given on the command line: ``FILE:swapped:base1``, ``--gold-base 1 --gold-swapped``."""
        if self.gold:
            return f"--gold-base {self.base}{' --gold-swapped' if self.swapped else ''}"
        return f"{self.path}{':swapped' if self.swapped else ''}{':base1' if self.base else ''}"


def alignment_file(text: str) -> AlignmentFile:
    """Parse ``FILE[:swapped][:base1]``."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise InvalidInputError("got no file name")
    path, marks = match.groups()
    file = AlignmentFile(path, path)
    for mark in marks.split(":")[1:]:
        file = replace(file, **_MARKS[mark])
    return file


def system_file(text: str) -> AlignmentFile:
    """Parse ``[NAME=]FILE[:swapped][:base1]``."""
    match = _NAMED.fullmatch(text)
    return alignment_file(text) if match is None else replace(alignment_file(match[2]), name=match[1])


@dataclass(frozen=True, kw_only=True)
class GoldOptions(Options, title="the gold alignments"):
    """The format of a file of gold alignments."""

    gold_format: GoldFormat = option(
        "how the gold links are written; talp: i-j sure, ipj possible; naacl: sentence i j [S|P]; alibi: sentence id, "
        "then talp; tsv: source, target and talp with tabs between them",
        "talp",
    )
    gold_base: Literal[0, 1] | None = option(
        "the index of the first word, required for talp (default: 1 for naacl, 0 for alibi and tsv)"
    )
    gold_swapped: bool = option("gold links have the target first", False)

    def gold_file(self, path: str) -> AlignmentFile:
        """The file of gold alignments."""
        if self.gold_format == "talp" and self.gold_base is None:
            raise InvalidInputError("talp files count from 0 or from 1; give --gold-base 0 or --gold-base 1")
        return AlignmentFile("gold", path, self.gold_format, self.gold_base, self.gold_swapped, gold=True)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(GoldOptions):
    """The options of ``norm-align evaluate``."""

    gold: str = argument("the gold alignments", metavar="GOLD")
    systems: list[AlignmentFile] = argument(
        "alignments in Pharaoh format (i-j, source first, from 0), given as [NAME=]FILE[:swapped][:base1]; "
        ":swapped for target first, as norm-align extract TARGET SOURCE writes; :base1 for indices from 1. The first "
        "system is the baseline. One of the files, GOLD included, may be -, standard input",
        parse=system_file,
        metavar="SYSTEM",
        nargs="+",
    )
    source: str | None = option(
        "the tokenised source sentences, one per line; every link must lie inside them; tsv files contain them",
        metavar="FILE",
    )
    target: str | None = option("the tokenised target sentences, likewise", metavar="FILE")
    bootstrap: int = option("resamples for the 95%% interval of AER; 0 for none", 1000, parse=resamples, metavar="N")
    paired: Literal["ar", "bs", "none"] = option(
        "how to compare systems with the baseline: approximate randomisation, bootstrap resampling or not at all", "ar"
    )
    json: bool = option("print everything as JSON", False, exclusive=True)
    csv: bool = option("print a row for each system as CSV", False, exclusive=True)


def _run(options: EvaluateOptions) -> None:
    refuse_two_streams(options.gold, *(system.path for system in options.systems), options.source, options.target)
    texts = read_sentences(options.source), read_sentences(options.target)
    gold, alignments = read_systems(options.gold_file(options.gold), options.systems, texts)
    names = [system.name for system in options.systems]
    report = _evaluated(gold, list(zip(names, alignments, strict=True)), options)
    if options.json:
        sys.stdout.write(json_text(report, indent=2))
    elif options.csv:
        sys.stdout.write(csv_records(report["systems"]))
    else:
        _show_table(report)


def _evaluated(
    gold: list[GoldAlignment], systems: Sequence[tuple[str, list[Alignment]]], options: EvaluateOptions
) -> dict[str, Any]:
    metric = AER([gold])
    scores = [metric.corpus_score(alignments, None, max(options.bootstrap, 1)) for _, alignments in systems]
    records = [_record(name, score) for (name, _), score in zip(systems, scores, strict=True)]
    report: dict[str, Any] = {
        "gold": {
            "sentence_pairs": len(gold),
            "sure_links": sum(len(pair.sure) for pair in gold),
            "possible_links": sum(len(pair.possible) for pair in gold),
        },
        "systems": records,
        "signature": metric.get_signature().format(),
        "paired": None,
        "version": __version__,
    }
    if options.paired != "none" and len(systems) > 1:
        (_, baseline), *others = systems
        rest = [alignments for _, alignments in others]
        test = paired_significance(baseline, rest, gold, test=options.paired)
        report["paired"] = {"test": options.paired, "baseline": systems[0][0], "signature": test.signature}
        for record, p_value, identical in zip(records[1:], test.p_values, test.identical, strict=True):
            record.update(p_value=p_value, identical=identical)
    return report


def _record(name: str, score: AERScore) -> dict[str, Any]:
    return {
        "system": name,
        "aer": score.aer,
        "aer_mean": score.resampled_mean,
        "aer_interval": score.interval,
        **{name: getattr(score, name) for name in ("precision", "recall", "f1", "links")},
        "sure_hits": score.sure_hits,
        "possible_hits": score.possible_hits,
        **dict.fromkeys(("p_value", "identical")),
    }


def _show_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    from captum_norm.commands.terminal import Terminal

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "AER": lambda record: f"{record['aer']:.1f}",
        "95 %": lambda record: f"± {record['aer_interval']:.1f}",
        "precision": lambda record: f"{record['precision']:.1f}",
        "recall": lambda record: f"{record['recall']:.1f}",
        "F1": lambda record: f"{record['f1']:.1f}",
        "links": lambda record: str(record["links"]),
        "p": _shown_p_value,
    }
    if report["systems"][0]["aer_interval"] is None:
        del columns["95 %"]
    if report["paired"] is None:
        del columns["p"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("system", overflow="fold")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for record in report["systems"]:
        table.add_row(spelled_out(record["system"]), *(show(record) for show in columns.values()))
    console = Terminal()
    if not console.is_terminal:
        console.width = _UNBOUNDED
    console.print(table)
    console.say(f"\nAER|{report['signature']}")
    if report["paired"]:
        console.say(f"p|{report['paired']['signature']}")


def _shown_p_value(record: dict[str, Any]) -> str:
    if record["p_value"] is None:
        return "baseline"
    return f"{record['p_value']:.2g}{' (identical)' if record['identical'] else ''}"


COMMAND = Command(
    "evaluate",
    "score alignment files against a gold alignment (AER)",
    EvaluateOptions,
    _run,
    "norm-align evaluate gold.talp norms.txt weights.txt --gold-base 1",
    ("gold_format", "gold_base", "gold_swapped", "source", "target", "json", "csv"),
)


def read_sentences(path: str | None) -> list[str] | None:
    """The sentences of one side, if they are in a file."""
    return None if path is None else [line for _, line in read_lines(text_source(path))]


def read_systems(
    gold: AlignmentFile, systems: Sequence[AlignmentFile], texts: Sides
) -> tuple[list[GoldAlignment], list[list[Alignment]]]:
    """Read gold alignments and the systems' alignments of the same sentence pairs; warn if they do not look right."""
    content = _read(gold, texts)
    count = len(content.pairs)
    if not count:
        raise InvalidInputError(f"{gold.path}: got no line, expected gold alignments")
    if not any(pair.possible for pair in content.pairs):
        raise InvalidInputError(f"{gold.path}: got no link in {count} lines, expected gold alignments")
    alignments = []
    for system in systems:
        pairs = _read(system, (content.sources, content.targets)).pairs
        if len(pairs) != count:
            message = f"got {len(pairs)} alignments, expected {count}, one for each gold alignment"
            raise InvalidInputError(f"{system.path}: {message}")
        for number, pair in enumerate(pairs, 1):
            if pair.sure != pair.possible:
                raise error_at(text_source(system.path), number, "got possible links (ipj), expected i-j")
        alignments.append([pair.possible for pair in pairs])
        _doubt(system, alignments[-1], content.pairs)
    return content.pairs, alignments


def _read(file: AlignmentFile, texts: Sides) -> GoldFile:
    try:
        return read_file(file, texts)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}{_hint(file, texts)}") from error


def read_file(file: AlignmentFile, texts: Sides) -> GoldFile:
    """Read the alignments of sentences, or of those in the file."""
    return scan_gold(
        text_source(file.path),
        format=file.format,
        base=file.base,
        swapped=file.swapped,
        sources=texts[0],
        targets=texts[1],
    )


def _hint(file: AlignmentFile, texts: Sides) -> str:
    """Base and order of sides with which all links lie inside known sentences, as a hint; empty if there are none."""
    options: list[tuple[Literal[0, 1], bool]] = [(0, False), (0, True), (1, False), (1, True)]
    for base, swapped in [] if file.path == "-" or texts == (None, None) else options:
        other = replace(file, base=base, swapped=swapped)
        try:
            read_file(other, texts)
        except InvalidInputError:
            continue
        return f"; as {other.argument} all its links would lie inside the sentences"
    return ""


def _doubt(file: AlignmentFile, alignments: list[Alignment], gold: list[GoldAlignment]) -> None:
    """Warn if a system's links look as if they were read with the wrong base or order of sides."""
    correction = find_correction(alignments, gold)
    if correction is None:
        return
    how = "the sides exchanged" if correction.change == "swapped" else f"indices {correction.change}"
    rates = f"AER {correction.corrected_aer:.1f} instead of {correction.aer:.1f}"
    advice = _advice(file, correction.change)
    message = f"{file.path}: with {how} its links would fit the gold far better ({rates}); {advice}"
    to_stderr(f"norm-align: warning: {message}")


def _advice(file: AlignmentFile, change: Change) -> str:
    if change == "swapped":
        first, other = "source" if file.swapped else "target", replace(file, swapped=not file.swapped)
        return f"if it has the {first} first, write {other.argument}, else check --gold-swapped"
    if change == "one less" or file.base == 1:
        base: Literal[0, 1] = 1 if change == "one less" else 0
        return f"if it counts from {base}, write {replace(file, base=base).argument}, else check --gold-base"
    return "if the gold counts from 1, write --gold-base 1"


@dataclass(frozen=True, kw_only=True)
class SymmetrizeOptions(Options):
    """The options of ``norm-align symmetrize``."""

    forward: AlignmentFile = argument(
        "the alignments of the model or aligner from source to target, i-j with the source first and from 0, one "
        "sentence pair a line, given as FILE[:swapped][:base1]: :swapped for target first, :base1 for indices from 1; "
        "- is standard input",
        parse=alignment_file,
        metavar="FORWARD",
    )
    reverse: AlignmentFile = argument(
        "the alignments of the opposite direction, in the same form; also with the source first, as fast_align -r "
        "writes them, unless :swapped (as norm-align extract TARGET SOURCE writes them)",
        parse=alignment_file,
        metavar="REVERSE",
    )
    heuristic: str = option("how to merge the links, by the name in Moses", "grow-diag", choices=SYMMETRIZATIONS)
    out: str | None = option("the merged alignments, i-j (default: standard output)", metavar="FILE")
    overwrite: bool = option("replace FILE if it exists", False)


def _run_symmetrize(options: SymmetrizeOptions) -> None:
    files = (options.forward, options.reverse)
    refuse_two_streams(*(file.path for file in files))
    sources = [text_source(file.path) for file in files]
    merge = SYMMETRIZATIONS[options.heuristic]
    lines = (f"{format_pharaoh(merge(*pair))}\n".encode() for pair in _pairs(files, sources))
    if options.out is None:
        print_whole(lines)
    else:
        write_text(regular_output(options.out, sources, overwrite=options.overwrite), lines)


def _pairs(files: Sequence[AlignmentFile], sources: Sequence[TextSource]) -> Iterator[list[Alignment]]:
    """Yield the links of both files, source first, from 0."""
    for number, lines in enumerate(read_parallel(*sources), 1):
        pair = []
        for file, source, line in zip(files, sources, lines, strict=True):
            with located(source, number):
                pair.append(_links(file, line))
        yield pair


def _links(file: AlignmentFile, line: str) -> Alignment:
    alignment = parse_pharaoh(line)
    links = alignment.transposed() if file.swapped else alignment
    if not file.base:
        return links
    if any(0 in link for link in links):
        raise InvalidInputError("got the index 0, expected indices from 1; leave out :base1")
    return Alignment((i - 1, j - 1) for i, j in links)


SYMMETRIZE = Command(
    "symmetrize",
    "merge the alignments of both directions, from any aligner",
    SymmetrizeOptions,
    _run_symmetrize,
    "norm-align symmetrize forward.txt reverse.txt --out merged.txt",
)
