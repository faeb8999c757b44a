"""Results of a comparison of methods: measures, which methods are best by them, and tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from captum_norm.checks import check_choice, check_index
from captum_norm.errors import InvalidInputError
from captum_norm.lab.evaluation import FaithfulnessScores, agreement
from captum_norm.results.base import Result
from captum_norm.results.outputs import NamedOutput, facts_of_outputs, named_alone
from captum_norm.results.tables import data_frame
from captum_norm.text.characters import spelled_out

if TYPE_CHECKING:
    import pandas as pd

TableName = Literal["methods", "scores", "agreement", "curves"]
"""A table of a comparison; see :meth:`Comparison.frame`."""

_LEVEL = 0.05
_EXACT = 12
_SAMPLES = 4096


@dataclass(frozen=True)
class Measure:
    """A column of the tables.

    Attributes:
        name: its name in frames and files; a score of :class:`captum_norm.lab.evaluation.FaithfulnessScores`.
        title: its title in tables.
        higher: whether higher is better.
        meaning: its meaning in one line.
    """

    name: str
    title: str
    higher: bool
    meaning: str

    @property
    def arrow(self) -> str:
        """↑ if higher is better, else ↓."""
        return "↑" if self.higher else "↓"


MEASURES = (
    Measure("relevance_gain", "gain", True, "area between the curves: least relevant first minus most relevant first"),
    Measure("aopc", "AOPC", True, "mean drop of the output along the curve, most relevant tokens removed first"),
    Measure("comprehensiveness", "compr.", True, "drop without the highest-ranked tokens, mean over the bins"),
    Measure("sufficiency", "suff.", False, "drop with only the highest-ranked tokens, mean over the bins"),
    Measure("log_odds", "log-odds", False, "change of the log-probability without the highest-ranked tokens"),
    Measure("spearman", "ρ", True, "Spearman's rank correlation with leave-one-out"),
    Measure("kendall", "τ", True, "Kendall's rank correlation with leave-one-out"),
)
"""The measures in the order of the tables; the first one orders the rows."""


def sign_flip_p(differences: Tensor) -> float:
    """Return the two-sided p-value of paired differences, (N,): how often flipped signs give a mean as far from 0."""
    count = len(differences)
    if count <= _EXACT:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=count)), dtype=torch.float64)
    else:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (_SAMPLES, count), generator=generator).double() * 2 - 1
        signs[0] = 1  # what was observed is one of them
    sums = (signs @ differences.double()).abs()
    return float((sums >= sums[0] - 1e-9 * differences.double().abs().sum()).double().mean())


def undefeated(values: Mapping[str, Tensor], measure: Measure) -> set[str]:
    """Return the methods that are best by a measure of each example, (N,) by method; see :meth:`Comparison.best`."""
    defined = {name: column.double() for name, column in values.items() if not column.isnan().all()}
    means = {name: float(column.nanmean()) for name, column in defined.items()}
    if not means:
        return set()
    sign = 1 if measure.higher else -1
    top = max(means, key=lambda name: sign * means[name])
    worse = set()
    for name, column in defined.items():
        behind = sign * (defined[top] - column)
        behind = behind[~behind.isnan()]
        if round(means[name], 3) != round(means[top], 3) and len(behind) and sign_flip_p(behind) < _LEVEL:
            worse.add(name)
    return defined.keys() - worse if worse else set()


@dataclass(frozen=True, eq=False)
class MethodResult:
    """The result of one method.

    Attributes:
        signature: its class and all its choices.
        scores: a score for each token, (B, S); 0 at padding.
        faithfulness: the faithfulness on each example.
        seconds: the time for all examples, after a warm-up.
        forward_ratio: the time divided by that of the plain forward pass of all examples.
    """

    signature: str
    scores: Tensor
    faithfulness: FaithfulnessScores
    seconds: float
    forward_ratio: float


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """The result of :func:`captum_norm.compare`: several methods on the same model and inputs.

    ``comparison[0]`` is that of the first example, without padding.

    Attributes:
        model: the name of the model or its class.
        explained: the kind of output that is explained and observed.
        outputs: the output explained of each example.
        tokens: the tokens of each example, padding included.
        real: True at real positions, (B, S).
        removable: True at the tokens that are ranked and removed, (B, S).
        results: the results by method, in the requested order.
        refused: the reason by method, for methods that do not support the model or the inputs.
        agreement: Spearman's ρ of two methods' scores of removable tokens, averaged over examples, (M, M), in the order
            of ``results``.
        forward_seconds: the time of the plain forward pass of all examples, without gradients.
        signature: all choices that change numbers, and the versions of the packages.
    """

    model: str
    explained: str
    outputs: Sequence[NamedOutput]
    tokens: Sequence[Sequence[str]]
    real: Tensor
    removable: Tensor
    results: Mapping[str, MethodResult]
    refused: Mapping[str, str]
    agreement: Tensor
    forward_seconds: float
    signature: str

    _axes = MappingProxyType(
        {"outputs": ("B",), "tokens": ("B",), "real": ("BS",), "removable": ("BS",), "agreement": ("MM",)}
    )

    @classmethod
    def _upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:  # noqa: ARG003
        """Leave out the accuracy and the titles that earlier files have; their outputs have names alone."""
        if "targets" in content:
            content["outputs"] = named_alone(content.pop("targets"))
        for result in content["results"].values():
            result.pop("title", None)
        return {name: value for name, value in content.items() if name != "accuracy"}

    def __repr__(self) -> str:
        refused = f"; refused: {', '.join(self.refused)}" if self.refused else ""
        order = ", ".join(self.ranking)
        size = f"{len(self)} examples, {self.real.shape[1]} tokens"
        first = facts_of_outputs(self.outputs)["explained"]
        return spelled_out(f"Comparison({first}; {self.model}: {size}; by relevance gain: {order}{refused})")

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, example: int) -> "Comparison":
        """Return the comparison on one example, without padding; times stay those of all examples."""
        place = check_index("example", example)
        if not -len(self) <= place < len(self):
            raise InvalidInputError(f"got example {place}; expected 0 to {len(self) - 1}")
        place %= len(self)
        row, real = slice(place, place + 1), self.real[place]
        results = {
            name: replace(result, scores=result.scores[row, real], faithfulness=result.faithfulness[row])
            for name, result in self.results.items()
        }
        removable = self.removable[row, real]
        return replace(
            self,
            outputs=self.outputs[row],
            tokens=[[token for token, is_real in zip(self.tokens[place], real.tolist(), strict=True) if is_real]],
            real=self.real[row, real],
            removable=removable,
            results=results,
            agreement=agreement({name: result.scores for name, result in results.items()}, removable).cpu(),
        )

    def __iter__(self) -> Iterator["Comparison"]:
        return (self[example] for example in range(len(self)))

    @property
    def ranking(self) -> list[str]:
        """The methods by descending relevance gain."""
        means = self.means()
        return sorted(means, key=lambda name: -means[name][MEASURES[0].name])

    def means(self) -> dict[str, dict[str, float]]:
        """Average each method's faithfulness over examples."""
        return {name: result.faithfulness.means() for name, result in self.results.items()}

    def best(self) -> dict[str, set[str]]:
        """Return the methods that no other is better than by more than chance, by measure.

        A method is worse if its mean is, to three decimals as tables show it, and p < 0.05 in a sign-flip test against
        the method of the best mean, over examples: of all flips for up to 12 examples, else of 4096 drawn ones. None
        is best where none is worse. Examples with NaN are left out.
        """
        best = {}
        for measure in MEASURES:
            values = {name: getattr(result.faithfulness, measure.name) for name, result in self.results.items()}
            best[measure.name] = undefeated(values, measure)
        return best

    def facts(self) -> dict[str, str]:
        """Return the names and values to show beside the numbers."""
        facts = facts_of_outputs(self.outputs) | {"observed": self.explained, "model": self.model}
        facts["examples"] = str(len(self))
        facts["plain forward pass"] = f"{self.forward_seconds:.3g} s"
        if not any(self.best().values()):
            facts["flat"] = "no method differs from the best by more than chance; take more texts, or another model"
        return facts | {"signature": self.signature}

    def records(self, table: TableName = "methods") -> list[dict[str, Any]]:
        """Return the rows of a table.

        Args:
            table: ``"methods"``: a row for each method, with faithfulness, cost and signature, or why it was refused.
                ``"scores"``: a row for each token, with example, the output explained, position, token, whether it is
                removable, and every method's score. ``"agreement"``: Spearman's ρ between methods, a row and a column
                for each. ``"curves"``: a row for each method and share of removed tokens, with the mean output, most
                and least relevant tokens removed first.

        Raises:
            InvalidInputError: there is no such table.
        """
        return list(_TABLES[check_choice("table", table, list(_TABLES))](self))

    def frame(self, table: TableName = "methods") -> "pd.DataFrame":
        """Return one of the tables of :meth:`records` as a data frame of pandas.

        Raises:
            InvalidInputError: there is no such table, or pandas is not installed.
        """
        frame = data_frame(self.records(table))
        return frame.set_index("method") if table in ("methods", "agreement") else frame

    def _json(self) -> Any:
        """Return everything."""
        return {
            "model": self.model,
            "explained": self.explained,
            "outputs": [asdict(output) for output in self.outputs],
            "signature": self.signature,
            "examples": len(self),
            "forward_seconds": self.forward_seconds,
            **{table: list(rows(self)) for table, rows in _TABLES.items()},
        }


