r"""Which methods say what an answer rests on: ``python -m benchmarks.contexts FOLDER``.

All methods of a few forward passes, and those of :mod:`captum_norm.lab.surrogates`, explain answers to generated
prompts whose evidence is known, see :mod:`captum_norm.lab.prompts`, and are measured by
:func:`captum_norm.lab.answers.compare_answers`. ``FOLDER`` has a language model that answers them, such as ``python -m
benchmarks.context_model`` trains; only prompts whose answer it gives word for word count, drawn until there are enough.

```console
$ python -m benchmarks.contexts build/contexts --out docs/contexts.md
```

``--work`` keeps results in parts of a few prompts of each kind: an interrupted run resumes, and a larger ``--count``
adds to it.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.kept import kept, table
from captum_norm import progress
from captum_norm.bars import bar
from captum_norm.lab.answers import ANSWER_MEASURES, AnswerComparison, compare_answers
from captum_norm.lab.prompts import KINDS, EvidencePrompt, PromptKind, evidence_prompts
from captum_norm.lab.surrogates import ContextCite, HeadFeatures, HeadWeighted
from captum_norm.loading import load
from captum_norm.methods import METHODS
from captum_norm.show.text import with_interval

PART, MOST = 5, 20_000
"""Prompts of a kind in one part, and how many are drawn at most."""
SIZES: Mapping[str, Any] = {"ablations": 32, "steps": 10}
CITING = 64
"""Ablations of a prompt for ContextCite."""
TAUGHT, TAUGHT_BY = 1, 12
"""The seed of the prompts that heads learn from, and how many of each kind."""
BASELINE = "weights"

INTRODUCTION = """\
# What an answer rests on: methods compared

Written by `python -m benchmarks.contexts`. {headline}

