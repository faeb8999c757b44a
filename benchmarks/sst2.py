"""Sentiment on SST-2: the faithfulness of methods, by removing tokens of sentences whose class is explained."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from captum.attr import InputXGradient, IntegratedGradients

from benchmarks import sentiment
from benchmarks.kept import Content, Methods, Opener, kept_methods, made, passes, refusals, table
from captum_norm import TokenAttribution, compare
from captum_norm.lab.comparison.results import MEASURES

PUBLISHED = {"GlobEnc": 0.307, "gradient × input": 0.310, "IG": 0.340, "ALTI": 0.416, "DecompX": 0.627}
"""AOPC on SST-2 of BERT-base [Modarressi et al. 2023]."""
OURS = {
    "GlobEnc": "globenc",
    "gradient × input": "input-gradient",
    "IG": "integrated-gradients",
    "ALTI": "alti",
    "DecompX": "decompx, absdot",
}


def gradients() -> Methods:
    """Return gradient methods with other baselines and reductions than ours."""

    def integrated(**options: Any) -> Any:
        choices: Any = {"keep_special": True, "n_steps": 30, **options}
        return lambda model, tokenizer: TokenAttribution(model, IntegratedGradients, tokenizer=tokenizer, **choices)

    return {
        "integrated gradients, mask, sum (ours)": "integrated-gradients",
        "integrated gradients, mask, L2": integrated(baseline="mask", reduction="l2"),
        "integrated gradients, zero, sum": integrated(baseline="zero"),
        "integrated gradients, zero, L2": integrated(baseline="zero", reduction="l2"),
        "gradient × input, sum (ours)": "input-gradient",
        "gradient × input, L2": lambda model, _: TokenAttribution(model, InputXGradient, reduction="l2"),
        "ALTI": "alti",
    }


def compared(open_model: Opener, data: Path, examples: int, removal: Any, methods: Methods) -> str:
    """Compare methods on the predicted classes of the development set, as JSON."""
    model, tokenizer = open_model()
    chosen = sentiment.read(data / "dev.tsv")[:examples]
    inputs = tokenizer([sentence for sentence, _ in chosen], padding=True, return_tensors="pt").to(model.device)
    comparison = compare(model, inputs, tokenizer=tokenizer, methods=made(methods, model, tokenizer), removal=removal)
    return json.dumps(
        json.loads(comparison.file_bytes(".json")) | {"accuracy": sentiment.accuracy(model, tokenizer, chosen)}
    )


def results(
    work: Path, open_model: Opener, data: Path, sentences: tuple[int, int], groups: Sequence[Methods]
) -> Mapping[str, Content]:
    """Return the comparisons, from files in ``work`` where kept.

    Args:
        work: the folder of the files.
        open_model: the classifier.
        data: the folder of SST-2.
        sentences: how many, and how many for gradients by choice.
        groups: methods in the order to run; all are compared with tokens masked, the first group with tokens deleted.
    """

    def found(name: str, count: int, removal: str, methods: Methods) -> Content:
        return kept_methods(work / f"sst2-{name}.json", methods, partial(compared, open_model, data, count, removal))

    examples, choices = sentences
    masked = [found("mask", examples, "mask", group) for group in groups]
    return {
        "mask": masked[-1],
        "delete": found("delete", examples, "delete", groups[0]),
        "gradients": found("gradients", choices, "mask", gradients()),
    }


def by_gain(content: Content) -> list[Content]:
    """Return the methods that support the model, by descending relevance gain."""
    return sorted((row for row in content["methods"] if row["refused"] is None), key=lambda row: -row["relevance_gain"])


def _best(values: Mapping[str, float], *, higher: bool) -> set[str]:
    """Return the names of the best values to three decimals, as the table shows them."""
    rounded = {name: round(value, 3) for name, value in values.items()}
    top = (max if higher else min)(rounded.values(), default=None)
    return {name for name, value in rounded.items() if value == top}


def measured(content: Content) -> str:
    """Return the table of one comparison and the refused methods."""
    header = ["", "passes", *(f"{measure.title} {measure.arrow}" for measure in MEASURES)]
    rows = by_gain(content)
    values = {
        measure.name: {row["method"]: row[measure.name] for row in rows if row[measure.name] is not None}
        for measure in MEASURES
    }
    best = {measure.name: _best(values[measure.name], higher=measure.higher) for measure in MEASURES}

    def cell(row: Content, name: str) -> str:
        if row[name] is None:
            return "–"
        shown = f"{row[name]:.3f}"
        return f"**{shown}**" if row["method"] in best[name] else shown

    lines = [[row["method"], passes(row), *(cell(row, measure.name) for measure in MEASURES)] for row in rows]
    return "\n\n".join([table(header, lines), f"`{content['signature']}`", *refusals(content)])


def beside_published(masked: Content, deleted: Content) -> str:
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


def alike(content: Content, most: int = 8) -> str:
    """Return a table of Spearman's ρ between the most faithful methods."""
    names = [row["method"] for row in by_gain(content)][:most]
    rows = {row["method"]: row for row in content["agreement"]}
    return table(["ρ", *names], [[name, *(f"{rows[name][other]:.2f}" for other in names)] for name in names])


def sections(masked: Content, deleted: Content, choices: Content) -> list[str]:
    """Return the sections on SST-2."""
    classifier = (
        f"The MiniLM encoder of the extra `demo`, fine-tuned (`benchmarks.sentiment`), labels {masked['accuracy']:.1%} "
        f"of the {masked['examples']} sentences correctly. The predicted class is explained; removed tokens become the "
        "mask token. Passes: the time taken, in forward passes over the same sentences in the same run."
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
