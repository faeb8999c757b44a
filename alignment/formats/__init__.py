"""Reads and writes files of alignments, gold alignments and parallel text."""

from alignment.formats.gold import GoldFormat, parse_talp, read_gold
from alignment.formats.output import Output, OutputStyle
from alignment.formats.text import (
    format_pharaoh,
    parse_pharaoh,
    read_parallel,
    read_pharaoh,
    split_words,
    write_pharaoh,
)
from captum_norm.text.lines import TextSource

__all__ = [
    "GoldFormat",
    "Output",
    "OutputStyle",
    "TextSource",
    "format_pharaoh",
    "parse_pharaoh",
    "parse_talp",
    "read_gold",
    "read_parallel",
    "read_pharaoh",
    "split_words",
    "write_pharaoh",
]
