r"""Alignment error rates during training, by layers and width: ``python -m benchmarks.alignment_training``.

```console
$ python -m benchmarks.alignment_training --out docs/alignment-training.md --corpus wpt03=DIR \
    --training build/translation/fr-en-w128-l3 --training build/translation/en-fr-w128-l3
```

A training is the folder of one run of ``benchmarks.translation.train``. Every measurement is kept in
``_static/alignment-training.json`` beside the page, so a second call measures only checkpoints that are new or have
changed, and adds them; without ``--training`` it draws the page anew.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from alignment.commands.sweep import corpora as corpora_of
from benchmarks.alignment_error import table
from benchmarks.checkpoints import DIRECTIONS, READ, SHIPPED, Measurement, Rate, completed, joined, order
from captum_norm.show import StandaloneFigure
from captum_norm.show.plots import COLORS, INK
from captum_norm.text.files import write_whole

STORIES = "the three stories"
STYLES: Mapping[str, Literal["-", "--"]] = {"norms": "-", "weights": "--"}
SIGNIFICANT = 0.05

INTRODUCTION = """\
This page shows how error rates by norms and by weights develop while a translation model is trained: AER in %, ± half
the 95 % bootstrap interval. The shipped models have 3 layers in the encoder and in the decoder and width 256;
they were trained for 4,000 updates with batches of at most 4,096 pieces. The other models differ in layers and width,
and were trained with batches of half that size:

```console
$ python -m benchmarks.translation.train --data build/translation --out build/translation/fr-en-w128-l3 \\
    --source fr --target en --width 128 --layers 3 --batch 2048
$ python -m benchmarks.alignment_training --out docs/alignment-training.md --corpus wpt03=DIR \\
    --training build/translation/fr-en-w128-l3
```

Their checkpoints, one every 250 updates, are not included; [all measurements](_static/{name}.json) are.

