"""Copied facts: which methods find the one passage of twenty that an answer rests on.

Prompts are those of :mod:`benchmarks.copied_facts`. A passage's score for an answer is the sum of its tokens' scores
over the answer's tokens; what the answer loses without a passage is measured by taking its text out of the prompt.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from benchmarks import copied_facts
from benchmarks.copied_facts import Prompt
from benchmarks.kept import ROLLED, Content, Opener, kept, kept_methods, passes, refusals, table
from benchmarks.ranking import first_share, reciprocal_rank, with_interval
from captum_norm import GenerationAttribution
from captum_norm.bars import bar
from captum_norm.errors import CaptumNormError
from captum_norm.generation import handed_on
from captum_norm.generation.prompts import read_answer, read_prompt, segments_of
from captum_norm.lab.comparison.methods import make_method, seeded
from captum_norm.lab.comparison.run import timed
from captum_norm.methods import METHODS

SEED = 17
SLOW = ("integrated-gradients",)
"""Methods of some dozens of forward passes, for the first prompts only."""
LEFT_OUT = ("value-zeroing", "gradient-shap", "occlusion", "shapley", "lime")
"""Methods of hundreds of forward passes over a prompt."""
REFERENCES = ("random",)
"""Methods that the table has a row for anyway."""
LEAVING_OUT, CHANCE, RIGHT = "leave one passage out", "a random passage", "the right passage"


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt and its answer, as the model reads them.

    Attributes:
        prompt: the prompt.
        ids: the token ids of prompt and answer but for the last one, (1, K).
        answer: the ids of the answer, which the last positions predict.
        passages: the passage of each token of the prompt, −1 for none.
    """

    prompt: Prompt
    ids: Tensor
    answer: Sequence[int]
    passages: Sequence[int]


def question_of(prompt: Prompt, tokenizer: Any) -> Question:
    """Tokenize a prompt and its answer."""
    read = read_prompt(prompt.text, tokenizer)
    answer = read_answer(prompt.answer, read, tokenizer)
    _, passages = segments_of(read, prompt.passages)
    return Question(prompt, torch.tensor([[*read.ids, *answer[:-1]]]), answer, passages)


def without(prompt: Prompt, passage: int) -> Prompt:
    """Take a passage out of a prompt."""
    kept_passages = tuple(text for index, text in enumerate(prompt.passages) if index != passage)
    return Prompt(kept_passages, prompt.question, prompt.answer, -1)


class AnswerLogits:
    """A readout: the sum of the logits of an answer's tokens, which the last positions predict."""

    def __init__(self) -> None:
        self.answer: Sequence[int] = ()

    def __call__(self, output: Any, real: Tensor) -> Tensor:  # noqa: ARG002 - a prompt has no padding
        """Read the answer's logits, (N,)."""
        rows = output.logits[:, -len(self.answer) :]
        answer = torch.tensor(self.answer, device=rows.device).expand(len(rows), -1)
        found: Tensor = rows.gather(2, answer[..., None]).sum((1, 2))
        return found


@torch.no_grad()
def log_probability(model: Any, question: Question) -> tuple[float, bool]:
    """Return the log-probability of the answer, and whether the model would give it."""
    logits = model(question.ids.to(model.device), logits_to_keep=len(question.answer)).logits[0].cpu()
    answer = torch.tensor(question.answer)
    chosen = logits.log_softmax(-1).gather(1, answer[:, None]).sum()
    return float(chosen), bool((logits.argmax(-1) == answer).all())


def asked(open_model: Opener, count: int) -> str:
    """Return for each prompt what the answer loses without each passage, as JSON."""
    model, tokenizer = open_model()
    rows = []
    with bar("leaving passages out", count, "prompts") as progress:
        for prompt in copied_facts.prompts(count, SEED):
            whole, right = log_probability(model, question_of(prompt, tokenizer))
            parts = [question_of(without(prompt, index), tokenizer) for index in range(len(prompt.passages))]
            falls = [whole - log_probability(model, part)[0] for part in parts]
            rows.append({"answered": right, "right": prompt.right, "log_probability": whole, "falls": falls})
            progress.update(1)
    return json.dumps({"layers": model.config.n_layer, "prompts": rows})


Scorer = Callable[[Question], Sequence[float]]
"""Scores the passages of a question."""
Rows = Mapping[str, Callable[[Any, Any], Scorer]]
"""Rows of the table: functions that make a scorer for a model and its tokenizer."""


