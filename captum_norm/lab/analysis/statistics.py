"""Statistics that an analysis keeps of a corpus: sums in float64 and counts, whose size does not depend on it.

Those of each block are merged by addition, in the order of the corpus.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from captum_norm.attr.measurements import Measurements
from captum_norm.attr.norms import NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.corpus import Corpus, Encoder, TokenBatch, encoder_part
from captum_norm.lab.analysis.results import AnalysisResult, Plot, Table, cell
from captum_norm.models import input_device

Array = NDArray[Any]

LEAST, GREATEST = -127, 128
"""Exponents of a :class:`Grid` for all non-negative numbers of float32, with 0 in the first bin."""


class Statistic:
    """Arrays by name in ``parts``, merged by addition or by the function in ``joins``."""

    joins: ClassVar[Mapping[str, np.ufunc]] = MappingProxyType({})

    def __init__(self, **parts: Array) -> None:
        self.parts = parts

    def join(self, parts: Mapping[str, Array]) -> None:
        """Add the arrays of another part of the corpus."""
        for name, part in self.parts.items():
            self.joins.get(name, np.add)(part, parts[name], out=part)


class Summary(NamedTuple):
    """Mean, population standard deviation, minimum and maximum of the values in each cell, and their number."""

    mean: Array
    deviation: Array
    least: Array
    greatest: Array
    number: Array


class Moments(Statistic):
    """The number, sum, sum of squares, minimum and maximum of the values in each cell."""

    joins = MappingProxyType({"least": np.minimum, "greatest": np.maximum})

    def __init__(self, *shape: int) -> None:
        super().__init__(
            count=np.zeros(shape, np.int64),
            total=np.zeros(shape),
            squares=np.zeros(shape),
            least=np.full(shape, np.inf),
            greatest=np.full(shape, -np.inf),
        )

    def add(self, values: Tensor, present: Tensor) -> None:
        """Add values (N, ...) where ``present`` is True; both broadcast to (N, *shape)."""
        values, present = torch.broadcast_tensors(values.double(), present)
        chosen = values.where(present, 0)
        added = {
            "count": present.sum(0),
            "total": chosen.sum(0),
            "squares": chosen.square().sum(0),
            "least": values.where(present, torch.inf).amin(0),
            "greatest": values.where(present, -torch.inf).amax(0),
        }
        self.join({name: part.cpu().numpy() for name, part in added.items()})

    def summary(self) -> Summary:
        """Evaluate the values in each cell."""
        count = self.parts["count"]
        with np.errstate(invalid="ignore"):
            mean, square = self.parts["total"] / count, self.parts["squares"] / count
        # Rounding may make the variance negative.
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        return Summary(mean, deviation, self.parts["least"], self.parts["greatest"], count)

    def over(self, axis: int) -> "Moments":
        """Pool the cells along an axis."""
        pooled = Moments()
        for name, part in self.parts.items():
            pooled.parts[name] = np.asarray(self.joins.get(name, np.add).reduce(part, axis))
        return pooled


@dataclass(frozen=True)
class Grid:
    """Bins for positive numbers: 2^bits of equal width in every octave from 2^low to 2^high, others at the ends."""

    low: int
    high: int
    bits: int

    @property
    def size(self) -> int:
        """The number of bins."""
        return (self.high - self.low) << self.bits

    def places(self, values: Tensor) -> Tensor:
        """Return the bin of each value, int32."""
        # The index is the exponent and the first bits of the mantissa: four integer operations.
        first = (127 + self.low) << self.bits
        return (values.float().contiguous().view(torch.int32) >> (23 - self.bits)).sub_(first).clamp_(0, self.size - 1)


class Counts(Statistic):
    """Counts of pairs of values in the fields of a grid, by group; values in one bin share a rank."""

    def __init__(self, groups: int, rows: Grid, columns: Grid) -> None:
        self._groups, self._columns, self._size = groups, columns.size, rows.size * columns.size
        super().__init__(field=np.zeros(0, np.int64), count=np.zeros(0, np.int64))

    def add(self, fields: Tensor) -> None:
        """Add pairs by their field, (group · rows + row) · columns + column; that of the number of fields is none."""
        if fields.device.type == "cpu":
            used, count = np.unique(fields.numpy(), return_counts=True)
        else:
            used, count = (part.cpu().numpy() for part in fields.unique(return_counts=True))
        inside = used < self._groups * self._size
        self.join({"field": used[inside], "count": count[inside]})

    def join(self, parts: Mapping[str, Array]) -> None:
        """Add counts to those of the same fields."""
        known, count, fields, added = self.parts["field"], self.parts["count"], parts["field"], parts["count"]
        places = np.searchsorted(known, fields)
        old = np.append(known, -1)[places] == fields
        count[places[old]] += added[old]
        self.parts["field"] = np.insert(known, places[~old], fields[~old])
        self.parts["count"] = np.insert(count, places[~old], added[~old])

    def spearman(self) -> list[float]:
        """Return Spearman's correlation in each group; NaN if a value is constant."""
        ends = np.searchsorted(self.parts["field"], np.arange(self._groups + 1) * self._size)
        correlations = []
        for first, end in pairwise(ends):
            fields = divmod(self.parts["field"][first:end] % self._size, self._columns)
            (used, row), (columns, column) = (np.unique(places, return_inverse=True) for places in fields)
            table = np.zeros((len(used), len(columns)), np.int64)
            table[row, column] = self.parts["count"][first:end]
            rows = table.sum(1)
            ranks = midranks(rows)
            correlations.append(_from_sums(table.sum(0), ranks @ table, float(rows @ ranks**2)))
        return correlations