Nothing is chosen by gold alignments: norms and weights each read the place where their own links are most consistent
(`layer="auto"`, `setting="auto"`). `paper` is the recipe of Kobayashi et al. (2020) and reads all heads of a layer;
`hmm` reads one head (`head="auto"`). The three stories are scored as one text of {pairs} sentence pairs.
"""
CAPTION = """\
AER of the three stories by training updates, for both directions and every width. Above: the recipe of the paper,
below: hmm. Bands: 95 % intervals."""
AGAINST = """\
How many checkpoints of a direction have the lower error rate by norms or by weights, and for how many the difference is
significant (approximate randomisation; not corrected for the number of tests). *Mean*: error rate of norms − that of
weights. Checkpoints of one training are much alike.
"""
LAST = """\
The last checkpoint of each training; p is that of the difference between norms and weights. *Choice*: setting and layer
that norms chose for `paper`; *since*: after how many updates they chose them for good.
"""


def against_rows(found: Sequence[Measurement]) -> Iterator[list[str]]:
    """Yield how often norms and weights are better, by direction and recipe."""
    for direction, recipe in product(DIRECTIONS, READ):
        here = [one for one in found if (one.model.direction, one.recipe) == (direction, recipe)]
        if not here:
            continue
        differences = [one.norms.aer - one.weights.aer for one in here]
        cells = [str(len(here))]
        for sign in (-1, 1):
            better = [one for one, gap in zip(here, differences, strict=True) if sign * gap > 0]
            cells += [str(len(better)), str(sum(one.p < SIGNIFICANT for one in better))]
        yield [direction, recipe, *cells, f"{fmean(differences):+.1f}"]


def last_rows(found: Sequence[Measurement]) -> Iterator[list[str]]:
    """Yield the last checkpoint of every training."""
    for _, group in groupby(sorted(found, key=order), key=order):
        history = sorted(group, key=lambda one: one.model.updates)
        model = history[-1].model
        last = {one.recipe: one for one in history if one.model.updates == model.updates}
        cells = [str(model.width), str(model.layers), f"{model.parameters / 1e6:.1f}", f"{model.updates:,}"]
        for one in (last[recipe] for recipe in READ):
            cells += [str(one.norms), str(one.weights), f"{one.p:.4f}"]
        yield [model.direction, *cells, last["paper"].norms.place, since(history)]


def since(history: Sequence[Measurement]) -> str:
    """Return from which updates on norms chose the last place; of one checkpoint it is unknown."""
    places = [(one.model.updates, one.norms.place) for one in history if one.recipe == "paper"]
    if len(places) == 1:
        return ""
    start = places[-1][0]
    for updates, place in reversed(places):
        if place != places[-1][1]:
            break
        start = updates
    return f"{start:,}"


def draw(found: Sequence[Measurement]) -> Figure:
    """Draw error rates of one corpus by updates: a row for each recipe, a column for each direction and width."""
    trained = [one for one in found if one.model.training != SHIPPED]
    if not trained:
        raise SystemExit("got no measurement of a training; give --training")
    columns = sorted({order(one)[:2] for one in trained})
    depths = sorted({one.model.layers for one in trained})
    colors = dict(zip(depths, COLORS, strict=False))
    figure = StandaloneFigure(figsize=(1.2 + 2.5 * len(columns), 6.4), dpi=150, layout="constrained")
    grid = figure.subplots(len(READ), len(columns), sharex=True, sharey="row", squeeze=False)
    for row, recipe in zip(grid, READ, strict=True):
        for axes, (direction, width) in zip(row, columns, strict=True):
            here = [one for one in found if (order(one)[0], one.recipe) == (direction, recipe)]
            for _, group in groupby(sorted(here, key=order), key=order):
                history = sorted(group, key=lambda one: one.model.updates)
                model = history[0].model
                if model.training == SHIPPED:
                    _points(axes, history[0])
                elif model.width == width:
                    _lines(axes, history, colors[model.layers])
            axes.grid(color="0.92")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylim(bottom=0)
        row[0].set_ylabel(f"AER in %, {recipe}")
    for axes, (direction, width) in zip(grid[0], columns, strict=True):
        axes.set_title(f"{DIRECTIONS[direction].replace('-', ' → ')}, width {width}", fontsize="medium")
    for axes in grid[-1]:
        axes.set_xlabel("updates")
    handles = [Line2D([], [], color=colors[layers], label=f"{layers} layer{'s' * (layers > 1)}") for layers in depths]
    handles += [Line2D([], [], color=INK, linestyle=style, label=name) for name, style in STYLES.items()]
    handles.append(Line2D([], [], color=INK, linestyle="", marker="D", label="in the package"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3 * len(columns) // 2, frameon=False)
    return figure


def _lines(axes: Axes, history: Sequence[Measurement], color: str) -> None:
    updates = [one.model.updates for one in history]
    for method, style in STYLES.items():
        rates: list[Rate] = [getattr(one, method) for one in history]
        axes.plot(updates, [rate.aer for rate in rates], color=color, linestyle=style, linewidth=1.3)
        low, high = ([rate.aer + sign * rate.interval for rate in rates] for sign in (-1, 1))
        axes.fill_between(updates, low, high, color=color, alpha=0.12, linewidth=0)


def _points(axes: Axes, one: Measurement) -> None:
    for method, face in (("norms", INK), ("weights", "white")):
        rate: Rate = getattr(one, method)
        axes.errorbar(
            one.model.updates, rate.aer, rate.interval, color=INK, marker="D", markersize=4, markerfacecolor=face
        )


def page(name: str, found: Sequence[Measurement]) -> str:
    """Return the page of a name, with a section for each corpus, the stories first."""
    pairs = sum(map(len, corpora_of("alibi")))
    parts = ["# Alignment during training\n", INTRODUCTION.format(name=name, pairs=pairs)]
    parts.append(f"![{CAPTION}](_static/{name}.png)\n")
    for corpus in sorted({one.corpus for one in found}, key=lambda name: (name != STORIES, name)):
        here = [one for one in found if one.corpus == corpus]
        parts += [f"## {corpus[0].upper()}{corpus[1:]}\n", AGAINST]
        header = ["direction", "recipe", "checkpoints", "norms lower", "p < .05", "weights lower", "p < .05", "mean"]
        parts += [table(header, list(against_rows(here))), LAST]
        header = ["direction", "width", "layers", "parameters (M)", "updates"]
        header += [f"{recipe}, {column}" for recipe in READ for column in ("norms", "weights", "p")]
        parts.append(table([*header, "choice", "since"], list(last_rows(here))))
    return "\n".join(parts)


def main() -> None:
    """Measure what is new, write the page and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--training", action="append", default=[], type=Path, help="a folder of checkpoints")
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the stories are always included")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpora = [joined(STORIES, corpora_of("alibi"))]
    corpora += [corpus for text in arguments.corpus for corpus in corpora_of(text)]
    files = arguments.out.parent / "_static" / arguments.out.stem
    found = completed(files.with_suffix(".json"), arguments.training, corpora)
    draw([one for one in found if one.corpus == STORIES]).savefig(files.with_suffix(".png"))
    write_whole(arguments.out, page(files.name, found).encode())


if __name__ == "__main__":
    main()
