"""Declares the options on files of gold alignments, and reads such a file."""

import argparse
from typing import get_args

from alignment.commands.running import text_source
from alignment.formats import GoldFormat, split_words
from alignment.formats.gold import GoldFile, Texts, scan_gold
from alignment.links import GoldAlignment
from captum_norm import InvalidInputError
from captum_norm.text.lines import error_at, quoted


def add_format(group: argparse._ArgumentGroup) -> None:
    """Declare ``--gold-format``, ``--gold-base`` and ``--gold-swapped``."""
    group.add_argument(
        "--gold-format",
        choices=get_args(GoldFormat),
        default="talp",
        help="talp: i-j sure, ipj possible; naacl: sentence i j [S|P]; alibi: sentence id, then talp; tsv: source, "
        "target and talp with tabs between them (default: %(default)s)",
    )
    group.add_argument(
        "--gold-base",
        type=int,
        choices=(0, 1),
        help="the index of the first word; required for talp (default: 1 for naacl, 0 for alibi and tsv)",
    )
    group.add_argument("--gold-swapped", action="store_true", help="links have the target first")


def check_base(options: argparse.Namespace) -> None:
    """Refuse talp without ``--gold-base``."""
    if options.gold_format == "talp" and options.gold_base is None:
        raise InvalidInputError("talp files count from 0 or from 1; give --gold-base 0 or --gold-base 1")


def scan(options: argparse.Namespace, sources: Texts | None, targets: Texts | None) -> GoldFile:
    """Read the file of ``--gold``; the first invalid link is an error.

    Args:
        options: the options.
        sources: the tokenised source sentences, to check that the links lie inside them; None for those in the file.
        targets: the target sentences, likewise.
    """
    check_base(options)
    return scan_gold(
        text_source(options.gold),
        format=options.gold_format,
        base=options.gold_base,
        swapped=options.gold_swapped,
        sources=sources,
        targets=targets,
    )


def read_gold_of(options: argparse.Namespace, sources: Texts, targets: Texts) -> list[GoldAlignment]:
    """Read the gold alignments of a text, one for each of its lines.

    Args:
        options: the options.
        sources: the tokenised source sentences; None for a line that cannot be used, which is not checked.
        targets: the target sentences, likewise.

    Raises:
        InvalidInputError: the file cannot be read, or is not of these sentences.
    """
    in_file = options.gold_format == "tsv"
    found = scan(options, *((None, None) if in_file else (sources, targets)))
    if in_file and len(found.pairs) != len(sources):
        raise InvalidInputError(f"{options.gold}: got {len(found.pairs)} sentence pairs, the text has {len(sources)}")
    for side, theirs, given in (("source", found.sources, sources), ("target", found.targets, targets)):
        for number, (own, text) in enumerate(zip(theirs or (), given, strict=True), 1):
            if text is not None and own is not None and split_words(own) != split_words(text):
                message = f"got the {side} {quoted(own)}, but the text has {quoted(text)}; align the file's sentences"
                raise error_at(text_source(options.gold), number, message)
    return [pair for pair in found.pairs if not isinstance(pair, InvalidInputError)]  # it has raised those
