r"""The documentation pages on which method is faithful: ``python -m benchmarks.faithfulness``.

All methods explain a sentiment classifier on the development set of SST-2, and a small causal language model on
minimal pairs whose deciding word is known and on prompts of which one passage holds the answer. Missing models are
trained first, which takes a GPU for the language model.

```console
$ python -m benchmarks.faithfulness --sst2 DIR --evidence evidence.zip --passages 60 \
    --text train.en.xz valid.txt test.txt --work build/faithfulness --out docs/which-method.md
```

``DIR`` holds ``train.tsv`` and ``dev.tsv``; the page uses texts of Europarl and WikiText-2. ``--work`` keeps the
models ``sentiment`` and ``language-model`` and the JSON files of each part: an interrupted run resumes, and a method
that is new runs alone. Processes may run one part each (``--sst2``, ``--evidence``, ``--passages``) before one writes
the page.
"""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import evidence, language_model, passages, sentiment, sst2
from benchmarks.kept import ROLLED, Content, Methods, opened, passes, table
from captum_norm import AttentionBlockAttribution, DecompX, NormAttribution, progress
from captum_norm.methods import METHODS

QUICK = [name for name in METHODS if name not in ("value-zeroing", "gradient-shap", "occlusion", "shapley", "lime")]
PERTURBING = ("occlusion", "shapley", "lime", "value-zeroing")

INTRODUCTION = """\
# Which method is faithful

**To explain a prediction, take AttnLRP or DecompX.** They take two to three forward passes and are among the best in
everything measured here. LIME, Shapley values and integrated gradients gain more when tokens are removed, at 40 to 200
passes, but rank known evidence no better. What is *mixed* into a position, by norms, attention weights or a rollout, is
another question: asked what speaks for a prediction, such methods do little better than attention weights; ALTI does
best among them. Rollouts of norms find the passage that holds an answer no more often than chance, means of the layers
always, so a mean is the default in causal models; rows of `norm` and `alti` without another word are rollouts.

Each column is one of three measures, on three tasks: whether the output falls as a method says when tokens are removed
(gain); whether the word that decides between two continuations ranks high (MRR), for a model that knows the answer and
otherwise; whether the passage that holds an answer ranks first (hits) and gets most of the scores (share). What removal
measures favours methods that remove, and evidence that a linguist names need not be what a model uses.
"""
READ_ON = """\
## What an answer rests on

![LDS of each method, with its cost in forward passes](_static/contexts.png)

**To say which passages a language model's answer rests on, take GIM; RelP and AttnLRP are close.** On 500 generated
prompts with known evidence, it tells nearly as well as leaving each passage out, in 4.8 forward passes for 17.4, how
probable the answer stays when random passages go (LDS .79 and .81), and finds the evidence best. For 34 forward passes,
ContextCite is ahead (.84). Norms are ahead of attention weights there (.58 and .49, p < .001; random scores .18), but
both miss evidence that says the answer in other words. If ablations of 60 other prompts teach how much each head
counts, norms and weights are equally good (.67 and .66, p = .26), and direct updates of the logit better (.71).
[What an answer rests on](contexts.md) has all methods and measures, by kind of prompt.

[All tables](which-method-tables.md) have every method, further measures, intervals and what was refused.
[Faithfulness](faithfulness.md) defines the measures, [Compare methods](how-to/compare-methods.md) shows how to make
such a table for your own model and texts, and [Choose a method](choose-a-method.md) goes by your question. Both pages
are written by `python -m benchmarks.faithfulness`.
"""
TABLES = """\
# Which method is faithful: all tables

Written by `python -m benchmarks.faithfulness`; [Which method is faithful](which-method.md) has the result.
[Faithfulness](faithfulness.md) defines the measures.
"""
SHOWN = (
    *("attnlrp", "decompx", "gim", "alti-logit", "integrated-gradients", "lime"),
    *("alti", "norm", "norm, mean of layers", "weights", "rollout"),
)
"""The methods of the first table."""


def variants(*, last_norm: bool = False) -> Methods:
    """Return variants of norms, scopes up to the last norm in post-norm layers, and of DecompX."""
    scopes: tuple[Any, Any] = ("attn_res_ln", "atb_ff_res_ln") if last_norm else ("attn_res", "atb_ff_res")
    return {
        "norm, mean of layers": lambda model, _: NormAttribution(model, aggregation="mean"),
        f"norm, {scopes[0]}": lambda model, _: NormAttribution(model, scopes[0], "rollout"),
        f"attention-block, {scopes[1]}": lambda model, _: AttentionBlockAttribution(model, scopes[1], "rollout"),
        "decompx, absdot": lambda model, _: DecompX(model, "absdot"),
    }


def named(names: Iterable[str], *, last_norm: bool = False) -> Methods:
    """Return the methods of some names, and :func:`variants`."""
    rolled: Methods = {name: partial(_rolled, name) for name in ROLLED}
    return {**{name: rolled.get(name, name) for name in names}, **variants(last_norm=last_norm)}


def _rolled(name: str, model: Any, _: Any) -> Any:
    return METHODS[name].load()(model, aggregation="rollout")


def question(name: str) -> str:
    """Return what a method, or a variant of it, asks: see the introduction of the page."""
    method = base(name)
    if method in PERTURBING:
        return "removal"
    return "mixing" if METHODS[method].target == "never" else "output"


def base(name: str) -> str:
    """Return the method that a row is of, or a variant of."""
    return name.partition(",")[0]


