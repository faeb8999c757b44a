r"""The documentation page on components and true patching: ``python -m benchmarks.components``.

Two small models learn the paradigms of :mod:`benchmarks.paradigms`, about a quarter of an hour each on one thread; then
every method estimates what patching each component with its counterfactual activation changes, and
:class:`captum_norm.ActivationPatching` measures it.

```console
$ python -m benchmarks.components --train build/components
$ python -m benchmarks.components build/components --out docs/components-benchmark.md
```

The folder keeps the models and what was measured of each, a JSON file: without it, the model is measured anew.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.circuits import circuits
from benchmarks.faithfulness import page
from benchmarks.kept import Content, kept, opened, table
from benchmarks.paradigms import PARADIGMS, Pair, accuracy, new_models, pairs, train, word_tokenizer
from benchmarks.ranking import with_interval
from captum_norm import (
    CPLRP,
    GIM,
    ActivationPatching,
    AttentionWeights,
    AttnLRP,
    ComponentAttribution,
    DecompX,
    Difference,
    NormAttribution,
    RelP,
)

KINDS = {"residual": "residual streams", "heads": "heads", "feed_forward": "feed-forward networks"}
KNOWN = 0.9
"""Accuracy above which a model knows a paradigm."""
GRADIENT = "attribution patching"
"""The method that others are compared with: the model's own gradient at the inputs."""
ROWS: Mapping[str, tuple[Callable[[Any], Any], int | None]] = {
    GRADIENT: (lambda model: model, None),
    "integrated gradients, 5 steps": (lambda model: model, 5),
    "RelP": (RelP, None),
    "CP-LRP": (CPLRP, None),
    "AttnLRP": (AttnLRP, None),
    "GIM": (GIM, None),
    "DecompX": (DecompX, None),
}
"""By row, what makes the method, and its steps."""
FOUND_ON = 20
"""The pairs of a paradigm on which circuits are found; as many others run them."""
NORMS, WEIGHTS = "norms, Σ‖αf(x)‖", "weights, Σα but for the start token"
OUTPUT_HEADS = "heads at the output position"

INTRODUCTION = """\
# Components and true patching

Written by `python -m benchmarks.components`. {class}`~captum_norm.ComponentAttribution` *estimates* with one backward
pass by how much an output changes if one component, such as a head at a position, has the activation that it has for
a counterfactual input; {class}`~captum_norm.ActivationPatching` *measures* that, at a forward pass for each component.
This page says how well the estimates of each method correlate with what is measured.
"""


def encoded(tokenizer: Any, drawn: Sequence[Pair]) -> tuple[Any, Any, Difference]:
    """Return inputs, counterfactuals and the target, the logit of the answer minus that of the counterfactual's."""
    texts, others = (
        dict(tokenizer([getattr(pair, name) for pair in drawn], padding=True, return_tensors="pt"))
        for name in ("text", "counterfactual")
    )
    answers = (tokenizer.convert_tokens_to_ids([getattr(pair, name) for pair in drawn]) for name in ("answer", "other"))
    return texts, others, Difference(*answers)


def correlation(estimated: Tensor, measured: Tensor) -> float:
    """Return Pearson's correlation over all places."""
    return float(torch.corrcoef(torch.stack([estimated.flatten(), measured.flatten()]).double())[0, 1])


def mixed(model: Any, inputs: Any) -> dict[str, Tensor]:
    """Return what norms and weights say of each head at the output position, (B, L, H)."""
    last, rows = inputs["attention_mask"].sum(1) - 1, torch.arange(len(inputs["attention_mask"]))
    norms, weights = (
        cast(Tensor, method.maps(inputs, per_head=True).decoder)[rows, :, :, last]
        for method in (NormAttribution(model), AttentionWeights(model))
    )
    return {NORMS: norms.sum(-1), WEIGHTS: weights[..., 1:].sum(-1)}