def rows_of(names: Iterable[str]) -> Rows:
    """Return a row for each method of some names that can explain prompts of this length in the time of a benchmark.

    Beside rollouts of norms stand their means over layers: the sum of a passage's norms, and the norm of its vectors'
    sum. Spans add the vectors of the answer's tokens, as FlashTrace.
    """
    rows: dict[str, Callable[[Any, Any], Scorer]] = {
        **{name: partial(by_tokens, name) for name in names if name not in (*LEFT_OUT, *REFERENCES)},
        "norm, mean of layers": lambda model, tokenizer: by_segments(_layers("norm", model), tokenizer, added=True),
        "norm, of a passage's sum": lambda model, tokenizer: by_segments(_layers("norm", model), tokenizer),
        "alti, mean of layers": lambda model, tokenizer: by_segments(_layers("alti", model), tokenizer, added=True),
    }
    for name in ("alti", "norm"):
        for hops in (0, 1):
            rows[f"{name}, span" + (f", hops={hops}" if hops else "")] = partial(by_span, name, hops)
    return rows


def _layers(name: str, model: Any) -> Any:
    return METHODS[name].load()(model, aggregation="mean")


def by_tokens(name: str, model: Any, tokenizer: Any) -> Scorer:
    """Score passages by the sums of their tokens' scores, with a method by its name.

    Captum's methods explain the sum of the answer's logits.
    """
    readout = None if METHODS[name].maps else AnswerLogits()
    options: Any = {"removal": "mean", "tokenizer": tokenizer, "keep_special": True, "batch_size": 32}
    rolled = {"aggregation": "rollout"} if name in ROLLED else {}
    method = make_method(name, model, readout=readout, options=rolled, **options)
    return by_segments(method, tokenizer) if readout is None else partial(_of_logits, method, readout)


def by_segments(method: Attribution, tokenizer: Any, *, added: bool = False) -> Scorer:
    """Score passages as segments, or by their tokens' scores added."""
    explained = GenerationAttribution(method, tokenizer)

    def score(question: Question) -> Sequence[float]:
        prompt = question.prompt
        if added:
            whole = explained.attribute(prompt.text, prompt.answer).seq_attr
            return summed(whole[: len(question.passages)], question.passages, len(prompt.passages))
        result = explained.attribute(prompt.text, prompt.answer, segments=prompt.passages, per_token=False)
        found: list[float] = result.segment_attr.tolist()
        return found

    return score


def by_span(name: str, hops: int, model: Any, tokenizer: Any) -> Scorer:
    """Score passages by the vectors that their tokens give to all tokens of an answer together, averaged over layers.

    Hops hand the importance of the question's tokens, behind the passages, on to what their positions rest on.
    """
    method = _layers(name, model)
    explained = GenerationAttribution(method, tokenizer)

    def score(question: Question) -> Sequence[float]:
        prompt, count = question.prompt, len(question.passages)
        importance = explained.attribute(prompt.text, prompt.answer, per_token=False).seq_attr
        if hops:
            first = 1 + max(place for place, number in enumerate(question.passages) if number >= 0)
            ids = question.ids[:, :count].to(model.device)
            rows = method.scores_of_last({"input_ids": ids}, count - first)[0][0].cpu()
            rows = nn.functional.pad(rows, (0, len(importance) - count))
            importance = handed_on(importance, rows, first, hops)
        return summed(importance[:count], question.passages, len(prompt.passages))

    return score


def _of_logits(method: Any, readout: AnswerLogits, question: Question) -> Sequence[float]:
    readout.answer = question.answer
    scores = method.attribute(question.ids.to(method.model.device))[0, : len(question.passages)]
    return summed(scores, question.passages, len(question.prompt.passages))


def summed(scores: Tensor, passages: Sequence[int], count: int) -> list[float]:
    """Sum the scores of tokens, (K,), by passage.

    Example:
        >>> summed(torch.tensor([8.0, 1.0, 2.0, 4.0]), [-1, 1, 0, 1], 2)
        [2.0, 5.0]
    """
    index = torch.tensor(passages)
    sums = torch.zeros(count + 1, dtype=torch.float64).index_add_(0, index + 1, scores.detach().cpu().double())
    found: list[float] = sums[1:].tolist()
    return found


def scored(open_model: Opener, count: int, few: int, rows: Rows) -> str:
    """Score passages by some methods, as JSON."""
    model, tokenizer = open_model()
    questions = [question_of(prompt, tokenizer) for prompt in copied_facts.prompts(count, SEED)]
    methods = []
    with bar("scoring passages", len(rows), "methods") as progress:
        for name, make in rows.items():
            part = questions[:few] if name in SLOW else questions
            try:
                methods.append({"method": name, "refused": None, **measured(model, make(model, tokenizer), part)})
            except CaptumNormError as error:
                methods.append({"method": name, "refused": " ".join(str(error).split())})
            progress.update(1)
    return json.dumps({"methods": methods}, ensure_ascii=False)


def measured(model: Any, score: Scorer, questions: Sequence[Question]) -> dict[str, Any]:
    """Return the scores of all passages, and the time taken in forward passes over the same prompts, the median."""
    score(questions[0])
    found, ratios = [], []
    for index, question in enumerate(questions):
        with seeded(model, index):
            scores, seconds = timed(partial(score, question))
        ids = question.ids.to(model.device)
        with torch.no_grad():
            _, forward = timed(partial(model, ids))
        ratios.append(seconds / forward)
        found.append(list(scores))
    return {"forward_ratio": median(ratios), "scores": found}