def _methods(comparison: Comparison) -> Iterator[dict[str, Any]]:
    means = comparison.means()
    for name, result in comparison.results.items():
        faithfulness = {measure.name: means[name][measure.name] for measure in MEASURES}
        cost = {"seconds": result.seconds, "forward_ratio": result.forward_ratio}
        yield {"method": name, **faithfulness, **cost, "signature": result.signature, "refused": None}
    nothing = dict.fromkeys([*(measure.name for measure in MEASURES), "seconds", "forward_ratio"], math.nan)
    for name, reason in comparison.refused.items():
        yield {"method": name, **nothing, "signature": None, "refused": reason}


def _scores(comparison: Comparison) -> Iterator[dict[str, Any]]:
    scores = {name: result.scores.tolist() for name, result in comparison.results.items()}
    removable = comparison.removable.tolist()
    for example, position in comparison.real.nonzero().tolist():
        yield {
            "example": example,
            **comparison.outputs[example].record(),
            "position": position,
            "token": comparison.tokens[example][position],
            "removable": removable[example][position],
            **{name: rows[example][position] for name, rows in scores.items()},
        }


def _agreement(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for name, row in zip(comparison.results, comparison.agreement.tolist(), strict=True):
        yield {"method": name, **dict(zip(comparison.results, row, strict=True))}


def _curves(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for name, result in comparison.results.items():
        curves = [curve.mean(0).tolist() for curve in (result.faithfulness.morf, result.faithfulness.lerf)]
        last = len(curves[0]) - 1
        for step, (most, least) in enumerate(zip(*curves, strict=True)):
            yield {"method": name, "removed": step / last, "morf": most, "lerf": least}


_TABLES = {"methods": _methods, "scores": _scores, "agreement": _agreement, "curves": _curves}