def measured(name: str, folder: Path, count: int) -> str:
    """Measure all methods on so many pairs of each paradigm that a model gets right, as JSON."""
    model, tokenizer = opened(folder, "cpu")
    accuracies, explained = dict[str, float](), dict[str, list[Pair]]()
    for paradigm in PARADIGMS:
        drawn = list(pairs(paradigm, 500, 7))
        accuracies[paradigm] = accuracy(model, tokenizer, drawn)
        known = (pair for pair in drawn if accuracy(model, tokenizer, [pair]) == 1)
        explained[paradigm] = list(islice(known, count if accuracies[paradigm] > KNOWN else 0))
    rows: dict[str, dict[str, list[float]]] = {kind: {} for kind in (*KINDS, OUTPUT_HEADS)}
    seconds: dict[str, float] = {}
    for drawn in filter(None, explained.values()):
        compared(model, encoded(tokenizer, drawn), rows, seconds)
    content = {
        "model": name,
        "accuracies": accuracies,
        "pairs": {paradigm: len(drawn) for paradigm, drawn in explained.items()},
        "correlations": rows,
        "seconds": seconds,
    }
    return json.dumps(content, ensure_ascii=False)


def compared(model: Any, asked: tuple[Any, Any, Any], rows: Any, seconds: dict[str, float]) -> None:
    """Add the correlations of every method for each pair of a batch to the rows."""
    inputs, counterfactual, target = asked
    options: Any = {"target": target, "counterfactual": counterfactual, "components": list(KINDS)}
    begun = time.perf_counter()

    def timed(name: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        seconds[name], begun = seconds.get(name, 0.0) + now - begun, now

    true = ActivationPatching(model).attribute(inputs, per_position=True, **options).parts
    timed("true patching")
    last = (inputs["attention_mask"].sum(1) - 1)[:, None, None, None]
    real = inputs["attention_mask"].bool()

    def at_output(heads: Tensor) -> Tensor:
        return heads.gather(-1, last.expand(*heads.shape[:3], 1)).squeeze(-1).abs()

    def add(kind: str, name: str, estimates: Sequence[Tensor], truths: Sequence[Tensor]) -> None:
        rows[kind].setdefault(name, []).extend(map(correlation, estimates, truths))

    heads = at_output(true["heads"]["decoder"])
    for name, (make, steps) in ROWS.items():
        scores = ComponentAttribution(make(model)).attribute(inputs, steps=steps, **options).parts
        timed(name)
        for kind in KINDS:
            parts = [each[kind]["decoder"] for each in (scores, true)]
            estimates, truths = ([row[..., at] for row, at in zip(part, real, strict=True)] for part in parts)
            add(kind, name, estimates, truths)
        add(OUTPUT_HEADS, name, list(at_output(scores["heads"]["decoder"])), list(heads))
    for name, values in mixed(model, inputs).items():
        add(OUTPUT_HEADS, name, list(values), list(heads))


def areas(folder: Path) -> str:
    """Measure CPR and CMD of circuits in a model, by method and paradigm that the model knows, as JSON."""
    model, tokenizer = opened(folder, "cpu")
    found: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in ROWS}
    for paradigm in PARADIGMS:
        if accuracy(model, tokenizer, list(pairs(paradigm, 500, 7))) <= KNOWN:
            continue
        known = (pair for pair in pairs(paradigm, 500, 7) if accuracy(model, tokenizer, [pair]) == 1)
        drawn = list(islice(known, 2 * FOUND_ON))
        first, others = (encoded(tokenizer, part) for part in (drawn[:FOUND_ON], drawn[FOUND_ON:]))
        for name, (make, steps) in ROWS.items():
            method = ComponentAttribution(make(model))
            where: Any = {"components": "edges", "counterfactual": first[1], "steps": steps}
            scores = method.attribute(first[0], first[2], **where)
            runs = circuits(method, scores, others[0], others[2], counterfactual=others[1])
            found[name][paradigm] = runs.cpr, runs.cmd
    return json.dumps(found, ensure_ascii=False)