def results(work: Path, open_model: Opener, count: int, few: int, rows: Rows) -> Content:
    """Return what answers lose without passages and all methods' scores, from files in ``work`` where kept."""
    content = kept(work / "passages-left-out.json", lambda: asked(open_model, count))
    run, methods = partial(scored, open_model, len(content["prompts"]), few), []
    for name, make in rows.items():
        methods = kept_methods(work / "passages.json", {name: make}, run, joined)["methods"]
    return {**content, "methods": methods}


def joined(old: Content, new: Content) -> Content:
    """Join the results of other methods on the same prompts."""
    return {"methods": [*old["methods"], *new["methods"]]}


def figures(scores: Sequence[Sequence[float]], prompts: Sequence[Content]) -> dict[str, list[float]]:
    """Return for each prompt answered the right passage's share, whether it ranks first, its rank, and the loss.

    Args:
        scores: of the passages of the first prompts.
        prompts: all of them, see :func:`asked`.
    """
    found: dict[str, list[float]] = {"share": [], "hit": [], "rank": [], "fall": []}
    for row, prompt in zip(scores, prompts, strict=False):
        if prompt["answered"]:
            size = sum(map(abs, row))
            found["share"].append(row[prompt["right"]] / size if size else 1 / len(row))
            found["hit"].append(first_share(row, prompt["right"]))
            found["rank"].append(reciprocal_rank(row, {prompt["right"]}))
            found["fall"].append(sum(first_share(row, index) * fall for index, fall in enumerate(prompt["falls"])))
    return found


def all_figures(content: Content) -> dict[str, dict[str, list[float]]]:
    """Return :func:`figures` of methods and references, hits first."""
    prompts = content["prompts"]
    known = {row["method"]: row["scores"] for row in content["methods"] if row["refused"] is None}
    known[LEAVING_OUT] = [prompt["falls"] for prompt in prompts]
    known[CHANCE] = [[0.0] * len(prompt["falls"]) for prompt in prompts]
    known[RIGHT] = [[float(index == prompt["right"]) for index in range(len(prompt["falls"]))] for prompt in prompts]
    found = {name: figures(scores, prompts) for name, scores in known.items()}
    return dict(sorted(found.items(), key=lambda item: [-mean(item[1][key]) for key in ("hit", "rank", "share")]))


def sections(content: Content) -> list[str]:
    """Return the section of the page."""
    prompts = content["prompts"]
    answered = sum(prompt["answered"] for prompt in prompts)
    passages = len(prompts[0]["falls"])
    what = (
        f"The same GPT-2 reads {passages} generated passages about as many people, and a question about one of them "
        "(`benchmarks.copied_facts`); names and facts are drawn anew, so only the right passage can tell the answer. "
        f"It answers {answered} of {len(prompts)} such prompts word for word, which are explained."
    )
    measured = (
        "A passage's score for the whole answer is the sum of its tokens' scores over the answer's tokens; methods "
        "that explain an output explain its tokens' logits, together where they can. Hits: the right passage ranks "
        "first. MRR: the mean of 1 / its rank. Share: its score, divided by the sum of the sizes of all passages' "
        "scores. Loss: what the answer's log-probability loses when the passage that ranks first is taken out of the "
        "text and the rest is read anew. Passes: the median time, in forward passes over the same prompt. ± half the "
        f"95 % bootstrap interval. {LEAVING_OUT.capitalize()}: the loss itself as a score."
    )
    spans = (
        "Spans: the vectors of the answer's tokens are added before contributions are taken, which are averaged over "
        "layers, as in FlashTrace [Pan et al. 2026]; with hops=1 what falls on the question's tokens is handed on to "
        "what their positions rest on. FlashTrace takes contributions of each head's vectors, keeps the residual "
        "connection apart, and adds the question's vectors, too, weighted by their importance; here ALTI takes those "
        "of all heads' sum, residual connections included, and each token of the question hands on by its own row."
    )
    costs = {row["method"]: passes(row) for row in content["methods"] if row["refused"] is None}
    costs[LEAVING_OUT] = str(passages)
    rows = [
        [
            name,
            costs.get(name, "–"),
            str(len(found["hit"])),
            *(with_interval(found[key]) for key in ("hit", "rank", "share", "fall")),
        ]
        for name, found in all_figures(content).items()
    ]
    left_out = f"Left out for their hundreds of passes over prompts of this length: {', '.join(LEFT_OUT)}."
    return [
        "## The passage that holds the answer: copied facts",
        what,
        measured,
        spans,
        table(["", "passes", "prompts", "hits ↑", "MRR ↑", "share ↑", "loss ↑"], rows),
        left_out,
        *refusals(content),
    ]
