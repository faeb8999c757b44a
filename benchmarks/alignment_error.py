r"""The alignment error rates of the documentation: ``python -m benchmarks.alignment_error``.

Every shipped model, and every checkpoint given, aligns the Alibi story and the test sets given; the two shipped
directions are symmetrised, and eflomal aligns the same sentences after learning from the models' own training pairs.

```console
$ python -m benchmarks.alignment_error --out docs/alignment-error.md --corpus wpt03=DIR --data build/translation \
    --eflomal eflomal-align --checkpoint fr-en-2000=build/translation/fr-en/checkpoint_1_2000.pt
```
"""

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import fmean, pstdev

import torch

from alignment import Alignment, read_pharaoh
from alignment.aer import AER, AERScore
from alignment.commands.sweep import corpus as corpus_of
from alignment.corpora import ParallelGold
from alignment.decoding import mutual_argmax, mutual_posterior
from alignment.fairseq import load_fairseq_checkpoint
from alignment.normalization import Language, NormalizedWords, normalize_word
from alignment.recipes import RECIPES
from alignment.selection import Choice
from alignment.shipped import load_shipped_model, shipped_models
from alignment.significance import paired_significance
from alignment.sweep import AUTO, AUTO_HEAD, SETTINGS, Method, Reading, Sweep, maps_to_read, sweep
from alignment.symmetrization import SYMMETRIZATIONS
from alignment.word_maps import WordMap, sinkhorn

MODELS = Path(__file__).parents[1] / "alignment" / "models"
METHODS: Mapping[Method, str] = {
    "norms": "norms",
    "weights": "weights",
    "saliency": "saliency",
    "gradient_x_input": "gradient × input",
}


INTRODUCTION = """\
Written by `python -m benchmarks.alignment_error`; AER in %, ± half the 95 % bootstrap interval. Layers and heads count
from 0. Models read words in normal form. A number behind a model's name says after how many updates of its training it
was taken; those without are the ones that come with the package, after 4,000. What is read, and what the recipes do, is
in [Word alignment](alignment.md). The recipes' constants were chosen on Alibi, with the models that come with the
package: of the two test sets WPT03 is the one that tells what to expect elsewhere. `hmm` alone knows where words stand.
"""
RECIPES_NOTE = """\
At the layer and setting that `auto` chose, and at the single head; gradients at their better setting; p of the
difference from norms (approximate randomisation).
"""
Alignments = Sequence[tuple[str, Sequence[Alignment]]]
LANGUAGES: tuple[Language, Language] = ("fr", "en")


@dataclass(frozen=True)
class Run:
    """One model on one corpus."""

    model: str
    sweep: Sweep
    finished: bool


def runs(
    corpora: Sequence[ParallelGold], checkpoints: Mapping[str, Path], unfinished: Sequence[str], *, gradients: bool
) -> Iterator[Run]:
    """Every model on every corpus, the shipped models first."""
    for name in (*shipped_models(), *checkpoints):
        if name in checkpoints:
            model, plain = load_fairseq_checkpoint(checkpoints[name], MODELS)
            tokenizer = NormalizedWords(plain, _language(plain.source_language), _language(plain.target_language))
        else:
            model, tokenizer = load_shipped_model(name)
        for corpus in corpora:
            turned = corpus if corpus.source_language == tokenizer.source_language else corpus.swapped()
            # Gradients cost most of the time; the shipped models stand for the others.
            swept = sweep(model, tokenizer, turned, gradients=gradients and name not in checkpoints)
            print(f"{name} on {corpus.name}: {swept.best('norms').score}", flush=True)
            yield Run(name, swept, name not in unfinished)


def _language(code: str) -> Language:
    if code not in ("en", "fr"):
        raise SystemExit(f"got a model of {code}; this benchmark knows the normal form of en and fr")
    return "en" if code == "en" else "fr"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rule = ["---" if title in ("model", "method", "recipe", "rule", "choice", "system") else "--:" for title in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)) + "\n"


def rate(score: AERScore) -> str:
    """AER and half the width of its 95 % interval."""
    return f"{score.aer:.1f} ± {score._ci:.1f}"


def layer_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """AER of every method by setting and layer."""
    for run in found:
        for method, title in METHODS.items():
            cells = []
            for setting in SETTINGS:
                for layer in range(run.sweep.layers):
                    result = run.sweep.results.get(Reading(method, Choice(setting, layer)))
                    cells.append("" if result is None else f"{result.score.aer:.1f}")
            if any(cells):
                yield [run.model, title, *cells]