def p_value(values: Sequence[float], others: Sequence[float], draws: int = 10_000) -> float:
    """Return the two-sided p of a paired permutation test of means, by draws that do not change.

    Example:
        >>> p_value([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
        1.0
    """
    differences = np.subtract(values, others)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(draws, len(differences)))
    extreme = np.abs((signs * differences).mean(1)) >= abs(differences.mean()) - 1e-12
    return float((extreme.sum() + 1) / (draws + 1))


def against(values: Sequence[float], others: Sequence[float]) -> str:
    """Format how values differ from those of attribution patching: p of what is better, in italics of what is worse."""
    if values == others:
        return "–"
    p = p_value(values, others)
    said = "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")
    return said if mean(values) > mean(others) else f"*{said}*"


def by_model(content: Content) -> list[str]:
    """Return the section of one model."""
    rows = content["correlations"]
    header = ["", *(part for title in KINDS.values() for part in (title, "p")), "seconds"]
    lines = []
    for name in ROWS:
        cells = [
            part
            for kind in KINDS
            for part in (with_interval(rows[kind][name]), against(rows[kind][name], rows[kind][GRADIENT]))
        ]
        lines.append([name, *cells, f"{content['seconds'][name]:.1f}"])
    seconds = f"True patching took {content['seconds']['true patching']:.0f} s on one core."
    heads = [[name, with_interval(values)] for name, values in rows[OUTPUT_HEADS].items()]
    return [
        f"## {content['model']}",
        table(header, lines),
        seconds,
        f"### {content['model']}: which heads write the answer",
        table(["", "correlation with \\|effect\\|"], heads),
    ]


def learned(found: Sequence[Content]) -> str:
    """Return the table of what the models have learned."""
    rows = [
        [
            f"{paradigm}: *{next(pairs(paradigm, 1, 7)).text}* …",
            *(cell for each in found for cell in (f"{each['accuracies'][paradigm]:.1%}", str(each["pairs"][paradigm]))),
        ]
        for paradigm in PARADIGMS
    ]
    return table(["", *(cell for each in found for cell in (f"{each['model']}: right", "pairs"))], rows)


def ahead(found: Sequence[Content]) -> str:
    """Say where RelP is ahead of attribution patching, and where not, and what is best."""
    better, worse, open_ = list[str](), list[str](), list[str]()
    for each in found:
        for kind, title in KINDS.items():
            this, that = (each["correlations"][kind][name] for name in ("RelP", GRADIENT))
            sure = p_value(this, that) < 0.05
            (open_ if not sure else better if mean(this) > mean(that) else worse).append(f"{title} of {each['model']}")
    sentences = {
        "**RelP is ahead of attribution patching** (p < .05) for": better,
        "It is **behind** for": worse,
        "Their difference may be chance for": open_,
    }
    told = [f"{words} {', '.join(places)}." for words, places in sentences.items() if places]
    best: dict[str, list[str]] = {}
    for each in found:
        for kind, title in KINDS.items():
            means = {name: mean(values) for name, values in each["correlations"][kind].items()}
            best.setdefault(max(means, key=means.__getitem__), []).append(f"{title} of {each['model']}")
    told += [f"No method is above {name} for {', '.join(places)}." for name, places in best.items()]
    return " ".join(told)


def by_paradigm(found: Sequence[Content]) -> str:
    """Return the table of how far RelP is ahead in each paradigm."""
    rows, first = [], dict.fromkeys((each["model"] for each in found), 0)
    for paradigm in PARADIGMS:
        cells = []
        for each in found:
            start, count = first[each["model"]], each["pairs"][paradigm]
            first[each["model"]] += count
            for kind in KINDS:
                values = [each["correlations"][kind][name][start : start + count] for name in ("RelP", GRADIENT)]
                cells.append(with_interval([this - that for this, that in zip(*values, strict=True)]))
        rows.append([paradigm, *cells])
    return table(["", *(f"{each['model']}, {title}" for each in found for title in KINDS.values())], rows)


