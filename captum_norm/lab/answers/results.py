"""The result of a comparison of methods on answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.lab.comparison.results import Measure, sign_flip_p, undefeated
from captum_norm.results.base import Result
from captum_norm.text.characters import spelled_out

_RESAMPLES = 1000

ANSWER_MEASURES = (
    Measure("lds", "LDS", True, "Spearman's ρ of summed scores with the answer's logit, over random ablations"),
    Measure("drop", "drop", True, "log-probability that the answer loses without the best sources"),
    Measure("rise", "RISE", False, "area under the answer's log-probability as the best sources are taken out first"),
    Measure("mas", "MAS", False, "the same, plus its distance from the share of scores that is left"),
    Measure("soft_nc", "π-Soft-NC", True, "share of its log-probability that the answer loses in ablations by scores"),
    Measure("recovery", "recovery", True, "share of the evidence among the best 10 % of sources"),
    Measure("precision", "precision", True, "share of evidence among as many best sources as there is evidence"),
)
"""The measures in the order of the tables; the first one orders the rows."""


@dataclass(frozen=True, eq=False)
class AnswerScores:
    """What one method says of B answers.

    Attributes:
        signature: its class and all its choices.
        scores: of each source, (B, K), NaN where there is none, or the method refused the prompt.
        measures: of each answer by the name of the measure, (B,), NaN where it is not defined.
        refused: the reason for each answer; empty where it was explained.
        seconds: the time for all answers that it explained.
        forward_seconds: that of the plain forward pass over the same prompts and answers.
    """

    signature: str
    scores: Tensor
    measures: Mapping[str, Tensor]
    refused: Sequence[str]
    seconds: float
    forward_seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class AnswerComparison(Result):
    """The result of :func:`compare_answers`: several methods on the same B answers.

    Attributes:
        model: the name of the model or its class.
        answers: the answers.
        sources: the texts of each prompt's sources.
        evidence: the indices of the sources that each answer rests on, where they are known.
        log_probabilities: of each answer with all sources and with none, (B, 2).
        results: by method, in the requested order.
        skipped: the numbers of prompts that do not fit the model, counted from 0, each with the reason.
        baseline: the method that the others are compared with.
        signature: all choices that change numbers, and the versions of the packages.
    """

    model: str
    answers: Sequence[str]
    sources: Sequence[Sequence[str]]
    evidence: Sequence[Sequence[int]]
    log_probabilities: Tensor
    results: Mapping[str, AnswerScores]
    skipped: Sequence[str]
    baseline: str
    signature: str

    def __repr__(self) -> str:
        order = ", ".join(row["method"] for row in self.records())
        return spelled_out(f"AnswerComparison({self.model}: {len(self)} answers; by LDS: {order})")

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def concatenate(cls, parts: Sequence["AnswerComparison"]) -> "AnswerComparison":
        """Put comparisons of the same methods on other answers together."""
        joined: AnswerComparison = _joined(parts)
        return joined

    def best(self) -> dict[str, set[str]]:
        """Return the methods that no other is better than by more than chance, by measure, as ``Comparison.best``."""
        return {measure.name: undefeated(self.columns(measure.name), measure) for measure in ANSWER_MEASURES}

    def columns(self, measure: str) -> dict[str, Tensor]:
        """Return a measure of each answer by method, (B,) each."""
        return {name: result.measures[measure] for name, result in self.results.items()}

    def facts(self) -> dict[str, str]:
        """Return the names and values to show beside the numbers."""
        every, none = self.log_probabilities.mean(0).tolist()
        facts = {"model": self.model, "answers": str(len(self))}
        facts["log-probability"] = f"{every:.2f} with all sources, {none:.2f} with none"
        if self.skipped:
            facts[f"left out, {len(self.skipped)}"] = "; ".join(self.skipped)
        for name, result in self.results.items():
            reasons = [f"answer {number}: {reason}" for number, reason in enumerate(result.refused) if reason]
            facts |= {f"{name} refuses {len(reasons)}": reasons[0]} if reasons else {}
        return facts | {"baseline": self.baseline, "signature": self.signature}

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each method, by descending LDS.

        It has of each measure the mean over answers, ``_low`` and ``_high`` of its 95 % bootstrap interval, and ``_p``
        of a paired permutation test against the baseline; then cost, the number of answers refused, and the signature.
        """
        rows = []
        for name, result in self.results.items():
            row: dict[str, Any] = {"method": name}
            for measure, column in result.measures.items():
                low, high = _interval(column)
                row |= {measure: float(column.nanmean()), f"{measure}_low": low, f"{measure}_high": high}
                differences = _defined(column - self.columns(measure)[self.baseline])
                row[f"{measure}_p"] = sign_flip_p(differences) if len(differences) else math.nan
            ratio = result.seconds / result.forward_seconds if result.forward_seconds else math.nan
            row |= {"seconds": result.seconds, "forward_ratio": ratio}
            rows.append(row | {"refused": sum(map(bool, result.refused)), "signature": result.signature})
        return sorted(rows, key=lambda row: (math.isnan(row["lds"]), -row["lds"]))


def _joined(values: Sequence[Any]) -> Any:
    """Join tensors, lists and numbers of comparisons; their texts are the same."""
    first: Any = values[0]
    if isinstance(first, Tensor):
        width = max(value.shape[-1] for value in values)
        padded = [nn.functional.pad(each, (0, width - each.shape[-1]), value=math.nan) for each in values]
        return torch.cat(list(values) if first.dim() == 1 else padded)
    if isinstance(first, Mapping):
        return {key: _joined([value[key] for value in values]) for key in first}
    if isinstance(first, AnswerScores | AnswerComparison):
        return type(first)(**{name: _joined([getattr(value, name) for value in values]) for name in vars(first)})
    return first if isinstance(first, str) else sum(values) if isinstance(first, float) else [*chain(*values)]


def _defined(column: Tensor) -> Tensor:
    return column[~column.isnan()].double()


def _interval(column: Tensor) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of what is defined, by resamples that do not change."""
    values = _defined(column)
    if not len(values):
        return math.nan, math.nan
    drawn = torch.randint(len(values), (_RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