def head_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """The paper's other choice: single heads."""
    for run in found:
        for method in ("norms", "weights"):
            best = run.sweep.best(method, per_head=True)
            yield [run.model, method, str(best.reading.place), rate(best.score)]


def recipe_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Norms and weights by recipe, and gradients, at the places that ``auto`` chose."""
    for run, rule in product(found, (AUTO, AUTO_HEAD)):
        place, gold = run.sweep.chosen[rule], run.sweep.corpus.gold
        for recipe in RECIPES:
            norms, weights = (run.sweep.results[Reading(method, place, recipe)] for method in ("norms", "weights"))
            compared = [norms, weights]
            if recipe == "paper" and any(reading.method == "saliency" for reading in run.sweep.results):
                compared += [run.sweep.best("saliency"), run.sweep.best("gradient_x_input")]
            others = [result.alignments for result in compared[1:]]
            p_values = ["", *(f"{p:.4f}" for p in paired_significance(norms.alignments, others, gold).p_values)]
            for result, p_value in zip(compared, p_values, strict=True):
                score = result.score
                cells = [rate(score), f"{score.precision:.1f}", f"{score.recall:.1f}", p_value]
                yield [run.model, str(result.reading.place), recipe, METHODS[result.reading.method], *cells]


def rule_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """What each rule chooses without gold alignments, and how far that is from the best choice."""
    for run in found:
        best = run.sweep.best("norms").score.aer
        row = [run.model]
        for choice in run.sweep.chosen.values():
            aer = run.sweep.results[Reading("norms", choice)].score.aer
            row += [str(choice), f"{aer:.1f}", f"{aer - best:+.1f}"]
        yield row


def spread_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Mean and population SD over the models, by direction."""
    for direction in sorted({run.model[:5] for run in found}):
        chosen = [run.sweep for run in found if run.model.startswith(direction)]
        for method in ("norms", "weights"):
            for rule, recipe in product((AUTO, AUTO_HEAD), ("paper", "product", "hmm")):
                rates = [s.results[Reading(method, s.chosen[rule], recipe)].score.aer for s in chosen]
                yield [direction, method, rule, recipe, str(len(rates)), f"{fmean(rates):.1f}", f"{pstdev(rates):.1f}"]


def symmetrized_rows(corpus: ParallelGold, found: Sequence[Run]) -> list[list[str]]:
    """The shipped models of both directions made one, by norms and by weights."""
    forward, backward = (next(run.sweep for run in found if run.model == name) for name in ("fr-en", "en-fr"))
    norms, weights = (list(both_directions(forward, backward, method)) for method in ("norms", "weights"))
    return [
        [name, score(corpus, left), score(corpus, right)]
        for (name, left), (_, right) in zip(norms, weights, strict=True)
    ]


def score(corpus: ParallelGold, alignments: Sequence[Alignment]) -> str:
    """AER of alignments and half the width of its 95 % interval."""
    return rate(AER([corpus.gold]).corpus_score(alignments, None, 1000))


def both_directions(forward: Sweep, backward: Sweep, method: Method) -> Iterator[tuple[str, Sequence[Alignment]]]:
    """Alignments of two models of opposite directions made one, in the forward one's direction."""
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
        options = RECIPES["hmm"].options
        yield f"{title}, hmm", [mutual_posterior(word_map, null=False, **options) for word_map in maps]


def _products(swept: Sweep, method: Method, rule: str) -> list[WordMap]:
    """The maps that the recipes ``product`` and ``hmm`` decode."""
    place, recipe = swept.chosen[rule], RECIPES["product"]
    return [recipe.word_map(maps, place.setting) for maps in maps_to_read(swept.maps, method, place, recipe)]