def of_circuits(found: Mapping[str, Content]) -> list[str]:
    """Return the section on circuits in some models."""
    told = (
        "CPR / CMD [Mueller et al. 2025] of circuits of the edges with the largest scores, whatever their "
        "signs, from .1 % of all edges to all; the others carry what their sources write for the counterfactual. CPR "
        "is the area under the circuits' faithfulness, CMD that under its distance to 1: near 1 and 0 if few edges do "
        f"what the model does. Edges are scored on {FOUND_ON} pairs of a paradigm; circuits run on as many others."
    )
    parts = ["## Circuits of edges", told]
    for model, by_method in found.items():
        cells = {name: ["{:.2f} / {:.2f}".format(*each) for each in row.values()] for name, row in by_method.items()}
        header = ["", *next(iter(by_method.values()))]
        parts += [f"### {model}: circuits", table(header, [[name, *row] for name, row in cells.items()])]
    return parts


def written_page(found: Sequence[Content], circuits_found: Mapping[str, Content]) -> str:
    """Return the page."""
    explained = (
        "Two models of four layers, 128 wide, trained from scratch: a GPT-2 (layer norms, GELU) and a LLaMA (RMS "
        "norms, gates, rotary positions, grouped queries). Each pair is a text and a counterfactual in which one word "
        "differs, which decides the next word; accuracy is that on both texts of 500 pairs of another seed. Explained "
        "is the logit of the answer minus that of the counterfactual's, of pairs of which the model gets both right, "
        f"in paradigms with an accuracy above {KNOWN:.0%}:"
    )
    measure = (
        "Below is Pearson's correlation of estimated with true effects over all places of a kind in a pair, that is, "
        "each layer at each position, and each head; means over pairs ± half the 95 % bootstrap interval. Positions "
        "before the word that differs count, where both are 0. p is that of a paired permutation test against "
        "attribution patching, not corrected for the number of tests, in italics where the method is worse. Seconds "
        "are of all kinds together, for all pairs."
    )
    heads = (
        "*Which heads write the answer* has the magnitude of each head's effect at the position that predicts the next "
        "word alone. Norms and weights, which know no target and no counterfactual, have a row there: what a head "
        "takes from all positions by norm, and from all but the start token by weight (all weights add up to 1)."
    )
    difference = "## By paradigm\n\nThe correlation of RelP minus that of attribution patching, mean ± half interval:"
    parts = [part for each in found for part in by_model(each)]
    parts += [difference, by_paradigm(found), *of_circuits(circuits_found)]
    return page(INTRODUCTION, ahead(found), explained, learned(found), measure, heads, *parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the models, or measure and write the page."""
    parser = argparse.ArgumentParser(description="Compare estimated with true effects of patching components.")
    parser.add_argument("folder", type=Path, help="folder of the models and of what was measured")
    parser.add_argument("--train", action="store_true", help="train the models, and nothing else")
    parser.add_argument("--pairs", type=int, default=60, help="of each paradigm (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the page (default: standard output)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.train:
        tokenizer = word_tokenizer()
        torch.manual_seed(1)
        for name, model in new_models(tokenizer).items():
            print(name, flush=True)
            train(model, tokenizer, options.folder / name.lower())
        return
    found, in_circuits = list[Content](), dict[str, Content]()
    for name in new_models(word_tokenizer()):
        folder = options.folder / name.lower()
        found.append(kept(folder.with_suffix(".json"), partial(measured, name, folder, options.pairs)))
        in_circuits[name] = kept(options.folder / f"{name.lower()}-circuits.json", partial(areas, folder))
    text = written_page(found, in_circuits)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
