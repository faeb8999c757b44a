"""Reads and writes files of alignments, gold alignments and parallel text."""

from alignment.formats.alibi import read_identified
from alignment.formats.gold import GoldFormat, parse_talp, read_gold
from alignment.formats.matrices import write_npz
from alignment.formats.output import Output, OutputStyle
from alignment.formats.parallel import read_parallel
from alignment.formats.pharaoh import format_pharaoh, parse_pharaoh, parse_scored_pharaoh, read_pharaoh, write_pharaoh
from alignment.formats.text import split_words
from captum_norm.text.lines import TextSource

__all__ = [
    "GoldFormat",
    "Output",
    "OutputStyle",
    "TextSource",
    "format_pharaoh",
    "parse_pharaoh",
    "parse_scored_pharaoh",
    "parse_talp",
    "read_gold",
    "read_identified",
    "read_parallel",
    "read_pharaoh",
    "split_words",
    "write_npz",
    "write_pharaoh",
]
