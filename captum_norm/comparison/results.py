"""Results of a comparison of methods, as tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from captum_norm.comparison.measures import MEASURES
from captum_norm.comparison.significance import undefeated
from captum_norm.errors import InvalidInputError
from captum_norm.evaluation import FaithfulnessScores
from captum_norm.tables import csv_records, data_frame, json_text

if TYPE_CHECKING:
    import pandas as pd

TableName = Literal["methods", "scores", "agreement", "curves"]
"""A table of a comparison; see :meth:`Comparison.frame`."""

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class MethodResult:
    """The result of one method.

    Attributes:
        title: its title in tables.
        signature: its class and all its choices.
        scores: a score for each token, (B, S); 0 at padding.
        faithfulness: the faithfulness on each example.
        seconds: the time for all examples, after a warm-up.
        forward_ratio: the time divided by that of the plain forward pass of all examples.
    """

    title: str
    signature: str
    scores: Tensor
    faithfulness: FaithfulnessScores
    seconds: float
    forward_ratio: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of :func:`captum_norm.compare`: several methods on the same model and inputs.

    :func:`~captum_norm.visualization.draw_comparison`, :func:`~captum_norm.visualization.render_comparison` and
    :func:`~captum_norm.visualization.show_comparison` show it.

    Attributes:
        model: the name of the model or its class.
        explained: the kind of output that is explained and observed.
        targets: the target of each example.
        tokens: the tokens of each example, padding included.
        real: True at real positions, (B, S).
        removable: True at the tokens that are ranked and removed, (B, S).
        results: the results by method, in the requested order.
        refused: the reason by method, for methods that do not support the model or the inputs.
        agreement: Spearman's ρ of two methods' scores of removable tokens, averaged over examples, (M, M), in the order
            of ``results``.
        forward_seconds: the time of the plain forward pass of all examples, without gradients.
        accuracy: the share of examples that the model classifies correctly; None without labels.
        signature: all choices that change numbers, and the versions of the packages.
    """

    model: str
    explained: str
    targets: Sequence[str]
    tokens: Sequence[Sequence[str]]
    real: Tensor
    removable: Tensor
    results: Mapping[str, MethodResult]
    refused: Mapping[str, str]
    agreement: Tensor
    forward_seconds: float
    accuracy: float | None
    signature: str

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.tokens)

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

        See :func:`captum_norm.comparison.significance.undefeated`; none where no method is worse than another.
        """
        columns = {
            one.name: {name: getattr(result.faithfulness, one.name) for name, result in self.results.items()}
            for one in MEASURES
        }
        return {one.name: undefeated(columns[one.name], one) for one in MEASURES}

    @property
    def flat(self) -> bool:
        """Whether no method differs from the best one by any measure."""
        return not any(self.best().values())

    def facts(self) -> dict[str, str]:
        """Return the names and values to show beside the numbers."""
        facts = {"model": self.model, "explained": self.explained, "examples": str(self.examples)}
        if self.accuracy is not None:
            facts["accuracy"] = f"{self.accuracy:.1%}"
        facts["plain forward pass"] = f"{self.forward_seconds:.3g} s"
        if self.flat:
            facts["flat"] = "no method differs from the best by more than chance; take more texts, or another model"
        return facts | {"signature": self.signature}

    def frame(self, table: TableName = "methods") -> "pd.DataFrame":
        """Return a table as a data frame of pandas.

        Args:
            table: ``"methods"``: a row for each method, with faithfulness, cost and signature, or why it was refused.
                ``"scores"``: a row for each token, with example, position, token, whether it is removable, and every
                method's score. ``"agreement"``: Spearman's ρ between methods, a row and a column for each.
                ``"curves"``: a row for each method and share of removed tokens, with the mean output, most and least
                relevant tokens removed first.

        Raises:
            InvalidInputError: there is no such table, or pandas is not installed.
        """
        frame = data_frame(self._rows(table))
        return frame.set_index("method") if table in ("methods", "agreement") else frame

    def to_json(self) -> str:
        """Format everything as JSON; NaN is null."""
        content = {
            "model": self.model,
            "explained": self.explained,
            "signature": self.signature,
            "examples": self.examples,
            "accuracy": self.accuracy,
            "forward_seconds": self.forward_seconds,
            "targets": list(self.targets),
            **{table: list(rows(self)) for table, rows in _TABLES.items()},
        }
        return json_text(content)

    def to_csv(self, table: TableName = "methods") -> str:
        """Format a table as CSV; NaN is empty.

        Args:
            table: see :meth:`frame`.

        Raises:
            InvalidInputError: there is no such table.
        """
        return csv_records(self._rows(table))

    def _rows(self, table: str) -> list[Row]:
        if table not in _TABLES:
            raise InvalidInputError(f"got the table {table!r}; expected one of {', '.join(_TABLES)}")
        return list(_TABLES[table](self))


def _methods(comparison: Comparison) -> Iterator[Row]:
    means = comparison.means()
    for name, result in comparison.results.items():
        faithfulness = {measure.name: means[name][measure.name] for measure in MEASURES}
        cost = {"seconds": result.seconds, "forward_ratio": result.forward_ratio}
        yield {"method": name, **faithfulness, **cost, "signature": result.signature, "refused": None}
    nothing = dict.fromkeys([*(measure.name for measure in MEASURES), "seconds", "forward_ratio"], math.nan)
    for name, reason in comparison.refused.items():
        yield {"method": name, **nothing, "signature": None, "refused": reason}


def _scores(comparison: Comparison) -> Iterator[Row]:
    scores = {name: result.scores.tolist() for name, result in comparison.results.items()}
    removable = comparison.removable.tolist()
    for example, position in comparison.real.nonzero().tolist():
        yield {
            "example": example,
            "position": position,
            "token": comparison.tokens[example][position],
            "removable": removable[example][position],
            **{name: rows[example][position] for name, rows in scores.items()},
        }


def _agreement(comparison: Comparison) -> Iterator[Row]:
    for name, row in zip(comparison.results, comparison.agreement.tolist(), strict=True):
        yield {"method": name, **dict(zip(comparison.results, row, strict=True))}


def _curves(comparison: Comparison) -> Iterator[Row]:
    for name, result in comparison.results.items():
        curves = [curve.mean(0).tolist() for curve in (result.faithfulness.morf, result.faithfulness.lerf)]
        last = len(curves[0]) - 1
        for step, (most, least) in enumerate(zip(*curves, strict=True)):
            yield {"method": name, "removed": step / last, "morf": most, "lerf": least}


_TABLES = {"methods": _methods, "scores": _scores, "agreement": _agreement, "curves": _curves}
