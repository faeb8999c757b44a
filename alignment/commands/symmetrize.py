"""Runs ``norm-align symmetrize``: merges the alignments of both directions, from any aligner."""

import argparse
from collections.abc import Iterator
from itertools import zip_longest

from alignment.commands.evaluated_files import AlignmentFile, alignment_file
from alignment.commands.running import print_whole, text_source
from alignment.formats import TextSource, format_pharaoh, read_pharaoh
from alignment.formats.text import write_text
from alignment.links import Alignment
from alignment.pipeline.extraction import output_file
from alignment.symmetrization import SYMMETRIZATIONS
from captum_norm import InvalidInputError
from captum_norm.commands.command import Command
from captum_norm.text.lines import error_at, source_name


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    marks = "[:swapped][:base1]"
    parser.add_argument(
        "forward",
        type=alignment_file,
        metavar="FORWARD",
        help="the alignments of the model or aligner from source to target, i-j with the source first and from 0, one "
        f"sentence pair a line, given as FILE{marks}: :swapped for target first, :base1 for indices from 1; - is "
        "standard input",
    )
    parser.add_argument(
        "reverse",
        type=alignment_file,
        metavar="REVERSE",
        help="those of the opposite direction, likewise; also with the source first, as fast_align -r writes them, "
        "unless :swapped (as norm-align extract TARGET SOURCE writes them)",
    )
    parser.add_argument(
        "--heuristic",
        choices=SYMMETRIZATIONS,
        default="grow-diag",
        help="Moses' name of the way to merge (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="FILE", help="the merged alignments, i-j (default: standard output)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def _run(options: argparse.Namespace) -> None:
    files = (options.forward, options.reverse)
    if [file.path for file in files] == ["-", "-"]:
        raise InvalidInputError("got - for both directions; standard input can be read only once")
    for file in files:
        if file.talp:
            raise InvalidInputError(f"got {file.argument}; possible links (ipj) cannot be merged, give i-j")
    sources = [text_source(file.path) for file in files]
    merge = SYMMETRIZATIONS[options.heuristic]
    lines = (f"{format_pharaoh(merge(*pair))}\n".encode() for pair in _pairs(files, sources))
    if options.out is None:
        print_whole(lines)
    elif (out := output_file(options.out, sources, replace=options.overwrite)) is None:
        raise InvalidInputError(f"cannot write {options.out}: it is no regular file; write to standard output instead")
    else:
        write_text(out, lines)


def _pairs(
    files: tuple[AlignmentFile, AlignmentFile], sources: list[TextSource]
) -> Iterator[tuple[Alignment, Alignment]]:
    """Yield the links of both files, source first, from 0."""
    read = (_links(file, source) for file, source in zip(files, sources, strict=True))
    for number, (forward, reverse) in enumerate(zip_longest(*read), 1):
        if forward is None or reverse is None:
            short, long = sources if forward is None else sources[::-1]
            message = f"got no such line, but {source_name(long)} has one; expected equally many in both"
            raise error_at(short, number, message)
        yield forward, reverse


def _links(file: AlignmentFile, source: TextSource) -> Iterator[Alignment]:
    for number, found in enumerate(read_pharaoh(source), 1):
        links = found.transposed() if file.swapped else found
        if file.base:
            if any(0 in link for link in links):
                raise error_at(source, number, "got the index 0, expected indices from 1; leave out :base1")
            links = Alignment((i - 1, j - 1) for i, j in links)
        yield links


COMMAND = Command("symmetrize", "merge the alignments of both directions, from any aligner", _add_arguments, _run)
