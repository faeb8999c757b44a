r"""The documentation page on which method is faithful: ``python -m benchmarks.faithfulness``.

All methods explain a sentiment classifier on the development set of SST-2, and a small causal language model on BLiMP's
pairs of subject–verb agreement. Missing models are trained first.

```console
$ python -m benchmarks.faithfulness --sst2 DIR --blimp BLiMP.zip --text train.en.xz valid.txt test.txt \
    --work build/faithfulness --out docs/which-method.md
```

``DIR`` holds ``train.tsv`` and ``dev.tsv``; the page uses texts of Europarl and WikiText-2. ``--work`` keeps the
models ``sentiment`` and ``language-model`` and one JSON file per comparison, so an interrupted run resumes.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from captum.attr import InputXGradient, IntegratedGradients

from benchmarks import agreement, language_model, sentiment
from captum_norm import AttentionBlockAttribution, DecompX, NormAttribution, TokenAttribution, compare, progress
from captum_norm.comparison.measures import MEASURES
from captum_norm.loading import load
from captum_norm.methods import METHODS

PUBLISHED = {"GlobEnc": 0.307, "gradient × input": 0.310, "IG": 0.340, "ALTI": 0.416, "DecompX": 0.627}
"""AOPC on SST-2 of BERT-base [Modarressi et al. 2023]."""
OURS = {
    "GlobEnc": "globenc",
    "gradient × input": "input-gradient",
    "IG": "integrated-gradients",
    "ALTI": "alti",
    "DecompX": "decompx, absdot",
}
QUICK = [name for name in METHODS if name not in ("value-zeroing", "gradient-shap", "occlusion", "shapley", "lime")]
Row = Mapping[str, Any]

INTRODUCTION = """\
# Which method is faithful

Written by `python -m benchmarks.faithfulness`. [Faithfulness](faithfulness.md) defines the measures, and
[Compare methods](how-to/compare-methods.md) shows how to make such a table for your own model and texts.
`python -m benchmarks.methods` prints what the methods cost.
"""


def variants(model: Any, names: Iterable[str] = METHODS, *, last_norm: bool = False) -> agreement.Methods:
    """Return the methods of some names and variants of their classes, up to the last norm in post-norm layers."""
    norms = NormAttribution(model, "attn_res_ln" if last_norm else "attn_res")
    blocks = AttentionBlockAttribution(model, "atb_ff_res_ln" if last_norm else "atb_ff_res")
    return {
        **{name: name for name in names},
        f"norm, {norms.scope}": norms,
        f"attention-block, {blocks.scope}": blocks,
        "decompx, absdot": DecompX(model, "absdot"),
    }


def named(names: Iterable[str]) -> Callable[[Any, Any], agreement.Methods]:
    """Return :func:`variants` for a post-norm model."""
    return lambda model, _: variants(model, names, last_norm=True)


def gradients(model: Any, tokenizer: Any) -> agreement.Methods:
    """Return gradient methods with other baselines and reductions than ours."""
    common: Any = {"tokenizer": tokenizer, "keep_special": True}
    integrated = partial(TokenAttribution, model, IntegratedGradients, n_steps=30, **common)
    return {
        "integrated gradients, mask, sum (ours)": "integrated-gradients",
        "integrated gradients, mask, L2": integrated(baseline="mask", reduction="l2"),
        "integrated gradients, zero, sum": integrated(baseline="zero"),
        "integrated gradients, zero, L2": integrated(baseline="zero", reduction="l2"),
        "gradient × input, sum (ours)": "input-gradient",
        "gradient × input, L2": TokenAttribution(model, InputXGradient, reduction="l2"),
        "ALTI": "alti",
    }


def sst2(
    folder: Path,
    data: Path,
    examples: int | None,
    removal: Any,
    methods_of: Callable[[Any, Any], agreement.Methods],
) -> str:
    """Compare methods on the predicted classes of the development set, as JSON."""
    model, tokenizer = load(str(folder))
    chosen = sentiment.read(data / "dev.tsv")[:examples]
    inputs = tokenizer([sentence for sentence, _ in chosen], padding=True, return_tensors="pt")
    labels = [label for _, label in chosen]
    methods = methods_of(model, tokenizer)
    return compare(model, inputs, tokenizer=tokenizer, labels=labels, removal=removal, methods=methods).to_json()


def kept(path: Path, make: Callable[[], str]) -> Any:
    """Read a JSON file, made first if missing."""
    if not path.exists():
        content = make()
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


def trained(folder: Path, train: Callable[[Path], None]) -> Path:
    """Return a model's folder, made first if missing."""
    if not folder.exists():
        unfinished = folder.with_suffix(".partial")
        train(unfinished)
        unfinished.rename(folder)
    return folder


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_gain(content: Row) -> list[Row]:
    """Return the methods that support the model, by descending relevance gain."""
    return sorted((row for row in content["methods"] if row["refused"] is None), key=lambda row: -row["relevance_gain"])


