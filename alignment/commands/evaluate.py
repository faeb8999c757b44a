"""Runs ``norm-align evaluate``: scores alignment files against a gold alignment.

A report has one record per system. Rates are percentages; ``aer_mean`` and ``aer_interval`` are the mean of the
bootstrapped AER and half the width of its 95 % interval, as in sacrebleu. Warnings go to standard error.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alignment.aer import AER, TRIALS, AERScore, paired_significance, reliability, score_curve
from alignment.commands import evaluated_files
from alignment.commands import gold as gold_options
from alignment.links import Alignment, GoldAlignment
from alignment.symmetrization import SYMMETRIZATIONS
from captum_norm import InvalidInputError, __version__
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import positive, resamples
from captum_norm.commands.outputs import output_path, write_outputs
from captum_norm.results.tables import csv_records, json_text
from captum_norm.text.characters import spelled_out

_UNBOUNDED = 10_000  # columns: outside a terminal, lines are neither folded nor cut


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gold", metavar="GOLD", help="the gold alignments")
    parser.add_argument(
        "systems",
        nargs="+",
        type=evaluated_files.system_file,
        metavar="SYSTEM",
        help="alignments in Pharaoh format (i-j, source first, from 0), given as [NAME=]FILE[:swapped][:base1][:talp]: "
        ":swapped for target first, as norm-align extract TARGET SOURCE writes; :base1 for indices from 1; :talp to "
        "count possible links (ipj) as links, too. The first system is the baseline. One of all files may be -, "
        "standard input",
    )
    gold = parser.add_argument_group("the gold alignments")
    gold_options.add_format(gold)
    texts = parser.add_argument_group("the sentences, to check that every link lies inside them; tsv files have them")
    texts.add_argument("--source", metavar="FILE", help="the tokenised source sentences, one a line")
    texts.add_argument("--target", metavar="FILE", help="the tokenised target sentences, one a line")
    parser.add_argument(
        "--skip-invalid",
        action="store_true",
        help="skip malformed and out-of-range links, and sentence pairs for which a file has no valid line, and report "
        "how many on standard error; otherwise the first one is an error",
    )
    parser.add_argument(
        "--symmetrize",
        action="append",
        default=[],
        choices=SYMMETRIZATIONS,
        metavar="METHOD",
        help="also evaluate the two systems, forward and reverse, merged by this method; may be given several times: "
        + ", ".join(SYMMETRIZATIONS),
    )
    parser.add_argument(
        "--bootstrap",
        type=resamples,
        default=1000,
        metavar="N",
        help="resamples for the 95%% interval of AER; 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--paired",
        choices=(*TRIALS, "none"),
        default="ar",
        help="how to compare systems with the baseline: approximate randomisation, bootstrap resampling or not at all "
        "(default: %(default)s)",
    )
    scores = parser.add_argument_group("scores of links, i-j:p, as norm-align extract --scores writes them")
    scores.add_argument(
        "--curve",
        type=output_path([".csv"]),
        metavar="FILE.csv",
        help="write AER, precision and recall of the links above each threshold, for every system",
    )
    scores.add_argument(
        "--reliability",
        type=output_path([".csv"]),
        metavar="FILE.csv",
        help="write how many links of each interval of scores are right, and print the expected calibration error",
    )
    defaults = ", ".join(f"{count} for {test}" for test, count in TRIALS.items())
    parser.add_argument(
        "--trials",
        type=positive,
        metavar="N",
        help=f"number of trials of the comparison (default: {defaults})",
    )
    form = parser.add_mutually_exclusive_group()
    for name, what in (("json", "everything as JSON"), ("csv", "a row for each system as CSV")):
        form.add_argument(
            f"--{name}", dest="report", action="store_const", const=name, default="table", help=f"print {what}"
        )


def _run(options: argparse.Namespace) -> None:
    _check(options)
    file = evaluated_files.AlignmentFile(
        "gold", options.gold, options.gold_format, options.gold_base, options.gold_swapped, gold=True
    )
    texts = evaluated_files.read_sentences(options.source), evaluated_files.read_sentences(options.target)
    gold, read = evaluated_files.read_systems(file, options.systems, texts, skip_invalid=options.skip_invalid)
    systems = [(system.name, alignments) for system, alignments in zip(options.systems, read, strict=True)]
    systems += [(method, list(map(SYMMETRIZATIONS[method], *read))) for method in options.symmetrize]
    report = _evaluated(gold, systems, options)
    if options.curve or options.reliability:
        write_outputs(_score_files(gold, options, report))
    if options.report == "table":
        _show_table(report)
    else:
        sys.stdout.write(json_text(report, indent=2) if options.report == "json" else csv_records(report["systems"]))


def _check(options: argparse.Namespace) -> None:
    """Check combinations of options."""
    files = [options.gold, *(system.path for system in options.systems), options.source, options.target]
    if files.count("-") > 1:
        raise InvalidInputError("got - more than once; standard input can be read only once")
    gold_options.check_base(options)
    if (options.curve or options.reliability) and options.skip_invalid:
        raise InvalidInputError("got --skip-invalid with --curve or --reliability, which need every line; leave it out")
    if options.symmetrize and len(options.systems) != 2:
        raise InvalidInputError(f"got --symmetrize with {len(options.systems)} systems, expected forward and reverse")


def _evaluated(
    gold: list[GoldAlignment], systems: Sequence[tuple[str, list[Alignment]]], options: argparse.Namespace
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
        found = paired_significance(baseline, rest, gold, test=options.paired, trials=options.trials)
        report["paired"] = {"test": options.paired, "baseline": systems[0][0], "signature": found.signature}
        for record, p_value, identical in zip(records[1:], found.p_values, found.identical, strict=True):
            record.update(p_value=p_value, identical=identical)
    return report


def _score_files(gold: list[GoldAlignment], options: argparse.Namespace, report: dict[str, Any]) -> dict[Path, bytes]:
    """The files of ``--curve`` and ``--reliability``; adds the calibration errors to the report."""
    points, bins = list[dict[str, Any]](), list[dict[str, Any]]()
    for system, record in zip(options.systems, report["systems"], strict=False):
        scores = evaluated_files.read_scores(system)
        points += [
            {"system": system.name, "min_score": least, **_rates(score)}
            for least, score in score_curve(scores, gold).items()
        ]
        found = reliability(scores, gold)
        bins += [{"system": system.name, **asdict(one)} for one in found.bins]
        record["calibration_error"] = found.error
    files = ((options.curve, points), (options.reliability, bins))
    return {path: csv_records(rows).encode() for path, rows in files if path is not None}


def _rates(score: AERScore) -> dict[str, float | int]:
    names = ("aer", "precision", "recall", "f1", "links")
    return {name: getattr(score, name) for name in names}


def _record(name: str, score: AERScore) -> dict[str, Any]:
    return {
        "system": name,
        "aer": score.aer,
        "aer_mean": score.resampled_mean,
        "aer_interval": score.interval,
        "precision": score.precision,
        "recall": score.recall,
        "f1": score.f1,
        "links": score.links,
        "sure_hits": score.sure_hits,
        "possible_hits": score.possible_hits,
        "p_value": None,
        "identical": None,
        "calibration_error": None,
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
    if report["systems"][0]["calibration_error"] is not None:
        columns["calibration error"] = lambda record: (
            "" if record["calibration_error"] is None else f"{record['calibration_error']:.3f}"
        )
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
    lines = [f"AER|{report['signature']}"]
    if report["paired"]:
        lines.append(f"p|{report['paired']['signature']}")
    console.say("\n".join(["", *lines]))


def _shown_p_value(record: dict[str, Any]) -> str:
    if record["p_value"] is None:
        return "baseline"
    return f"{record['p_value']:.2g}{' (identical)' if record['identical'] else ''}"


COMMAND = Command("evaluate", "score alignment files against a gold alignment (AER)", _add_arguments, _run)
