"""Runs the command line ``norm-align``.

A new subcommand is one file in :mod:`alignment.commands` and one entry here.
"""

import sys

from alignment.commands import evaluate, extract, sweep, translate
from captum_norm.commands.program import Program

_COMMANDS = (extract.COMMAND, evaluate.COMMAND, sweep.COMMAND, translate.COMMAND)

main = Program("norm-align", "Word alignments of translations, and how good they are.", _COMMANDS).main
"""Run ``norm-align``, as :meth:`captum_norm.commands.program.Program.main` says."""

if __name__ == "__main__":
    sys.exit(main())
