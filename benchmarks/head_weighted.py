r"""Do norms beat weights where heads are weighted by ablations: ``python -m benchmarks.head_weighted FOLDER``.

Heads are weighted on generated prompts of all kinds of :mod:`captum_norm.lab.prompts` of one seed, and what they say is
measured on prompts of another one, by the LDS: Spearman's correlation, over random ablations of passages, of the kept
passages' scores with the log-odds of the answer. Beside them stand equal weights of heads, and ContextCite by other
ablations of the same prompts. ``FOLDER`` has a language model that answers the prompts, such as ``python -m
benchmarks.context_model`` trains; only prompts whose answer it gives word for word count.

```console
$ python -m benchmarks.head_weighted build/contexts --out docs/head-weighted.md
```

``--work`` keeps what was computed of each prompt; an interrupted run resumes.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.components import p_value
from benchmarks.kept import table
from benchmarks.ranking import half_interval
from captum_norm.functional import spearman
from captum_norm.generation.ablations import SourceAblations
from captum_norm.lab.prompts import KINDS, EvidencePrompt, evidence_prompts
from captum_norm.lab.surrogates import PENALTY, HeadFeatures, HeadWeighted, drawn, lasso, ridge
from captum_norm.loading import load

MOST = 20_000
"""How many prompts of a kind are drawn at most."""
TAUGHT, TESTED = 1, 2
"""Seeds of the prompts that heads learn from, and of those that they are measured on."""
LEARNING, MEASURING, CITING = 32, 48, (32, 64, 256)
"""Ablations of a prompt to learn from, of one for the LDS, and of it for ContextCite."""
BASELINE = "weights, learned"

PAGE = """\
# Learned weights of heads, and ContextCite

Written by `python -m benchmarks.head_weighted`. {headline}

{taught} generated prompts of {passages} passages, of all kinds of `captum_norm.lab.prompts`, teach the
weights of heads, {learning} ablations each; {tested} of another seed measure them, by {measuring} ablations each. Only
prompts count whose answer the model gives word for word: a LLaMA of {parameters:.1f} M parameters, trained by
the first three of four stages of `python -m benchmarks.context_model`. A source is a passage,
and the LDS is Spearman's correlation, over ablations, of
the kept passages' scores with the answer's log-odds. *Learned* is
{{py:class}}`~captum_norm.lab.surrogates.HeadWeighted`, *equal* the sum over all heads.
{{py:class}}`~captum_norm.lab.surrogates.ContextCite` sees ablations of the very prompt that it explains, the
others run it once or twice. How heads learn was chosen on the prompts that teach them.

{table}

Means over prompts ± half the 95 % bootstrap interval; p is that of a paired permutation test against learned
attention weights, not corrected for several comparisons. Learned by fewer prompts:

{fewer}
"""


@torch.no_grad()
def is_answered(model: Any, tokenizer: Any, prompt: EvidencePrompt) -> bool:
    """Return whether a model gives the answer word for word."""
    before = len(tokenizer(prompt.text)["input_ids"])
    ids = torch.tensor([tokenizer(prompt.text + prompt.answer)["input_ids"]])
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - before).logits
    return bool((logits[0].argmax(-1) == ids[0, before:]).all())


def answered(model: Any, tokenizer: Any, seed: int, passages: int) -> Iterator[EvidencePrompt]:
    """Yield prompts that a model answers, of each kind in turn."""
    draws = [evidence_prompts(kind, MOST, seed, passages) for kind in KINDS]
    while True:
        for draw in draws:
            yield next(prompt for prompt in draw if is_answered(model, tokenizer, prompt))


def measured(
    model: Any, tokenizer: Any, work: Path, seed: int, sizes: Mapping[str, int], *, passages: int, count: int
) -> list[dict[str, Tensor]]:
    """Return of each prompt what heads read, ablations, and what the answer's log-odds are in these."""
    files = [work / f"{seed}-{passages}-{number}.safetensors" for number in range(count)]
    methods = {name: HeadWeighted(model, tokenizer, name) for name in get_args(HeadFeatures)}
    prompts = answered(model, tokenizer, seed, passages)
    for number, path in enumerate(files if not all(path.exists() for path in files) else ()):
        prompt = next(prompts)
        if path.exists():
            continue
        ablations = SourceAblations(model, tokenizer, prompt.text, prompt.answer, segments=prompt.passages)
        found = {name: method.features_of(ablations).contiguous() for name, method in methods.items()}
        for name, size in sizes.items():
            draw = torch.Generator().manual_seed(1_000 * number + len(found))
            found[f"{name} kept"], found[name] = drawn(ablations, size, draw)
        found["tokens"] = torch.tensor(len(ablations.answer))
        save_file(found, path)
        print(f"seed {seed}: {number + 1} of {count} prompts", flush=True)
    return list(map(load_file, files))