def eflomal(executable: str, data: Path, corpora: Sequence[ParallelGold]) -> dict[str, Alignments]:
    """Of each corpus the alignments by eflomal, forward, reverse and symmetrised, learnt with the training pairs."""
    pairs = [pair for corpus in corpora for pair in zip(corpus.sources, corpus.targets, strict=True)]
    owners = [tuple(_tokens(words, code) for words, code in zip(pair, LANGUAGES, strict=True)) for pair in pairs]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, code in enumerate(LANGUAGES):
            with (folder / code).open("w", encoding="utf-8") as text:
                for both in owners:
                    text.write(" ".join(token for token, _ in both[side]) + "\n")
                with (data / f"train.{code}").open(encoding="utf-8") as training:
                    shutil.copyfileobj(training, text)
        files = ["-s", folder / "fr", "-t", folder / "en", "-f", folder / "forward", "-r", folder / "reverse"]
        subprocess.run([executable, *map(str, files)], check=True)
        read = [list(islice(read_pharaoh(folder / way), len(owners))) for way in ("forward", "reverse")]
    found = dict[str, Alignments]()
    start = 0
    for corpus in corpora:
        part = slice(start, start + len(corpus))
        start = part.stop
        forward, reverse = (
            [_to_words(links, *both) for links, both in zip(way[part], owners[part], strict=True)] for way in read
        )
        systems = [("eflomal, forward", forward), ("eflomal, reverse", reverse)]
        systems += [
            (f"eflomal, {heuristic}", list(map(SYMMETRIZATIONS[heuristic], forward, reverse)))
            for heuristic in ("intersection", "grow-diag-final-and")
        ]
        found[corpus.name] = systems
    return found


def _tokens(words: Sequence[str], code: Language) -> list[tuple[str, int]]:
    return [(token, index) for index, word in enumerate(words) for token in normalize_word(word, code)]


def _to_words(links: Alignment, source: list[tuple[str, int]], target: list[tuple[str, int]]) -> Alignment:
    return Alignment({(source[left][1], target[right][1]) for left, right in links})


def page(corpora: Sequence[ParallelGold], found: Sequence[Run], learnt: Mapping[str, Alignments]) -> str:
    """The page of the documentation."""
    parts = ["# Alignment error rates\n", INTRODUCTION]
    for corpus in corpora:
        here = [run for run in found if run.sweep.corpus.name == corpus.name]
        shipped = [run for run in here if run.model in shipped_models()]
        parts += [f"## {corpus.name}\n", f"{len(corpus)} sentence pairs.\n", "### The paper's recipe, by layer\n"]
        places = [f"{setting} {layer}" for setting in SETTINGS for layer in range(shipped[0].sweep.layers)]
        parts.append(table(["model", "method", *places], list(layer_rows(shipped))))
        parts += ["The best single head, chosen by the gold alignments:\n"]
        parts.append(table(["model", "method", "choice", "AER"], list(head_rows(shipped))))
        parts += ["### Recipes\n", RECIPES_NOTE]
        header = ["model", "choice", "recipe", "method", "AER", "precision", "recall", "p"]
        parts.append(table(header, list(recipe_rows(shipped))))
        parts += ["### Two directions, and eflomal\n"]
        parts.append(table(["system", "norms", "weights"], symmetrized_rows(corpus, here)))
        if learnt.get(corpus.name):
            parts.append(
                table(["system", "AER"], [[name, score(corpus, links)] for name, links in learnt[corpus.name]])
            )
        parts += ["### Choosing the layer without gold alignments\n"]
        header = ["model"]
        for rule in shipped[0].sweep.chosen:
            header += [rule, "AER", "above best"]
        parts.append(table(header, list(rule_rows(here))))
        parts += ["Mean and population SD over those of these models whose training was finished or nearly so:\n"]
        header = ["model", "method", "rule", "recipe", "models", "mean", "SD"]
        parts.append(table(header, list(spread_rows([run for run in here if run.finished]))))
    return "\n".join(parts)


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the Alibi story is always there")
    parser.add_argument("--checkpoint", action="append", default=[], help="NAME=FILE, such as fr-en-2000=FILE")
    parser.add_argument("--unfinished", action="append", default=[], help="likewise, of a training that went on")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--eflomal", help="the program eflomal-align")
    parser.add_argument("--data", type=Path, help="what benchmarks.translation.prepare wrote; for eflomal")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    corpora = [corpus_of(text) for text in ("alibi", *arguments.corpus)]
    finished, unfinished = (
        {name: Path(path) for name, _, path in (text.partition("=") for text in texts)}
        for texts in (arguments.checkpoint, arguments.unfinished)
    )
    gradients = not arguments.no_gradients
    found = list(runs(corpora, finished | unfinished, list(unfinished), gradients=gradients))
    learnt = eflomal(arguments.eflomal, arguments.data, corpora) if arguments.eflomal else {}
    partial = arguments.out.with_suffix(".partial")
    partial.write_text(page(corpora, found, learnt), encoding="utf-8")
    partial.replace(arguments.out)


if __name__ == "__main__":
    main()
