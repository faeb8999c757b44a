r"""How far probabilities of links can be relied on: fits their calibration, and draws a reliability diagram.

```console
$ python -m benchmarks.alignment_calibration --corpus wpt03=DIR --out docs/_static/reliability.png
```
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alignment import BidirectionalAligner, load_shipped_model
from alignment.commands.sweep import corpora as corpora_of
from alignment.corpora import ParallelGold
from alignment.links import CALIBRATION, GoldAlignment, Link, ScoredAlignment
from benchmarks.alignment_lexicon import Kept

Scores = Mapping[Link, float]
BINS = 10
TITLES = ("both directions", "both directions, lexicon of the text")


@dataclass(frozen=True)
class Reliability:
    """The expected calibration error [Guo et al. 2017]; of each tenth of scores, mean score, precision and links."""

    error: float
    bins: Sequence[tuple[float, float, int]]


def reliability(scores: Sequence[Scores], gold: Sequence[GoldAlignment]) -> Reliability:
    """Compare scores of each pair's links with how often the links are right: sure or possible."""
    pairs = zip(scores, gold, strict=True)
    judged = np.array([(score, link in pair.possible) for links, pair in pairs for link, score in links.items()])
    numbers = np.minimum((judged[:, 0] * BINS).astype(int), BINS - 1)
    inside = [judged[numbers == number] for number in range(BINS)]
    bins = [(*rows.mean(0).tolist(), len(rows)) for rows in inside if len(rows)]
    distance = sum(abs(score - precision) * count for score, precision, count in bins)
    return Reliability(distance / len(judged), bins)


def aligned(corpora: Sequence[ParallelGold]) -> list[list[list[ScoredAlignment]]]:
    """Align each corpus with both shipped models, without a lexicon and with one."""
    loaded = [load_shipped_model(name) for name in ("fr-en", "en-fr")]
    found = []
    for corpus in corpora:
        forward, reverse = (Kept(*one, head="auto", recipe="hmm") for one in loaded)
        found.append(
            [
                BidirectionalAligner(forward, reverse, count_text=count).align_scored(corpus.sources, corpus.targets)
                for count in (False, True)
            ]
        )
    return found


def fitted(scores: Sequence[float], right: Sequence[bool]) -> float:
    """The offset of calibrated scores' log-odds that makes links most likely: their mean is then their precision."""
    odds = np.log(scores) - np.log1p(-np.minimum(scores, 1 - 1e-15))
    low, high = -9.0, 9.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if np.mean(1 / (1 + np.exp(-odds - middle))) < np.mean(right):
            low = middle
        else:
            high = middle
    return low


def draw(axes: Axes, title: str, found: Sequence[tuple[str, Reliability]]) -> None:
    """Draw the precision of links by their score."""
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for name, measured in found:
        bins = [interval for interval in measured.bins if interval[2] >= 10]
        scores, precision, links = (np.array(column, float) for column in zip(*bins, strict=True))
        [line] = axes.plot(scores, precision, linewidth=1, label=f"{name}, error {measured.error:.2f}")
        axes.scatter(scores, precision, 4 * np.sqrt(links), color=line.get_color())
    axes.set(title=title, xlabel="score", ylabel="right links", xlim=(0.4, 1.01), ylim=(0.4, 1.01), aspect="equal")
    axes.legend(frameon=False, loc="lower right", fontsize="small")


def main() -> None:
    """Fit on the stories, measure on all texts, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the stories are always included")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    stories = corpora_of("alibi")
    corpora = [*stories, *chain.from_iterable(map(corpora_of, arguments.corpus))]
    corpora = [corpus if corpus.source_language == "fr" else corpus.swapped() for corpus in corpora]
    found = aligned(corpora)
    links = [
        (score, link in pair.possible)
        for corpus, systems in zip(corpora[: len(stories)], found, strict=False)
        for system in systems
        for one, pair in zip(system, corpus.gold, strict=True)
        for link, score in one.scored_links()
    ]
    scores, right = zip(*links, strict=True)
    print(f"fitted on the stories: log-odds + {CALIBRATION + fitted(scores, right):.2f}, used: + {CALIBRATION}")
    figure = Figure((9, 4.6), layout="constrained")
    for axes, title, systems in zip(figure.subplots(1, 2), TITLES, zip(*found, strict=True), strict=True):
        measured = []
        for corpus, system in zip(corpora, systems, strict=True):
            kept: list[Scores] = [dict(one.scored_links()) for one in system]
            measured.append((corpus.name, reliability(kept, corpus.gold)))
            print(f"{title}, {corpus.name}: expected calibration error {measured[-1][1].error:.3f}")
        draw(axes, title, measured)
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
