r"""Whether the cost of an answer grows with its length: ``python -m benchmarks.spans FOLDER``.

A language model such as ``python -m benchmarks.context_model`` trains reads passages; the answer goes on with other
passages until it has so many tokens, then asks the question and answers it. All its tokens are explained together, in
one backward pass; and for the recovery, the words that answer the question. Times are those of one CPU thread's work,
in turn with a plain forward pass over the same text.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.kept import table
from benchmarks.norms import alternate
from captum_norm import GIM, AttnLRP, GenerationAttribution
from captum_norm.lab.answers.measures import recovery
from captum_norm.lab.prompts import evidence_prompts
from captum_norm.loading import load

LENGTHS = (10, 100, 1000, 2500, 5000)
FLAT = 1.5
"""The most that the longest answer's ratio may be above the least, as is to be reached."""
PASSAGES = 20
METHODS = {"AttnLRP": AttnLRP, "GIM": GIM}


def texts(tokenizer: Any, length: int, number: int) -> tuple[str, list[int], int, Any]:
    """Return a prompt, an answer of so many tokens, how many of its last ones answer the question, and the passages."""
    prompt = list(evidence_prompts("needle", number + 1, passages=PASSAGES))[number]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    final = ids(prompt.answer)
    ending = ids("\n" + prompt.question) + final
    others = evidence_prompts("needle", 1000, seed=7 + number, passages=PASSAGES)
    between: list[int] = []
    while len(between) + len(ending) < length:
        between += ids("\n" + "\n".join(next(others).passages))
    answer = (between[: length - len(ending)] if length > len(ending) else []) + ending
    return "\n".join(prompt.passages), answer[-length:], len(final), prompt


def row(model: Any, tokenizer: Any, length: int, prompts: int, repeats: int) -> list[str]:
    """Measure answers of a length."""
    text, answer, _, prompt = texts(tokenizer, length, 0)
    ids = torch.tensor([tokenizer(text)["input_ids"] + answer])[:, :-1]

    def forward() -> object:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=len(answer))

    runs = [
        partial(GenerationAttribution(kind(model), tokenizer).attribute, text, answer, per_token=False)
        for kind in METHODS.values()
    ]
    plain, *taken = alternate([forward, *runs], repeats, time.process_time)
    right, recovered = 0, dict[str, list[float]]()
    for number in range(prompts):
        text, answer, final, prompt = texts(tokenizer, length, number)
        ids = torch.tensor([tokenizer(text)["input_ids"] + answer])
        with torch.no_grad():
            logits = model(ids[:, :-1], use_cache=False, logits_to_keep=final).logits[0]
        right += bool((logits.argmax(-1) == ids[0, -final:]).all())
        for name, kind in METHODS.items():
            found = GenerationAttribution(kind(model), tokenizer).attribute(
                text, answer, outputs=(len(answer) - final, len(answer)), segments=prompt.passages, per_token=False
            )
            best = recovery(found.segment_attr.double(), prompt.evidence, PASSAGES // 10)
            recovered.setdefault(name, []).append(best)
    cells = [
        cell
        for name, seconds in zip(METHODS, taken, strict=True)
        for cell in (f"{seconds:.2f}", f"{seconds / plain:.1f}", f"{mean(recovered[name]):.2f}")
    ]
    return [f"{length:,}", f"{plain:.2f}", *cells, f"{right / prompts:.0%}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the language model")
    parser.add_argument("--prompts", type=int, default=10, help="for the recovery (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(str(given.folder))
    header = ["tokens of the answer", "forward, s"]
    header += [cell for name in METHODS for cell in (f"{name}, s", "÷ forward", "recovery")] + ["answered"]
    rows = [row(model, tokenizer, length, given.prompts, given.repeats) for length in LENGTHS]
    print(table(header, rows))
    for place, name in enumerate(METHODS):
        ratios = [float(cells[3 + 3 * place]) for cells in rows]
        print(f"{name}: most ÷ least {max(ratios) / min(ratios):.2f} (≤ {FLAT})")


if __name__ == "__main__":
    main()
