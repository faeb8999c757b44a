r"""The documentation page of other checkpoints' alignment error rates: ``python -m benchmarks.alignment_checkpoints``.

```console
$ python -m benchmarks.alignment_checkpoints --out docs/alignment-checkpoints.md --corpus alibi=last-lesson \
    --corpus wpt03=DIR --checkpoint fr-en-3000=build/translation/fr-en/checkpoint_1_3000.pt \
    --unfinished fr-en-2000=build/translation/fr-en/checkpoint_1_2000.pt
```
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev

import torch

from alignment.commands.sweep import corpora as corpora_of
from alignment.corpora import ParallelGold
from alignment.fairseq import load_fairseq_checkpoint
from alignment.normalization import Language, NormalizedWords
from alignment.sweep import AUTO, AUTO_HEAD, Reading, sweep
from alignment.sweep_report import ATTENTION, TITLES
from benchmarks.alignment_error import Run, rule_rows, runs, table

MODELS = Path(__file__).parents[1] / "alignment" / "models"

INTRODUCTION = """\
Written by `python -m benchmarks.alignment_checkpoints`; AER in %, by norms unless stated otherwise. The models in the
package were trained for 4,000 updates; a number after a name is that checkpoint's number of updates. These checkpoints
are not included: `benchmarks/translation` has the recipe that trains them.
"""


def checkpoint_runs(corpora: Sequence[ParallelGold], checkpoints: Mapping[str, Path]) -> Iterator[Run]:
    """Run every checkpoint on every corpus."""
    for name, path in checkpoints.items():
        model, plain = load_fairseq_checkpoint(path, MODELS)
        tokenizer = NormalizedWords(plain, _language(plain.source_language), _language(plain.target_language))
        for corpus in corpora:
            turned = corpus if corpus.source_language == tokenizer.source_language else corpus.swapped()
            swept = sweep(model, tokenizer, turned, gradients=False)
            print(f"{name} on {corpus.name}: {swept.best('norm').score}", flush=True)
            yield Run(name, swept)


def _language(code: str) -> Language:
    if code not in ("en", "fr"):
        raise SystemExit(f"got a model of {code}; this benchmark knows the normal form of en and fr")
    return "en" if code == "en" else "fr"


def spread_rows(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield mean and population SD over the models, by direction."""
    for direction in sorted({run.model[:5] for run in found}):
        chosen = [run.sweep for run in found if run.model.startswith(direction)]
        for method in ATTENTION:
            for rule, recipe in product((AUTO, AUTO_HEAD), ("paper", "product", "hmm")):
                rates = [s.results[Reading(method, s.chosen[rule], recipe)].score.aer for s in chosen]
                spread = f"{fmean(rates):.1f}", f"{pstdev(rates):.1f}"
                yield [direction, TITLES[method], rule, recipe, str(len(rates)), *spread]


def page(corpora: Sequence[ParallelGold], found: Sequence[Run], unfinished: Sequence[str]) -> str:
    """Return the page."""
    parts = ["# Alignment error rates of other checkpoints\n", INTRODUCTION]
    for corpus in corpora:
        here = [run for run in found if run.sweep.corpus.name == corpus.name]
        parts += [f"## {corpus.name}\n", "The choice of each rule, without gold alignments, and its error rate:\n"]
        header = ["model"]
        for rule in here[0].sweep.chosen:
            header += [rule, "AER", "above best"]
        parts.append(table(header, list(rule_rows(here))))
        parts += ["Mean and population SD over the models whose training was finished or nearly so:\n"]
        header = ["model", "method", "rule", "recipe", "models", "mean", "SD"]
        parts.append(table(header, list(spread_rows([run for run in here if run.model not in unfinished]))))
    return "\n".join(parts)


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", required=True, help="alibi=STORY or wpt03=DIR")
    parser.add_argument("--checkpoint", action="append", default=[], help="NAME=FILE, such as fr-en-3000=FILE")
    parser.add_argument("--unfinished", action="append", default=[], help="likewise, for unfinished training")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    corpora = [corpus for text in arguments.corpus for corpus in corpora_of(text)]
    finished, unfinished = (
        {name: Path(path) for name, _, path in (text.partition("=") for text in texts)}
        for texts in (arguments.checkpoint, arguments.unfinished)
    )
    found = [*runs(corpora, gradients=False), *checkpoint_runs(corpora, finished | unfinished)]
    partial = arguments.out.with_suffix(".partial")
    partial.write_text(page(corpora, found, list(unfinished)), encoding="utf-8")
    partial.replace(arguments.out)


if __name__ == "__main__":
    main()