def measured(content: Row) -> str:
    """Return the table of one comparison and the refused methods."""
    header = ["", *(f"{measure.title} {measure.arrow}" for measure in MEASURES)]
    rows = by_gain(content)
    values = {
        measure.name: {row["method"]: row[measure.name] for row in rows if row[measure.name] is not None}
        for measure in MEASURES
    }
    best = {measure.name: measure.best(values[measure.name]) for measure in MEASURES}

    def cell(row: Row, name: str) -> str:
        if row[name] is None:
            return "–"
        shown = f"{row[name]:.3f}"
        return f"**{shown}**" if row["method"] in best[name] else shown

    lines = [[row["method"], *(cell(row, measure.name) for measure in MEASURES)] for row in rows]
    refused = [f"- {row['method']}: {row['refused']}" for row in content["methods"] if row["refused"] is not None]
    notes = [f"`{content['signature']}`", *(["Refused for this model:\n\n" + "\n".join(refused)] if refused else [])]
    return "\n\n".join([table(header, lines), *notes])


def beside_published(masked: Row, deleted: Row) -> str:
    """Compare AOPC and the order of the methods with the published ones."""
    ours = {
        removal: {name: row["aopc"] for row in content["methods"] for name in OURS if row["method"] == OURS[name]}
        for removal, content in (("masked", masked), ("deleted", deleted))
    }
    rows = [[name, f"{PUBLISHED[name]:.3f}", *(f"{aopc[name]:.3f}" for aopc in ours.values())] for name in PUBLISHED]
    header = ["AOPC ↑", "BERT-base, published", *(f"MiniLM, tokens {removal}" for removal in ours)]
    orders = {"published": PUBLISHED, **ours}
    lines = [f"- {name}: {' < '.join(sorted(aopc, key=aopc.__getitem__))}" for name, aopc in orders.items()]
    return "\n\n".join(
        [
            table(header, rows),
            "The models differ, so compare orders, not numbers:",
            "\n".join(lines),
            "With masking, integrated gradients start at the replacement embedding; with deletion they do not.",
        ]
    )


def alike(content: Row, most: int = 8) -> str:
    """Return a table of Spearman's ρ between the most faithful methods."""
    names = [row["method"] for row in by_gain(content)][:most]
    rows = {row["method"]: row for row in content["agreement"]}
    return table(["ρ", *names], [[name, *(f"{rows[name][other]:.2f}" for other in names)] for name in names])


def about_sentiment(masked: Row, deleted: Row, choices: Row) -> list[str]:
    """Return the sections on SST-2."""
    classifier = (
        f"The MiniLM encoder of the extra `demo`, fine-tuned (`benchmarks.sentiment`), labels {masked['accuracy']:.1%} "
        f"of the {masked['examples']} sentences correctly. The predicted class is explained; removed tokens become the "
        "mask token."
    )
    depends = (
        "Gradient methods depend on choices that their names do not reveal: the baseline, and how a token's "
        f"attributions are reduced to one number. On the first {choices['examples']} sentences:"
    )
    return [
        "## Sentiment: SST-2",
        classifier,
        measured(masked),
        "### Removed tokens deleted instead",
        "The same sentences, with tokens deleted and the gaps closed. Methods of many forward passes are left out.",
        measured(deleted),
        "### Beside the DecompX paper",
        beside_published(masked, deleted),
        depends,
        measured(choices),
        "### Agreement between rankings",
        "Mean over sentences of Spearman's ρ between the scores of two methods, for the eight methods of highest gain.",
        alike(masked),
    ]


def about_agreement(pairs: Row) -> list[str]:
    """Return the sections on BLiMP."""
    causal = (
        f"A GPT-2 of {pairs['layers']} layers, trained from scratch (`benchmarks.language_model`), reads the sentence "
        "up to the verb. The logit of the right form minus that of the wrong one is explained; removed tokens become "
        "the mean embedding."
    )
    return [
        "## Agreement: BLiMP",
        causal,
        agreement.known(pairs),
        measured(pairs["comparison"]),
        agreement.found(pairs),
    ]


def main() -> None:
    """Train what is missing, compare, and write the page."""
    parser = argparse.ArgumentParser(description="Write the tables of faithfulness in the documentation.")
    parser.add_argument("--sst2", type=Path, help="folder with train.tsv and dev.tsv; if missing, skipped")
    parser.add_argument("--blimp", type=Path, help="BLiMP.zip; if missing, skipped")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="training text of the language model")
    parser.add_argument("--work", type=Path, default=Path("build/faithfulness"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the page (default: standard output)")
    parser.add_argument("--examples", type=int, help="how many sentences of SST-2 (default: all)")
    parser.add_argument(
        "--choices", type=int, default=150, help="likewise for gradients by choice (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=75, help="of each paradigm of BLiMP (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION]
    with progress():
        if arguments.sst2 is not None:
            folder = trained(work / "sentiment", lambda to: sentiment.train(arguments.sst2, to))
            run = partial(sst2, folder, arguments.sst2)
            masked = kept(work / "sst2-mask.json", lambda: run(arguments.examples, "mask", named(METHODS)))
            deleted = kept(work / "sst2-delete.json", lambda: run(arguments.examples, "delete", named(QUICK)))
            choices = kept(work / "sst2-gradients.json", lambda: run(arguments.choices, "mask", gradients))
            parts += about_sentiment(masked, deleted, choices)
        if arguments.blimp is not None:
            folder = trained(work / "language-model", lambda to: language_model.train(arguments.text, to))
            compared = partial(agreement.compared, folder, arguments.blimp, arguments.pairs, variants)
            pairs = kept(work / "agreement.json", compared)
            parts += about_agreement(pairs)
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