{count} generated prompts of {passages} passages, {each} of each kind: *needle*,
where other passages share each word of the question; *tracking*, where the answer is handed on through several
passages; *conflict*, where one passage corrects another; *injection*, where a passage orders another answer; and
*paraphrase*, where the evidence says it in other words. Only prompts count whose answer the model gives word for word:
a LLaMA of {parameters:.1f} M parameters, trained on such prompts by the first three of four
stages of `python -m benchmarks.context_model`. A source is a passage;
[Compare methods](how-to/compare-methods.md) defines the measures and makes such a table of your own prompts.
"""
MEANING = """\
Means over prompts ± half the 95 % bootstrap interval; bold: no method is better by more than chance (paired permutation
test, p < .05). p compares the LDS with that of {baseline}, in either direction. {ablations} ablations a prompt for the
LDS, {steps} for π-Soft-NC and steps of a curve, one source taken out for the drop. *Learned*
weights of heads ({{py:class}}`~captum_norm.lab.surrogates.HeadWeighted`) come from {taught} other prompts;
{{py:class}}`~captum_norm.lab.surrogates.ContextCite` makes {citing} ablations of the very prompt. × forward is the time
divided by that of a plain forward pass, seconds are those of one prompt, on one CPU core that other work shared.
"""


@torch.no_grad()
def is_answered(model: Any, tokenizer: Any, prompt: EvidencePrompt) -> bool:
    """Return whether a model gives the answer word for word."""
    before = len(tokenizer(prompt.text)["input_ids"])
    ids = torch.tensor([tokenizer(prompt.text + prompt.answer)["input_ids"]])
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - before).logits
    return bool((logits[0].argmax(-1) == ids[0, before:]).all())


def answered(model: Any, tokenizer: Any, kind: PromptKind, count: int, passages: int, seed: int = 0) -> list[int]:
    """Return the places of the first prompts that a model answers."""
    places: list[int] = []
    with bar(f"asking, {kind}", count, "prompts") as shown:
        for place, prompt in enumerate(evidence_prompts(kind, MOST, seed, passages)):
            if is_answered(model, tokenizer, prompt):
                places.append(place)
                shown.update(1)
            if len(places) == count:
                return places
    raise SystemExit(f"the model answers {len(places)} of {MOST} prompts of the kind {kind}; expected {count}")


def taught(model: Any, tokenizer: Any, passages: int) -> list[EvidencePrompt]:
    """Return the prompts that heads learn from."""
    found = []
    for kind in KINDS:
        places = answered(model, tokenizer, kind, TAUGHT_BY, passages, TAUGHT)
        drawn = list(evidence_prompts(kind, places[-1] + 1, TAUGHT, passages))
        found += [drawn[place] for place in places]
    return found


def methods_of(model: Any, tokenizer: Any, work: Path, passages: int) -> dict[str, Any]:
    """Return all methods of a few forward passes, ContextCite, and heads weighted on prompts of another seed."""
    made: dict[str, Any] = {name: name for name, method in METHODS.items() if method.maps and name != "value-zeroing"}
    made[f"ContextCite, {CITING}"] = ContextCite(model, tokenizer, CITING)
    for features in get_args(HeadFeatures):
        path = work / f"{features}-{passages}.json"
        if not path.exists():
            HeadWeighted(model, tokenizer, features).fit(taught(model, tokenizer, passages)).save(path)
        made[f"heads' {features}, learned"] = HeadWeighted.load(path, model, tokenizer)
    return made


def results(folder: Path, work: Path, count: int, passages: int, rounds: int | None) -> dict[PromptKind, Any]:
    """Return the comparison of each kind, from the parts that are kept, in rounds of all kinds."""
    model, tokenizer = load(str(folder))
    methods = methods_of(model, tokenizer, work, passages)
    prompts: dict[PromptKind, list[EvidencePrompt]] = {}
    for kind in KINDS:
        find = lambda kind=kind: json.dumps(answered(model, tokenizer, kind, count, passages))  # noqa: E731
        places = kept(work / f"{kind}-{passages}-{count}.json", find)
        drawn = evidence_prompts(kind, places[-1] + 1, passages=passages)
        prompts[kind] = [prompt for place, prompt in enumerate(drawn) if place in {*places}]
    parts: dict[PromptKind, list[AnswerComparison]] = {kind: [] for kind in KINDS}
    for first in range(0, count if rounds is None else rounds * PART, PART):
        for kind in KINDS:
            path = work / f"{kind}-{passages}-{first}.safetensors"
            if not path.exists():
                some = prompts[kind][first : first + PART]
                options: dict[str, Any] = {"tokenizer": tokenizer, "baseline": BASELINE, "name": "llama", **SIZES}
                made = compare_answers(model, some, methods=methods, seed=first, **options)
                made.save(path)
                print(f"{kind}: {first + len(some)} prompts", flush=True)
            parts[kind].append(AnswerComparison.load(path))
    return {kind: AnswerComparison.concatenate(some) for kind, some in parts.items()}


def cell(row: Mapping[str, Any], measure: str, best: Mapping[str, set[str]]) -> str:
    """Format a mean ± half its interval, bold if no method is better by more than chance."""
    shown = with_interval(row, measure)
    return f"**{shown}**" if row["method"] in best[measure] else shown


def p_text(row: Mapping[str, Any], measure: str) -> str:
    """Format a p-value against the baseline."""
    value = row[f"{measure}_p"]
    return "–" if row["method"] == BASELINE else "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")


def headline(rows: Sequence[Mapping[str, Any]], best: Mapping[str, set[str]]) -> str:
    """Return the result in two sentences."""
    methods = [row for row in rows if row["method"] not in ("random", "leave one out")]
    behind = [row for row in methods if row["lds_p"] < 0.05 and row["lds"] < row_of(rows, BASELINE)["lds"]]
    ahead = [f"*{row['method']}*" for row in methods if row["lds_p"] < 0.05 and row not in behind]
    first = f"By LDS, *{methods[0]['method']}* says best what an answer rests on"
    equal = [f"*{row['method']}*" for row in methods[1:] if row["method"] in best["lds"]]
    more = f"; {', '.join(equal)} may be as good" if equal else ""
    return f"**{first}{more}.** Better than attention weights (p < .05) are {', '.join(ahead) or 'none'}."


def row_of(rows: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any]:
    """Return the row of a method."""
    return next(row for row in rows if row["method"] == method)


def page(found: Mapping[PromptKind, AnswerComparison], passages: int, parameters: float) -> str:
    """Return the text of the page."""
    every = AnswerComparison.concatenate(list(found.values()))
    rows = [row for row in every.records() if not math.isnan(row["lds"])]
    best = every.best()
    titles = [f"{measure.title} {measure.arrow}" for measure in ANSWER_MEASURES]
    whole = [
        [row["method"], cell(row, "lds", best), p_text(row, "lds")]
        + [cell(row, measure.name, best) for measure in ANSWER_MEASURES[1:]]
        + [f"{row['forward_ratio']:.1f}", f"{row['seconds'] / len(every):.2f}"]
        for row in rows
    ]
    names = [row["method"] for row in rows]
    by_kind = {kind: {row["method"]: row for row in some.records()} for kind, some in found.items()}
    parts = [
        INTRODUCTION.format(
            headline=headline(rows, best),
            count=len(every),
            each=len(every) // len(found),
            passages=passages,
            parameters=parameters,
        ),
        "![LDS of each method, with its cost in forward passes](_static/contexts.png)",
        "## All kinds",
        table(["", titles[0], "p", *titles[1:], "× forward", "seconds"], whole),
        MEANING.format(baseline=BASELINE, taught=TAUGHT_BY * len(KINDS), citing=CITING, **SIZES),
    ]
    for measure in (ANSWER_MEASURES[0], ANSWER_MEASURES[-1]):
        bests = {kind: some.best() for kind, some in found.items()}
        lines = [[name, *(cell(by_kind[kind][name], measure.name, bests[kind]) for kind in found)] for name in names]
        parts += [
            f"## {measure.title[0].upper()}{measure.title[1:]} by kind",
            f"{measure.meaning.capitalize()}.",
            table(["", *found], lines),
        ]
    reasons = {name: [why for why in row.refused if why] for name, row in every.results.items()}
    refused = [f"- {name}, {len(why)} prompts: {why[0]}" for name, why in reasons.items() if why]
    parts += ["Refused:\n\n" + "\n".join(refused)] if refused else []
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Compare, and write the page and its figure."""
    parser = argparse.ArgumentParser(description="Write the page on what answers rest on.")
    parser.add_argument("folder", type=Path, help="the language model")
    parser.add_argument("--count", type=int, default=100, help="prompts of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help=f"stop after {PART} prompts of each kind so many times")
    parser.add_argument("--passages", type=int, default=20, help="in each prompt (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/contexts-kept"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the page (default: standard output)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    with progress(terminal_only=True):
        found = results(given.folder, given.work, given.count, given.passages, given.rounds)
    model, _ = load(str(given.folder))
    text = page(found, given.passages, sum(each.numel() for each in model.parameters()) / 1e6)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
        figure = AnswerComparison.concatenate(list(found.values())).plot()
        figure.savefig(given.out.parent / "_static" / f"{given.out.stem}.png")


if __name__ == "__main__":
    main()
