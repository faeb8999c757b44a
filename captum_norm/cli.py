"""Runs the command line ``captum-norm``.

A new subcommand is one file in :mod:`captum_norm.commands` and one entry here.
"""

import sys

from captum_norm.commands import analyze, compare, demo, explain, models
from captum_norm.commands.program import Program

main = Program(
    "captum-norm",
    "Explain Transformers by the norms of the vectors they add up.",
    (explain.COMMAND, compare.COMMAND, analyze.COMMAND, models.COMMAND, demo.COMMAND),
).main
"""Run ``captum-norm``, see :meth:`captum_norm.commands.program.Program.main`."""

if __name__ == "__main__":
    sys.exit(main())