class RankedCounts(Statistic):
    """Spearman's correlation of values, binned by a grid, with numbers whose ranks are known, such as frequencies."""

    def __init__(self, groups: int, grid: Grid) -> None:
        self._grid = grid
        super().__init__(
            count=np.zeros((groups, grid.size), np.int64), rank=np.zeros((groups, grid.size)), square=np.zeros(groups)
        )

    def add(self, ranks: Tensor, values: Tensor) -> None:
        """Add ranks (N,) and values (groups, N)."""
        ranks, places = ranks.double().cpu(), self._grid.places(values).cpu()
        size = self._grid.size
        for group, row in enumerate(places):
            self.parts["count"][group] += torch.bincount(row, minlength=size).numpy()
            self.parts["rank"][group] += torch.bincount(row, weights=ranks, minlength=size).numpy()
            self.parts["square"][group] += ranks.square().sum().item()

    def spearman(self) -> list[float]:
        """Return the correlation of each kind of values with the ranks; NaN if one of the two is constant."""
        parts = (self.parts[name] for name in ("count", "rank", "square"))
        return [_from_sums(*sums) for sums in zip(*parts, strict=True)]


def midranks(counts: Array) -> Array:
    """Return the mean rank of the values in each of some ascending bins, as a share of the number of values."""
    ranks: Array = (counts.cumsum() - (counts - 1) / 2) / max(counts.sum(), 1)
    return ranks


def _from_sums(count: Array, rank: Array, square: float) -> float:
    """The correlation of ranks from, for each bin of values, their count and sum of ranks, and all squares of ranks."""
    total = count.sum()
    if not total:
        return float("nan")
    places = midranks(count)
    mean, middle = rank.sum() / total, places @ count / total
    covariance = (places - middle) @ (rank - mean * count)
    variances = (square - total * mean**2) * (count @ (places - middle) ** 2)
    return float(covariance / np.sqrt(variances)) if variances > 0 else float("nan")


class AnalysisContext:
    """The model and the corpus of an analysis, and what the first input shows of the model."""

    def __init__(self, kind: type["Analysis"], model: nn.Module, encoder: Encoder, corpus: Corpus) -> None:
        first = next(chain.from_iterable(encoder.sequences([text]) for text in corpus.texts()), None)
        if first is None:
            raise InvalidInputError(f"{corpus.path} has no token that the tokenizer knows")
        self.model = encoder_part(model)
        self.meter = NormMeter(self.model)
        self.inputs = next(encoder.batches([first], 1)).inputs(input_device(self.model))
        ((stack, measured),) = self.meter.measure(self.inputs, head_norms=True, maps=False).items()
        norms: Any = measured.transformed_norms
        of_layers = measured.layer_scopes
        self.layers, self.heads = norms.shape[1:3]
        self.causal = stack == "decoder"
        self.scopes = [scope for scope in of_layers[0] if all(scope in layer for layer in of_layers)]
        self.categories = encoder.categories
        self._encoder, self._corpus = encoder, corpus
        self.prepared = kind.prepare(self)

    @cached_property
    def ranks(self) -> Tensor:
        """The mean frequency rank of each token, small for frequent ones, as a share of all not masked, (V,)."""
        counts = np.zeros(len(self.categories.of_token), np.int64)
        for sequence in chain.from_iterable(map(self._encoder.sequences, self._corpus.blocks())):
            visible = [token for place, token in enumerate(sequence.ids) if place not in sequence.masked]
            counts += np.bincount(visible, minlength=len(counts))
        _, groups = np.unique(-counts, return_inverse=True)
        return torch.from_numpy(midranks(np.bincount(groups, weights=counts)))[groups]


class Analysis(ABC):
    """One of the papers' experiments, as statistics that are updated batch by batch and merged."""

    name: ClassVar[str]
    description: ClassVar[str]
    mask_rate: ClassVar[float] = 0.0  # the default share of masked tokens

    options: Mapping[str, Any]  # of :meth:`captum_norm.NormMeter.measure`

    def __init__(self, context: AnalysisContext) -> None:
        self.context = context

    @property
    def statistics(self) -> list[Statistic]:
        """All statistics, which are attributes, in the order in which they were set."""
        return [value for value in vars(self).values() if isinstance(value, Statistic)]

    @classmethod
    def prepare(cls, context: AnalysisContext) -> Any:  # noqa: ARG003 - of those that need no more
        """Read what the analysis needs of the model besides the context, before the corpus is read."""
        return None

    def measure(self, batch: TokenBatch) -> Measurements:
        """Run the model on a batch."""
        inputs = batch.inputs(input_device(self.context.model))
        (measured,) = self.context.meter.measure(inputs, **self.options).values()
        return measured

    @abstractmethod
    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """Update the statistics with a batch."""

    @abstractmethod
    def result(self) -> AnalysisResult:
        """Evaluate the statistics; the result has no metadata yet."""

    def _seen(self, summary: Summary) -> tuple[Array, list[str]]:
        """Which categories of tokens, the last axis, occur, and the names of these."""
        seen: Array = np.asarray(summary.number.any(tuple(range(summary.number.ndim - 1))))
        return seen, [name for name, occurs in zip(self.context.categories.names, seen, strict=True) if occurs]

    def _result(self, summary: Mapping[str, Any], tables: Sequence[Table], plots: Sequence[Plot]) -> AnalysisResult:
        numbers: dict[str, Any] = {name: cell(value) for name, value in summary.items()}
        return AnalysisResult(self.name, self.description, numbers, tables, plots)
