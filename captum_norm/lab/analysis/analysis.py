"""Base class of the analyses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from captum_norm.attr import Measurements, NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.results import AnalysisResult, Plot, Table
from captum_norm.lab.analysis.sequences import Categories, TokenBatch
from captum_norm.lab.analysis.statistics import Array, Statistic, dump, restore
from captum_norm.models import Scope, Stage, input_device


@dataclass(frozen=True)
class AffineMap:
    """One layer's f(x) = Σ_h f_h(x) = x W + b, without the output projection's bias, and the norm behind the sum."""

    weight: Array
    bias: Array
    norm: Array | None


@dataclass(frozen=True)
class AnalysisContext:
    """The model and the corpus of an analysis.

    Attributes:
        meter: measures the model.
        layers: L.
        heads: H.
        causal: whether the model only looks back.
        scopes: the scopes of the attention blocks.
        categories: the categories of tokens.
        texts: the text of each token, (V,).
        ranks: the frequency rank of each token id among all tokens of the corpus, as a share of their number, small for
            frequent tokens, (V,); None if the analysis does not need it.
        stages: the scopes through the whole layer; empty if the analysis does not need them.
        decode: returns the text of token ids.
        affine_maps: read each layer's f from the model; empty if the analysis does not need it.
    """

    meter: NormMeter
    layers: int
    heads: int
    causal: bool
    scopes: tuple[Scope, ...]
    categories: Categories
    texts: Sequence[str] = ()
    ranks: Tensor | None = None
    stages: tuple[Stage, ...] = ()
    decode: Callable[[list[int]], str] = str
    affine_maps: Sequence[Callable[[], AffineMap]] = ()


class Analysis(ABC):
    """One of the papers' experiments, as statistics that are updated batch by batch and merged.

    Attributes:
        name: its name on the command line.
        description: what it measures, and the paper it is from.
        needs_ranks: whether it needs the frequency ranks of tokens.
        needs_stages: whether it needs the scopes through the whole layer.
        needs_affine_maps: whether it needs attention's affine maps.
        mask_rate: the default share of masked tokens.
        context: the model and the corpus.
        statistics: the statistics by name.
        options: what to measure in a forward pass, arguments of :meth:`captum_norm.NormMeter.measure`.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    needs_ranks: ClassVar[bool] = False
    needs_stages: ClassVar[bool] = False
    needs_affine_maps: ClassVar[bool] = False
    mask_rate: ClassVar[float] = 0.0

    statistics: Mapping[str, Statistic]
    options: Mapping[str, Any]

    def __init__(self, context: AnalysisContext) -> None:
        self.context = context

    def merge(self, other: Self) -> None:
        """Add the statistics of another part of the corpus."""
        for name, statistic in self.statistics.items():
            statistic.merge(other.statistics[name])

    def state(self) -> bytes:
        """Serialize the statistics, for :meth:`restore`."""
        return dump(self.statistics)

    def restore(self, state: bytes) -> None:
        """Replace the statistics by those that :meth:`state` returned."""
        restore(self.statistics, state)

    def measure(self, batch: TokenBatch) -> Measurements:
        """Run the model on a batch."""
        inputs = batch.inputs(input_device(self.context.meter.model))
        (measured,) = self.context.meter.measure(inputs, **self.options).values()
        return measured

    @abstractmethod
    def update(self, batch: TokenBatch, measured: Measurements) -> None:
        """Update the statistics with a batch."""

    @abstractmethod
    def result(self) -> AnalysisResult:
        """Evaluate the statistics; the result has no metadata yet."""

    def token_values(self, batch: TokenBatch, measured: Measurements) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return the values to store for each token, (B, S) or (B, S, L) by name.

        Raises:
            InvalidInputError: the analysis has none.
        """
        raise InvalidInputError(f"the analysis {self.name} measures nothing of single tokens; leave the store out")

    def _result(
        self, summary: Mapping[str, float | None], tables: Sequence[Table], plots: Sequence[Plot]
    ) -> AnalysisResult:
        return AnalysisResult(self.name, self.description, summary, tables, plots)
