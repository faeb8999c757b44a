r"""The documentation pages of alignment error rates: ``python -m benchmarks.alignment_error``.

Every shipped model aligns the three stories that come with the package and the test sets given; the two directions are
combined, with a lexicon and without, and eflomal aligns the same sentences.

```console
$ python -m benchmarks.alignment_error --out docs/alignment-error.md --corpus wpt03=DIR --data build/translation \
    --eflomal eflomal-align
```
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from alignment import Alignment
from alignment.aer import AER, AERScore, paired_significance
from alignment.commands.sweep import corpora as corpora_of
from alignment.corpora import ALIBI_STORIES, ParallelGold, load_alibi
from alignment.decoding import mutual_argmax
from alignment.fairseq.loading import load_shipped_model, shipped_models
from alignment.recipes import RECIPES
from alignment.selection import SETTINGS, Choice
from alignment.sweep import ATTENTION, AUTO, AUTO_HEAD, TITLES, Method, Reading, Sweep, maps_to_read, sweep
from alignment.symmetrization import SYMMETRIZATIONS
from alignment.word_maps import WordMap, sinkhorn
from benchmarks import alignment_lexicon
from captum_norm.text.files import write_whole

BEST = ("product", "hmm")
"""The recipes of the first page."""
STORIES = {load_alibi(story).name for story in ALIBI_STORIES}
TEXT_COLUMNS = ("model", "direction", "method", "recipe", "rule", "heads", "choice", "system")


INTRODUCTION = """\
# Alignment error rates

**On every text, the shipped models align better than eflomal trained on 100,000 pairs**, if both directions are
combined and the text is its own lexicon. Without a lexicon, they align better than eflomal does with the same text.
They choose layer and head without gold alignments.

- Two directions are better than one, and the recipe `hmm`, the only one that uses word positions, is better than
  `product`, the best of the others.
- Norms are better than attention weights where all heads of a layer are read together. With the single head that `auto`
  chooses, they differ by less than a point in most rows.

AER is in %, and lower is better. WPT03 shows what to expect elsewhere, since nothing was tuned on it. The recipes'
constants were tuned on The Last Lesson with these models, those for both directions and for a lexicon on all three
stories.
"""
READ_ON = """\
[All tables](alignment-error-tables.md) have every recipe, layer and way to combine two directions, with precision,
recall and intervals. [Word alignment](alignment.md) explains the methods and recipes; models of other sizes, [during
training](alignment-training.md), have a page of their own. These pages are written by

```console
$ python -m benchmarks.alignment_error --out docs/alignment-error.md --corpus wpt03=DIR --data build/translation \\
    --eflomal eflomal-align
```
"""
TABLES = """\
# Alignment error rates: all tables

AER in %, ± half the 95 % bootstrap interval. Layers and heads count from 0. [Alignment error rates](alignment-error.md)
has the result and the command that writes both pages.
"""
OVERVIEW = """\
By norms / by weights, at the layer and setting that `auto` chose on each text (*all* heads), and at the single head
that it chose (*one*); the mean is that of the three stories.
"""
RECIPES_NOTE = """\
At the layer and setting that `auto` chose, and at the single head that it chose; gradients at their better setting; p
of the difference from norms (approximate randomisation).
"""


@dataclass(frozen=True)
class Run:
    """One model on one corpus."""

    model: str
    sweep: Sweep


def runs(corpora: Sequence[ParallelGold], *, gradients: bool) -> Iterator[Run]:
    """Run every shipped model on every corpus."""
    for name in shipped_models():
        model, tokenizer = load_shipped_model(name)
        for corpus in corpora:
            turned = corpus if corpus.source_language == tokenizer.source_language else corpus.swapped()
            swept = sweep(model, tokenizer, turned, gradients=gradients)
            print(f"{name} on {corpus.name}: {swept.best('norm').score}", flush=True)
            yield Run(name, swept)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with right-aligned numbers."""
    rule = ["---" if title in TEXT_COLUMNS else "--:" for title in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)) + "\n"


def rate(score: AERScore) -> str:
    """Format AER and half the width of its 95 % interval."""
    return f"{score.aer:.1f} ± {score._ci:.1f}"