def overview(
    masked: Content | None, pairs: Content | None, prompts: Content | None, only: Collection[str] | None = None
) -> str:
    """Return the table of all methods, or of some, with their numbers in each part."""
    columns: list[tuple[str, Mapping[str, str]]] = []
    if masked is not None:
        rows = sst2.by_gain(masked)
        columns += [("SST-2: passes", {row["method"]: passes(row) for row in rows})]
        columns += [("gain ↑", {row["method"]: f"{row['relevance_gain']:.2f}" for row in rows})]
    if pairs is not None:
        rows = sst2.by_gain(pairs["comparison"])
        columns += [("pairs: passes", {row["method"]: passes(row) for row in rows})]
        columns += [("gain ↑", {row["method"]: f"{row['relevance_gain']:.2f}" for row in rows})]
        for title, well in (("MRR, known ↑", True), ("MRR, others ↑", False)):
            ranks = evidence.shares(pairs, well=well)
            columns += [(title, {name: f"{mean(values):.2f}" for name, values in ranks.items() if values})]
    if prompts is not None:
        rows = [row for row in prompts["methods"] if row["refused"] is None]
        columns += [("passages: passes", {row["method"]: passes(row) for row in rows})]
        figures = passages.all_figures(prompts)
        for title, key in (("hits ↑", "hit"), ("share ↑", "share")):
            columns += [(title, {name: f"{mean(found[key]):.2f}" for name, found in figures.items()})]
    names = dict.fromkeys(name for _, column in columns for name in column)
    measured = [name for name in names if base(name) in METHODS and name != "random" and (not only or name in only)]
    order = list(METHODS)
    measured.sort(
        key=lambda name: (("output", "removal", "mixing").index(question(name)), order.index(base(name)), name)
    )
    rows_shown = [[name, question(name), *(column.get(name, "–") for _, column in columns)] for name in measured]
    return table(["", "question", *(title for title, _ in columns)], rows_shown)


def trained(folder: Path, train: Callable[[Path], None]) -> Path:
    """Return a model's folder, made first if missing."""
    if not folder.exists():
        unfinished = folder.with_suffix(".partial")
        train(unfinished)
        unfinished.rename(folder)
    return folder


def pages(
    masked: Content | None, parts: Iterable[str], pairs: Content | None, prompts: Content | None
) -> tuple[str, str]:
    """Return the text of the page with the result, and of the one with all tables."""
    sizes = [
        f"{count} {kind}"
        for count, kind in (
            (masked and masked["examples"], "sentences of SST-2"),
            (pairs and len(pairs["pairs"]), "pairs"),
            (prompts and len(prompts["prompts"]), "prompts of twenty passages"),
        )
        if count
    ]
    measured = (
        f"Measured on {', '.join(sizes)}; – was not measured. Passes are times divided by those of the plain forward "
        "pass over the same inputs, in the same run; other work of the machine makes them vary up to twofold."
    )
    result = page(INTRODUCTION, overview(masked, pairs, prompts, SHOWN), measured, READ_ON)
    return result, page(TABLES, "## All methods", overview(masked, pairs, prompts), measured, *parts)


def page(*parts: str) -> str:
    """Join the parts of a page."""
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Train what is missing, compare, and write the page."""
    parser = argparse.ArgumentParser(description="Write the tables of faithfulness in the documentation.")
    parser.add_argument("--sst2", type=Path, help="folder with train.tsv and dev.tsv; if missing, skipped")
    parser.add_argument("--evidence", type=Path, help="zip of pairs with their evidence; if missing, skipped")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="training text of the language model")
    parser.add_argument("--work", type=Path, default=Path("build/faithfulness"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the page; PAGE-tables has all tables (default: standard output)")
    parser.add_argument("--examples", type=int, default=872, help="sentences of SST-2 (default: %(default)s, all)")
    parser.add_argument(
        "--choices", type=int, default=150, help="likewise for gradients by choice (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=50, help="of each paradigm of evidence (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=0, help="prompts of twenty passages (default: %(default)s)")
    parser.add_argument("--few", type=int, default=10, help="of them for integrated gradients (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the models run (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    parts, masked, pairs, prompts = list[str](), None, None, None
    with progress():
        if arguments.sst2 is not None:
            folder = trained(work / "sentiment", partial(sentiment.train, arguments.sst2))
            open_model = partial(opened, folder, arguments.device)
            groups = [named(names, last_norm=True) for names in (QUICK, METHODS)]
            sentences = arguments.examples, arguments.choices
            found = sst2.results(work, open_model, arguments.sst2, sentences, groups)
            masked = found["mask"]
            parts += sst2.sections(masked, found["delete"], found["gradients"])
        if arguments.evidence is not None or arguments.passages:
            train = partial(language_model.train, arguments.text, device=arguments.device)
            open_model = partial(opened, trained(work / "language-model", train), arguments.device)
        if arguments.evidence is not None:
            groups = [named(names) for names in (QUICK, METHODS)]
            pairs = evidence.results(work, open_model, arguments.evidence, arguments.pairs, groups)
            parts += evidence.sections(pairs)
        if arguments.passages:
            rows = passages.rows_of(METHODS)
            prompts = passages.results(work, open_model, arguments.passages, arguments.few, rows)
            parts += passages.sections(prompts)
    result, tables = pages(masked, parts, pairs, prompts)
    if arguments.out is None:
        print(result, tables, sep="\n")
    else:
        arguments.out.write_text(result, encoding="utf-8")
        arguments.out.with_stem(f"{arguments.out.stem}-tables").write_text(tables, encoding="utf-8")


if __name__ == "__main__":
    main()
