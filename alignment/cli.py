"""Runs the command line ``norm-align``.

A new subcommand is one file in :mod:`alignment.commands` and one entry here.
"""

import sys

from alignment.commands import evaluate, extract, inspect, sweep, transfer_tags, translate
from captum_norm.commands.program import Program

_COMMANDS = (
    extract.COMMAND,
    extract.DECODE,
    evaluate.SYMMETRIZE,
    evaluate.COMMAND,
    sweep.COMMAND,
    translate.COMMAND,
    inspect.COMMAND,
    inspect.MONITOR,
    transfer_tags.COMMAND,
)

main = Program("norm-align", "Align words by translation models, and score alignments.", _COMMANDS).main
"""Run ``norm-align``; see :meth:`captum_norm.commands.program.Program.main`."""

if __name__ == "__main__":
    sys.exit(main())