def layer_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield AER of every method by setting and layer."""
    for run in found:
        for method, title in TITLES.items():
            cells = []
            for setting in SETTINGS:
                for layer in range(run.sweep.layers):
                    result = run.sweep.results.get(Reading(method, Choice(setting, layer)))
                    cells.append("" if result is None else f"{result.score.aer:.1f}")
            if any(cells):
                yield [run.model, title, *cells]


def head_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield the best single head of every model."""
    for run in found:
        for method in ATTENTION:
            best = run.sweep.best(method, per_head=True)
            yield [run.model, TITLES[method], str(best.reading.place), rate(best.score)]


def recipe_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield norms and weights by recipe, and gradients, at the choices of ``auto``."""
    for run, rule in product(found, (AUTO, AUTO_HEAD)):
        place, gold = run.sweep.chosen[rule], run.sweep.corpus.gold
        for recipe in RECIPES:
            norms, weights = (run.sweep.results[Reading(method, place, recipe)] for method in ATTENTION)
            compared = [norms, weights]
            if recipe == "paper" and any(reading.method == "saliency" for reading in run.sweep.results):
                compared += [run.sweep.best("saliency"), run.sweep.best("gradient_x_input")]
            others = [result.alignments for result in compared[1:]]
            p_values = ["", *(f"{p:.4f}" for p in paired_significance(norms.alignments, others, gold).p_values)]
            for result, p_value in zip(compared, p_values, strict=True):
                score = result.score
                cells = [rate(score), f"{score.precision:.1f}", f"{score.recall:.1f}", p_value]
                yield [run.model, str(result.reading.place), recipe, TITLES[result.reading.method], *cells]


def rule_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield each rule's choice, made without gold alignments, and its distance from the best choice."""
    for run in found:
        best = run.sweep.best("norm").score.aer
        row = [run.model]
        for choice in run.sweep.chosen.values():
            aer = run.sweep.results[Reading("norm", choice)].score.aer
            row += [str(choice), f"{aer:.1f}", f"{aer - best:+.1f}"]
        yield row


