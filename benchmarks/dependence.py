"""Do P-CXMI and the divergence tell the tokens of an answer that are copied from the context from those that are not?

```console
$ python -m benchmarks.dependence
$ python -m benchmarks.dependence --model FOLDER
```

Which are copied is planted: an answer is a template with words that were drawn for its prompt. The first token of a
drawn word is copied, tokens of the template are not; further tokens of a drawn word, which its beginning tells, do not
count. The context are all passages, or those alone that the answer rests on, which leaves others of the same form.
Prompts are those of :mod:`benchmarks.copied_facts`, asked of the model that comes with captum-norm; a model in a folder
is asked those of :mod:`captum_norm.lab.prompts`. Prints the area under the ROC curve of each score, with a 95 %
bootstrap interval over prompts, and the shares of copied and of other tokens with at least the default threshold.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import copied_facts
from captum_norm import GenerationAttribution, NormAttribution
from captum_norm.generation import GenerationResult
from captum_norm.lab.prompts import PromptKind, evidence_prompts
from captum_norm.loading import LANGUAGE_MODEL, load

COUNT, SEED, PASSAGES, RESAMPLES = 200, 7, 10, 1000
LISTS = ("SIZES", "COLOURS", "THINGS", "PLACES", "JOBS", "CITIES")
DRAWN = {word for name in LISTS for word in getattr(copied_facts, name)}


class Question(NamedTuple):
    """A prompt, its passages, its answer, and the passages that the answer rests on."""

    kind: str
    text: str
    passages: Sequence[str]
    answer: str
    evidence: Sequence[str]


class Token(NamedTuple):
    """A token of an answer: the number of its prompt, whether it is copied, and its scores."""

    prompt: int
    copied: bool
    pcxmi: float
    kl: float


def questions(model: str) -> Iterator[Question]:
    """Yield what a model is asked."""
    if model == LANGUAGE_MODEL:
        for fact in copied_facts.prompts(COUNT, SEED):
            yield Question("copied facts", fact.text, fact.passages, fact.answer, [fact.passages[fact.right]])
        return
    for kind in get_args(PromptKind):
        for prompt in evidence_prompts(kind, COUNT, SEED, PASSAGES):
            evidence = [prompt.passages[index] for index in prompt.evidence]
            yield Question(kind, prompt.text, prompt.passages, prompt.answer, evidence)


def planted(tokens: Sequence[str]) -> list[bool | None]:
    """Return whether each token of an answer is the first of a drawn word or a code, None for its further tokens.

    Example:
        >>> planted([" a", " gui", "tar", "."])
        [False, True, None, False]
    """
    words = {word.start(): word for word in re.finditer(r"\w+", "".join(tokens))}
    found: list[bool | None] = []
    place = 0
    for token in tokens:
        start = place + len(token) - len(token.lstrip())
        place += len(token)
        drawn = start in words and (words[start].group() in DRAWN or words[start].group().isdigit())
        inside = any(word.start() < start < word.end() for word in words.values())
        found.append(None if inside else drawn)
    return found


def auroc(scores: Any, copied: Any) -> float:
    """Return the probability that a copied token has a higher score than another one, where ties count half.

    Example:
        >>> auroc(np.array([0.9, 0.1, 0.1]), np.array([True, True, False]))
        0.75
    """
    others, positive = np.sort(scores[~copied]), scores[copied]
    below = np.searchsorted(others, positive, "left") + np.searchsorted(others, positive, "right")
    return float(below.mean() / 2 / len(others))


def interval(prompts: Any, scores: Any, copied: Any) -> tuple[float, float]:
    """Return the bootstrap interval over prompts of the area."""
    places = [np.flatnonzero(prompts == prompt) for prompt in np.unique(prompts)]
    draw, areas = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        index = np.concatenate([places[prompt] for prompt in draw.integers(len(places), size=len(places))])
        areas.append(auroc(scores[index], copied[index]))
    low, high = np.percentile(areas, [2.5, 97.5])
    return float(low), float(high)


def tokens_of(number: int, result: GenerationResult) -> Iterator[Token]:
    """Yield the tokens of an answer that count."""
    assert result.pcxmi is not None
    assert result.kl is not None
    scores = zip(planted(result.output_tokens), result.pcxmi.tolist(), result.kl.tolist(), strict=True)
    return (Token(number, copied, pcxmi, kl) for copied, pcxmi, kl in scores if copied is not None)


def main() -> None:
    """Print the areas for each kind of prompt and context."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=LANGUAGE_MODEL, help="the folder of a model (default: %(default)s)")
    name = parser.parse_args().model
    model, tokenizer = load(name)
    generation = GenerationAttribution(NormAttribution(model), tokenizer)
    rows: dict[tuple[str, str], list[Token]] = {}
    least = 0.0
    for number, (kind, text, passages, answer, evidence) in enumerate(questions(name)):
        for context, pieces in {"all passages": passages, "those it rests on": evidence}.items():
            result = generation.attribute(text, answer, context=pieces)
            least = result.explained.context_threshold
            rows.setdefault((kind, context), []).extend(tokens_of(number, result))
    table = Table(title=f"{name}, {COUNT} prompts of each kind")
    table.add_column("prompts, context")
    heads = ("copied", "others", "AUROC of P-CXMI", "AUROC of KL", f"copied with KL ≥ {least:g}", "others")
    for column in heads:
        table.add_column(column, justify="right")
    for (kind, context), tokens in rows.items():
        prompts, copied, pcxmi, kl = map(np.array, zip(*tokens, strict=True))
        areas = []
        for scores in (pcxmi, kl):
            low, high = interval(prompts, scores, copied)
            areas.append(f"{auroc(scores, copied):.4f} [{low:.4f}, {high:.4f}]")
        counts = [f"{(kl[of] >= least).mean():.1%}" for of in (copied, ~copied)]
        table.add_row(f"{kind}, {context}", str(copied.sum()), str((~copied).sum()), *areas, *counts)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
