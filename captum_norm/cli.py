"""Runs the command line ``captum-norm``.

A new subcommand is one file in :mod:`captum_norm.commands` and one entry here.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from captum_norm.commands import analyze, compare, doctor, explain, models, serve
from captum_norm.commands.program import Command, Options, Program, option
from captum_norm.commands.shared import output_path, write_outputs


@dataclass(frozen=True, kw_only=True)
class _DemoOptions(Options):
    out: Path = option(
        "where to draw the maps", Path("captum-norm-demo.png"), parse=output_path(".png"), metavar="FILE.png"
    )


def _run_demo(options: _DemoOptions) -> None:
    from captum_norm import demo
    from captum_norm.commands.terminal import Terminal
    from captum_norm.show import figure_bytes

    findings = demo.compare_layers()
    write_outputs({options.out: figure_bytes(demo.draw(findings))})
    console = Terminal()
    demo.show(findings, console)
    console.say(f"Both maps, side by side: {options.out}")


_DEMO = Command(
    "demo",
    "show on a real model how norms differ from attention weights",
    _DemoOptions,
    _run_demo,
    example="captum-norm demo --out maps.png",
)

main = Program(
    "captum-norm",
    "Explain Transformers by the norms of the vectors they add up.",
    (explain.COMMAND, compare.COMMAND, analyze.COMMAND, models.COMMAND, doctor.COMMAND, serve.COMMAND, _DEMO),
).main
"""Run ``captum-norm``, see :meth:`captum_norm.commands.program.Program.main`."""

if __name__ == "__main__":
    sys.exit(main())