def overview_rows(corpora: Sequence[ParallelGold], found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield norms and weights by recipe on every text."""
    for model, rule, recipe in product(shipped_models(), (AUTO, AUTO_HEAD), RECIPES):
        sweeps = {run.sweep.corpus.name: run.sweep for run in found if run.model == model}
        rates = [
            tuple(swept.results[Reading(method, swept.chosen[rule], recipe)].score.aer for method in ATTENTION)
            for swept in (sweeps[corpus.name] for corpus in corpora)
        ]
        yield [model, "one" if rule == AUTO_HEAD else "all", recipe, *with_mean(corpora, rates)]


def two_way_rows(corpora: Sequence[ParallelGold], found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield the same for both directions combined."""
    ways = [symmetrized(corpus, found) for corpus in corpora]
    for systems in zip(*ways, strict=True):
        rates = [(norms.aer, weights.aer) for _, norms, weights in systems]
        yield [systems[0][0], *with_mean(corpora, rates)]


def with_mean(corpora: Sequence[ParallelGold], rates: Sequence[tuple[float, ...]]) -> list[str]:
    """Return a cell for each corpus, and one for the mean over the stories."""
    told = [rate for corpus, rate in zip(corpora, rates, strict=True) if corpus.name in STORIES]
    mean = tuple(fmean(rate) for rate in zip(*told, strict=True))
    return [" / ".join(f"{rate:.1f}" for rate in cell) for cell in (*rates, mean)]


def symmetrized(corpus: ParallelGold, found: Sequence[Run]) -> list[tuple[str, AERScore, AERScore]]:
    """Score the models of both directions combined, by norms and by weights."""
    sweeps = {run.model: run.sweep for run in found if run.sweep.corpus.name == corpus.name}
    norms, weights = (list(both_directions(sweeps["fr-en"], sweeps["en-fr"], method)) for method in ATTENTION)
    return [
        (name, score(corpus, left), score(corpus, right))
        for (name, left), (_, right) in zip(norms, weights, strict=True)
    ]


def score(corpus: ParallelGold, alignments: Sequence[Alignment]) -> AERScore:
    """Score alignments by AER with its 95 % interval."""
    return AER([corpus.gold]).corpus_score(alignments, None, 1000)


def both_directions(forward: Sweep, backward: Sweep, method: Method) -> Iterator[tuple[str, Sequence[Alignment]]]:
    """Yield combined alignments of two models of opposite directions, in the forward direction."""
    for recipe in ("paper", "product"):
        ways = [
            forward.results[Reading(method, forward.chosen[AUTO], recipe)].alignments,
            [a.transposed() for a in backward.results[Reading(method, backward.chosen[AUTO], recipe)].alignments],
        ]
        for name, symmetrize in SYMMETRIZATIONS.items():
            yield f"{recipe}, {name}", list(map(symmetrize, *ways))
    for rule, title in ((AUTO, "maps added"), (AUTO_HEAD, "maps of one head added")):
        maps = [
            sinkhorn(one + other.T, null=False)
            for one, other in zip(_products(forward, method, rule), _products(backward, method, rule), strict=True)
        ]
        yield f"{title}, product", [mutual_argmax(word_map, null=False) for word_map in maps]
        yield f"{title}, hmm", [RECIPES["hmm"].decode(word_map, combined=True).links for word_map in maps]


def _products(swept: Sweep, method: Method, rule: str) -> list[WordMap]:
    """Return the maps that the recipes ``product`` and ``hmm`` decode."""
    place, recipe = swept.chosen[rule], RECIPES["product"]
    return [recipe.word_map(maps, place.setting) for maps in maps_to_read(swept.maps, method, place, recipe)]


def first_page(lexical: str, header: Sequence[str], overview: Sequence[Sequence[str]]) -> str:
    """Return the page with the result: the section on corpus statistics, and the best recipes' rows of the overview."""
    best = table(header, [row for row in overview if row[2] in BEST])
    return "\n".join([INTRODUCTION, lexical, "## Norms against weights\n", OVERVIEW, best, READ_ON])


def pages(corpora: Sequence[ParallelGold], found: Sequence[Run], lexical: str) -> tuple[str, str]:
    """Return the page with the result, and that of all tables."""
    columns, overview = [*(corpus.name for corpus in corpora), "mean"], list(overview_rows(corpora, found))
    header = ["model", "heads", "recipe", *columns]
    result = first_page(lexical, header, overview)
    parts = [TABLES, "## All texts\n", OVERVIEW, table(header, overview)]
    parts += ["Both directions combined, by norms / by weights:\n"]
    parts.append(table(["system", *columns], list(two_way_rows(corpora, found))))
    for corpus in corpora:
        here = [run for run in found if run.sweep.corpus.name == corpus.name]
        parts += [f"## {corpus.name}\n", f"{len(corpus)} sentence pairs.\n", "### The paper's recipe, by layer\n"]
        places = [f"{setting} {layer}" for setting in SETTINGS for layer in range(here[0].sweep.layers)]
        parts.append(table(["model", "method", *places], list(layer_rows(here))))
        parts += ["The best single head, chosen by the gold alignments:\n"]
        parts.append(table(["model", "method", "choice", "AER"], list(head_rows(here))))
        parts += ["The choice of each rule, without gold alignments, by norms:\n"]
        header = ["model"]
        for rule in here[0].sweep.chosen:
            header += [rule, "AER", "above best"]
        parts.append(table(header, list(rule_rows(here))))
        parts += ["### Recipes\n", RECIPES_NOTE]
        header = ["model", "choice", "recipe", "method", "AER", "precision", "recall", "p"]
        parts.append(table(header, list(recipe_rows(here))))
        parts += ["### Two directions\n"]
        both = [[name, rate(norms), rate(weights)] for name, norms, weights in symmetrized(corpus, here)]
        parts.append(table(["system", "norms", "weights"], both))
    return result, "\n".join(parts)


def main() -> None:
    """Run everything and write both pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the stories are always included")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--eflomal", help="the program eflomal-align")
    parser.add_argument("--data", type=Path, help="what benchmarks.translation.prepare wrote; for eflomal")
    parser.add_argument(
        "--only-lexicon", action="store_true", help="update the section on corpus statistics of an existing page"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    *unseen, seen = corpora_of("alibi")
    corpora = [*unseen, *(corpus for text in arguments.corpus for corpus in corpora_of(text)), seen]
    lexical = alignment_lexicon.section(corpora, STORIES, arguments.eflomal, arguments.data)
    if arguments.only_lexicon:
        text = alignment_lexicon.updated(arguments.out.read_text(encoding="utf-8"), lexical)
    else:
        found = list(runs(corpora, gradients=not arguments.no_gradients))
        text, tables = pages(corpora, found, lexical)
        write_whole(arguments.out.with_stem(f"{arguments.out.stem}-tables"), tables.encode())
    write_whole(arguments.out, text.encode())


if __name__ == "__main__":
    main()