def learned(prompts: Sequence[Mapping[str, Tensor]], features: str) -> Tensor:
    """Return the weights of heads, (F,), that prompts teach, as :class:`HeadWeighted` learns them."""
    inputs = [prompt["lds kept"].double() @ prompt[features].flatten(0, 1).T for prompt in prompts]
    return ridge(torch.stack(inputs), torch.stack([prompt["lds"] for prompt in prompts]))


def lds(scores: Tensor, prompt: Mapping[str, Tensor]) -> float:
    """Return Spearman's correlation of kept sources' scores with the answer's log-odds; 0 for equal scores."""
    kept, odds = prompt["lds kept"][:MEASURING], prompt["lds"][:MEASURING]
    return float(spearman(kept.to(scores) @ scores, odds).nan_to_num())


def scored(prompts: Sequence[Mapping[str, Tensor]], features: str, weights: Tensor) -> list[float]:
    """Return the LDS of each prompt for weights of heads."""
    return [lds(weights @ prompt[features].flatten(0, 1), prompt) for prompt in prompts]


def cited(prompts: Sequence[Mapping[str, Tensor]], count: int) -> list[float]:
    """Return the LDS of ContextCite by so many ablations of each prompt."""
    found = []
    for prompt in prompts:
        kept, odds = prompt["cited kept"][:count], prompt["cited"][:count]
        found.append(lds(lasso(kept, odds / prompt["tokens"], PENALTY), prompt))
    return found


def p_text(p: float) -> str:
    """Format a p-value."""
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)


def page(
    taught: Sequence[Mapping[str, Tensor]], tested: Sequence[Mapping[str, Tensor]], passages: int, parameters: float
) -> str:
    """Return the text of the page."""
    rows: dict[str, list[float]] = {}
    names = get_args(HeadFeatures)
    for name in names:
        rows[f"{name}, learned"] = scored(tested, name, learned(taught, name))
        rows[f"{name}, equal"] = scored(tested, name, torch.ones_like(learned(taught[:1], name)))
    rows |= {f"ContextCite, {count} ablations": cited(tested, count) for count in CITING}
    p = {name: p_value(values, rows[BASELINE]) for name, values in rows.items()}
    order = sorted(rows, key=lambda name: -mean(rows[name]))
    by_kind = [
        [name, f"{mean(rows[name]):.3f} ± {half_interval(rows[name]):.3f}"]
        + ["–" if name == BASELINE else p_text(p[name]).removeprefix("p ").removeprefix("= ")]
        + [f"{mean(rows[name][place :: len(KINDS)]):.2f}" for place in range(len(KINDS))]
        for name in order
    ]
    counts = [count for count in (10, 20, 40) if count < len(taught)] + [len(taught)]
    fewer = [
        [name, *(f"{mean(scored(tested, name, learned(taught[:count], name))):.3f}" for count in counts)]
        for name in names
    ]
    said = []
    for name in ("norms", "updates"):
        values, chance = rows[f"{name}, learned"], p[f"{name}, learned"]
        better = "better" if mean(values) > mean(rows[BASELINE]) else "worse"
        verdict = f"are {better} than" if chance < 0.05 else "are no better than"
        said.append(
            f"{name} {verdict} attention weights ({mean(values):.3f} to {mean(rows[BASELINE]):.3f}, {p_text(chance)})"
        )
    norms, weights = rows["norms, equal"], rows["weights, equal"]
    alone = (
        f"norms have an LDS of {mean(norms):.3f} and weights {mean(weights):.3f} ({p_text(p_value(norms, weights))})"
    )
    return PAGE.format(
        headline=f"**By what ablations teach of heads, {said[0]}; {said[1]}.** Added up over all heads, {alone}.",
        taught=len(taught),
        tested=len(tested),
        passages=passages,
        learning=LEARNING,
        measuring=MEASURING,
        parameters=parameters,
        table=table(["", "LDS", "p", *KINDS], by_kind),
        fewer=table(["learned by prompts", *map(str, counts)], fewer),
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="Write the page on learned weights of heads, and ContextCite.")
    parser.add_argument("folder", type=Path, help="the language model")
    for name, default in (("taught", 60), ("tested", 100), ("passages", 10)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("build/head-weighted-kept"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the page (default: standard output)")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(str(given.folder))
    parameters = sum(each.numel() for each in model.parameters()) / 1e6
    taught, tested = (
        measured(model, tokenizer, given.work, seed, sizes, passages=given.passages, count=count)
        for seed, sizes, count in (
            (TAUGHT, {"lds": LEARNING}, given.taught),
            (TESTED, {"lds": MEASURING, "cited": max(CITING)}, given.tested),
        )
    )
    text = page(taught, tested, given.passages, parameters)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
