"""Runs ``captum-norm demo``: weights and norms of a real model side by side."""

import argparse
from pathlib import Path

from captum_norm.commands.command import Command
from captum_norm.commands.outputs import output_path, write_outputs


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="FILE.png",
        type=output_path([".png"]),
        default=Path("captum-norm-demo.png"),
        help="where to draw the maps (default: %(default)s)",
    )


def _run(options: argparse.Namespace) -> None:
    from captum_norm import demo
    from captum_norm.commands.terminal import Terminal
    from captum_norm.show.figures import figure_bytes

    findings = demo.compare_layers()
    write_outputs({options.out: figure_bytes(demo.draw(findings))})
    console = Terminal()
    demo.show(findings, console)
    console.say(f"Both maps, side by side: {options.out}")


COMMAND = Command("demo", "see on a real model why norms tell more than weights", _add_arguments, _run)
